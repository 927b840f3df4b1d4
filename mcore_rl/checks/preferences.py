"""Checks that all trainings on preferences share: of their data, its lengths and batches."""

from collections.abc import Iterator

from mcore_rl.checks.mesh import unequal_length_violations
from mcore_rl.checks.run import chat_violations, run_violations, weight_violations
from mcore_rl.config.preferences import PreferenceDataConfig, PreferenceRunConfig


def preference_violations(config: PreferenceRunConfig, world_size: int) -> Iterator[str]:
    """Yield a sentence for each reason, apart from its loss, why a training on preferences cannot run on `world_size`
    ranks.
    """
    data = config.data
    is_auto = data.tokens_per_microbatch == "auto"
    field = "2 x data.seq_length" if is_auto else "data.tokens_per_microbatch"
    yield from run_violations(config, world_size, config.packed_length, field)
    yield from unequal_length_violations(config.model, config.mesh)
    if not data.train:
        yield (
            'data.train is empty. Name files of JSON lines with "prompt", "chosen" and "rejected", or rankings with '
            '"responses".'
        )
    yield from weight_violations(
        "data.train_weights",
        data.train_weights,
        "data.train",
        data.train,
        "files",
        "to read every prompt once an epoch",
    )
    yield from chat_violations(data.tokenizer, data.chat_template, "preferences")
    yield from _lengths(data, config.model.max_position)
    if config.train.micro_batch != 1:
        yield (
            f"train.micro_batch={config.train.micro_batch} is not used: pairs are packed into forward passes of "
            "data.tokens_per_microbatch. Set it to 1, and that to what fits in memory."
        )


def _lengths(data: PreferenceDataConfig, max_position: int) -> Iterator[str]:
    if data.seq_length > max_position:
        yield (
            f"data.seq_length={data.seq_length} is more than model.max_position={max_position}. Shorten it."
        )
    if data.tokens_per_microbatch != "auto" and data.tokens_per_microbatch < 2 * data.seq_length:
        yield (
            f"data.tokens_per_microbatch={data.tokens_per_microbatch} does not hold two answers of data.seq_length="
            f"{data.seq_length}, and both sides of a pair share a forward pass. Raise it to {2 * data.seq_length} or "
            "more, or shorten data.seq_length."
        )
