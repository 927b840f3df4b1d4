"""One rank of pretraining: `mcore-rl pretrain`, or `torchrun ... -m mcore_rl.programs.pretrain CONFIG.toml`."""

import sys
from collections.abc import Sequence
from pathlib import Path

from mcore_rl.checks.run import check
from mcore_rl.config.run import PretrainConfig
from mcore_rl.data.index_file import unigram_entropy
from mcore_rl.data.megatron.indexed import DataPlan, SampleCounts, build_datasets, plan_data
from mcore_rl.families import allows_te
from mcore_rl.megatron import platform as platforms
from mcore_rl.metrics.metrics import Metric
from mcore_rl.programs.open_run import is_done, open_run, run_rank
from mcore_rl.train.loop import SupervisedTrainer, total_samples
from mcore_rl.train.step import NextTokenHead
from mcore_rl.workers.launcher import world_size_of_launcher


def main(argv: Sequence[str]) -> int:
    """Pretrain on this rank; `argv` is a config file and overrides. Returns 0 when done or stopped as asked."""
    return run_rank(train, PretrainConfig, argv)


def train(config: PretrainConfig) -> None:
    """Collective over the ranks that a launcher started: pretrain to the last step, or until a stop is asked for."""
    # Everything that a user can get wrong comes first, before a model costs time.
    config = platforms.decided(config)
    check(config, world_size_of_launcher())
    plan = data_plan(config)
    if config.train.eval_batches is not None:
        # No more batches per evaluation than the data has.
        evaluated = [count for count in (plan.samples.valid, plan.samples.test) if count]
        batches = min(evaluated) // config.train.global_batch if evaluated else None
        config = config.model_copy(update={"train": config.train.model_copy(update={"eval_batches": batches})})
    platform = platforms.start(config.platform, allows_te=allows_te(config))
    if not is_done(config, platform):
        orders = {}
        if plan.shuffle == "whole":  # the run's length, among other values, decides the order of the sequences
            orders["data.shuffle"] = {
                f"data.train[{index}] = {source.prefix}": source.whole_order()
                for index, source in enumerate(plan.sources)
            }
        with open_run(config, platform, orders) as run:
            sources = [f"data: {source.describe(plan.samples.train)}" for source in plan.sources]
            for line in [*sources, *plan.warnings]:
                run.log.message(line)
            cache_dir = config.data.cache_dir
            datasets = build_datasets(
                plan,
                seed=config.train.seed,
                cache_dir=run.folder.path / "index_cache" if cache_dir == "auto" else Path(cache_dir),
            )
            assert datasets.train is not None
            if platform.rank == 0:
                # The loss of a model that knows only the frequency of each token.
                entropy = unigram_entropy(*(config.data.valid or config.data.train))
                run.log.write_now(run.state.progress.step, [Metric("data/unigram_nats", entropy)])
            SupervisedTrainer(
                run,
                NextTokenHead(),
                train=datasets.train,
                valid=datasets.valid,
                test=datasets.test,
                seq_length=config.data.seq_length,
            ).run()
    platforms.stop()


def data_plan(config: PretrainConfig) -> DataPlan:
    """Return the plan of the data, with the number of sequences that the run reads from each split."""
    data, train = config.data, config.train
    evaluated = (train.eval_batches or 0) * train.global_batch
    has_test = bool(data.test) or not data.valid
    counts = SampleCounts(train=total_samples(train), valid=evaluated, test=evaluated if has_test else 0)
    return plan_data(data, vocab_size=config.model.vocab_size, samples=counts, evaluated_at_once=train.global_batch)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
