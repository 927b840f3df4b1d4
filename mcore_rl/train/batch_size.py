"""Global batch size of each step, with a batch size that grows at the start of a run."""

from collections.abc import Iterator

from mcore_rl.config.run import TrainConfig


def global_batch_at(train: TrainConfig, consumed_samples: int) -> int:
    """Return the number of sequences in the step that begins after `consumed_samples` sequences.

    The batch grows from ramp_start in equal stages to global_batch, as with Megatron-LM's --rampup-batch-size: each
    increment lasts for ramp_samples / number of increments.
    """
    if train.ramp_start is None or train.ramp_increment is None or train.ramp_samples is None:
        return train.global_batch  # the checks refuse a ramp with a missing field
    if consumed_samples >= train.ramp_samples:
        return train.global_batch
    increments = (train.global_batch - train.ramp_start) // train.ramp_increment
    stage = consumed_samples * increments // train.ramp_samples
    return min(train.ramp_start + stage * train.ramp_increment, train.global_batch)


def batches(train: TrainConfig) -> Iterator[tuple[int, int]]:
    """Yield, for every step of the run, the samples consumed before it and its global batch size."""
    consumed_samples = 0
    for _ in range(train.steps):
        size = global_batch_at(train, consumed_samples)
        yield consumed_samples, size
        consumed_samples += size


def total_samples(train: TrainConfig) -> int:
    """Return the number of sequences that the whole run reads."""
    return sum(size for _, size in batches(train))
