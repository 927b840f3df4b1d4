"""A growing batch, in Megatron-LM's stages."""

from mcore_rl.config.run import TrainConfig
from mcore_rl.train.loop import batches, total_samples


def test_stages_are_those_of_megatron_lms_rampup_batch_size() -> None:
    """Three increments over 90 samples, each stage until a step begins 30 samples further on: the sizes that
    Megatron's calculator of 0.16 gives (0.19 has none), and that one counts by hand.
    """
    train = TrainConfig(steps=30, global_batch=16, ramp_start=4, ramp_increment=4, ramp_samples=90)
    assert [size for _, size in batches(train)] == [4] * 8 + [8] * 4 + [12] * 3 + [16] * 15


def test_without_a_ramp_every_step_is_alike() -> None:
    train = TrainConfig(steps=3, global_batch=8)
    assert list(batches(train)) == [(0, 8), (8, 8), (16, 8)]
    assert total_samples(train) == 24
