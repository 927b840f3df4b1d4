"""One rank of a pretraining run: `mcore-rl pretrain`, or `torchrun ... -m mcore_rl.run.pretrain CONFIG.toml`."""

import sys
from collections.abc import Sequence
from pathlib import Path

from mcore_rl.backend import platform as platforms
from mcore_rl.backend.launcher import world_size_of_launcher
from mcore_rl.backend.platform import Platform
from mcore_rl.backend.processes import rank_guard
from mcore_rl.config.checks import check
from mcore_rl.config.load import dump_config, load_config
from mcore_rl.config.run import PretrainConfig
from mcore_rl.data.index_file import unigram_entropy
from mcore_rl.data.indexed import DataPlan, SampleCounts, build_datasets, plan_data
from mcore_rl.data.loader import BatchSource, SampleDataset
from mcore_rl.obs.metrics import Metric
from mcore_rl.obs.sinks import Log, open_log, silent_log
from mcore_rl.parallel.agree import on_rank_zero
from mcore_rl.train.batch_size import total_samples
from mcore_rl.train.checkpoint import Checkpoints
from mcore_rl.train.loop import Fit, Sources
from mcore_rl.train.objectives import NextTokenHead
from mcore_rl.train.run_folder import RunFolder
from mcore_rl.train.setup import set_up
from mcore_rl.train.state import TrainState
from mcore_rl.train.stop import StopRequest


def main(argv: Sequence[str]) -> int:
    """Train as the config file and overrides in `argv` say: 0 when all is done or the run was asked to stop."""
    with rank_guard():
        config = load_config(PretrainConfig, Path(argv[0]), argv[1:])
        check(config, world_size_of_launcher())
        plan = plan_data(config.data, vocab_size=config.model.vocab_size, samples=sample_counts(config))
        platform = platforms.start(config.platform)
        train(config, plan, platform)
        platforms.stop()
    return 0


def train(config: PretrainConfig, plan: DataPlan, platform: Platform) -> None:
    """Collective over the world: from a checked config to DONE, or to the checkpoint at which a stop was asked for."""
    folder = RunFolder(Path(config.run_dir))
    if finished := folder.done():
        if platform.rank == 0:
            sys.stdout.write(f"nothing to do: {finished}\n")
        return
    fence = folder.claim()
    on_rank_zero(lambda: (folder.path / "config.toml").write_text(dump_config(config), encoding="utf-8"))
    state = set_up(config, platform)
    checkpoints = Checkpoints(state, folder.checkpoints, fence)
    checkpoints.resume()
    log = opened_log(state, folder)
    for line in [platform.describe(), *checkpoints.poll()]:
        log.say(line)
    with StopRequest(folder.stop_file) as stop:
        sources = build_sources(state, plan, folder)
        head = NextTokenHead()
        fit = Fit(state, head, sources, checkpoints=checkpoints, log=log, stop=stop.agreed)
        if fit.run():
            folder.mark_done(state.progress.step)
    log.close()
    fence.release()


def sample_counts(config: PretrainConfig) -> SampleCounts:
    """Sequences that the run reads of each split."""
    evaluated = config.train.eval_batches * config.train.global_batch
    has_test = bool(config.data.test) or not config.data.valid
    return SampleCounts(train=total_samples(config.train), valid=evaluated, test=evaluated if has_test else 0)


def build_sources(state: TrainState, plan: DataPlan, folder: RunFolder) -> Sources:
    """Collective over the world: the batches of this data-parallel rank."""
    config, dp = state.config, state.mesh.dp
    cache_dir = Path(config.data.cache_dir or folder.path / "index_cache")
    datasets = build_datasets(plan, seed=config.train.seed, cache_dir=cache_dir)

    def source(dataset: SampleDataset | None) -> BatchSource | None:
        if dataset is None:
            return None
        return BatchSource(dataset, micro_batch=config.train.micro_batch, dp_rank=dp.rank, dp_size=dp.size)

    train_source = source(datasets.train)
    assert train_source is not None
    return Sources(train=train_source, valid=source(datasets.valid), test=source(datasets.test))


def opened_log(state: TrainState, folder: RunFolder) -> Log:
    """The log of the run on rank 0, silent elsewhere."""
    config, step = state.config, state.progress.step
    if state.platform.rank != 0:
        return silent_log()
    log = open_log(folder.path, config.log, step, config.train.steps, config.model_dump(mode="json"))
    entropy = unigram_entropy(*(config.data.valid or config.data.train))
    log.write_now(step, [Metric("data/unigram_nats", entropy)])
    return log


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
