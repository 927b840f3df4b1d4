"""A growing batch, in Megatron-LM's stages."""

from megatron.core.num_microbatches_calculator import RampupBatchsizeNumMicroBatchesCalculator

import mcore_rl.train  # noqa: F401
from mcore_rl.config.run import TrainConfig
from mcore_rl.train.batch_size import batches, total_samples


def test_stages_are_megatrons() -> None:
    train = TrainConfig(steps=30, global_batch=16, ramp_start=4, ramp_increment=4, ramp_samples=90)
    megatron = RampupBatchsizeNumMicroBatchesCalculator(16, 2, 1, False, 0, 4, 4, 90)
    for consumed, size in batches(train):
        megatron.update(consumed, consistency_check=False)
        assert size == megatron.get_current_global_batch_size(), consumed


def test_without_a_ramp_every_step_is_alike() -> None:
    train = TrainConfig(steps=3, global_batch=8)
    assert list(batches(train)) == [(0, 8), (8, 8), (16, 8)]
    assert total_samples(train) == 24
