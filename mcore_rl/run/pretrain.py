"""One rank of a pretraining run: `mcore-rl pretrain`, or `torchrun ... -m mcore_rl.run.pretrain CONFIG.toml`."""

import sys
from collections.abc import Sequence
from pathlib import Path

from mcore_rl.backend import platform as platforms
from mcore_rl.backend.launcher import world_size_of_launcher
from mcore_rl.backend.processes import rank_guard
from mcore_rl.checks.run import check
from mcore_rl.config.load import load_config
from mcore_rl.config.run import PretrainConfig
from mcore_rl.data.index_file import unigram_entropy
from mcore_rl.data.indexed import DataPlan, SampleCounts, build_datasets, plan_data
from mcore_rl.obs.metrics import Metric
from mcore_rl.run.training import Data, batches, fitting, train
from mcore_rl.train.batch_size import total_samples
from mcore_rl.train.loop import Sources
from mcore_rl.train.run_folder import RunFolder
from mcore_rl.train.state import TrainState


def main(argv: Sequence[str]) -> int:
    """Train as the config file and overrides in `argv` say: 0 when all is done or the run was asked to stop."""
    with rank_guard():
        config = load_config(PretrainConfig, Path(argv[0]), argv[1:])
        check(config, world_size_of_launcher())
        data = data_of(config)
        platform = platforms.start(config.platform)
        train(config, data, platform)
        platforms.stop()
    return 0


def data_of(config: PretrainConfig) -> Data:
    """The datasets that `config` names, checked."""
    plan = plan_data(config.data, vocab_size=config.model.vocab_size, samples=sample_counts(config))

    def facts() -> list[Metric]:
        entropy = unigram_entropy(*(config.data.valid or config.data.train))
        return [Metric("data/unigram_nats", entropy)]

    return Data(begin=fitting(lambda state, folder: sources_of(config, plan, state, folder)), facts=facts)


def sample_counts(config: PretrainConfig) -> SampleCounts:
    """Sequences that the run reads of each split."""
    evaluated = (config.train.eval_batches or 0) * config.train.global_batch
    has_test = bool(config.data.test) or not config.data.valid
    return SampleCounts(train=total_samples(config.train), valid=evaluated, test=evaluated if has_test else 0)


def sources_of(config: PretrainConfig, plan: DataPlan, state: TrainState, folder: RunFolder) -> Sources:
    """Collective over the world: the batches of this data-parallel rank."""
    cache_dir = Path(config.data.cache_dir or folder.path / "index_cache")
    datasets = build_datasets(plan, seed=config.train.seed, cache_dir=cache_dir)
    assert datasets.train is not None
    return Sources(
        train=batches(state, datasets.train),
        seq_length=config.data.seq_length,
        valid=None if datasets.valid is None else batches(state, datasets.valid),
        test=None if datasets.test is None else batches(state, datasets.test),
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
