"""Checks that the settings of a fine-tuning run are compatible."""

from collections.abc import Iterator

from mcore_rl.checks.run import batch_violations, chat_violations, refuse, run_violations, weight_violations
from mcore_rl.config.sft import SFTConfig, SFTDataConfig


def check_sft(config: SFTConfig, world_size: int) -> None:
    """Raise a ConfigError that lists everything wrong with running `config` on `world_size` ranks, if anything is."""
    data = config.data
    refuse(
        [
            *run_violations(config, world_size, data.seq_length, "data.seq_length"),
            *batch_violations(config.train, config.mesh, world_size),
            *_data(data),
            *_spans(config),
        ]
    )


def _data(data: SFTDataConfig) -> Iterator[str]:
    if not data.train:
        yield 'data.train is empty. Name files of JSON lines with "messages", or "prompt" and "response".'
    yield from weight_violations(
        "data.train_weights",
        data.train_weights,
        "data.train",
        data.train,
        "files",
        "to read every conversation once an epoch",
    )
    yield from chat_violations(data.tokenizer, data.chat_template, "conversations")


def _spans(config: SFTConfig) -> Iterator[str]:
    multiple, zigzag, seq_length = config.span_multiple, config.mesh.zigzag, config.data.seq_length
    if multiple % zigzag:
        yield (
            f"data.span_multiple={multiple} with mesh.cp={config.mesh.cp}: each conversation is cut into {zigzag} "
            f'pieces. Use a multiple of {zigzag}, or "auto".'
        )
    elif config.data.span_multiple != "auto" and seq_length % multiple:
        yield (
            f"data.seq_length={seq_length} is not a multiple of data.span_multiple={multiple}: the rest is "
            f"padded like a conversation. Use {max(1, seq_length // multiple) * multiple}, or change the multiple."
        )
