"""Whether the settings of a fine-tuning run agree with each other."""

from collections.abc import Iterator

from mcore_rl.config.checks import refuse, run_violations, tokenizer_violations
from mcore_rl.config.sft import SFTConfig, SFTDataConfig


def check_sft(config: SFTConfig, world_size: int) -> None:
    """ConfigError that lists everything wrong with running `config` on `world_size` ranks; else nothing."""
    data = config.data
    refuse(
        [
            *run_violations(config, world_size, data.row_length, "data.row_length"),
            *_data(data),
            *_spans(config),
        ]
    )


def _data(data: SFTDataConfig) -> Iterator[str]:
    if not data.train:
        yield 'data.train is empty. Name files of JSON lines with "messages", or "prompt" and "response".'
    yield from tokenizer_violations(data.tokenizer)
    if data.tokenizer.kind == "none":
        yield 'data.tokenizer.kind="none", but conversations are text. Set it, and data.tokenizer.path.'
    if data.tokenizer.kind == "sentencepiece" and data.chat_template not in ("plain", "raw"):
        yield (
            f'data.chat_template="{data.chat_template}" with data.tokenizer.kind="sentencepiece": a jinja template '
            'marks turns with special tokens, which a .model file alone does not name. Set it to "plain" or "raw".'
        )


def _spans(config: SFTConfig) -> Iterator[str]:
    multiple, zigzag, row_length = config.span_multiple, config.mesh.zigzag, config.data.row_length
    if multiple % zigzag:
        yield (
            f"data.span_multiple={multiple} with mesh.cp={config.mesh.cp}: each conversation is cut into {zigzag} "
            f"pieces. Use a multiple of {zigzag}, or 0."
        )
    elif config.data.span_multiple and row_length % multiple:
        yield (
            f"data.row_length={row_length} is not a multiple of data.span_multiple={multiple}: the rest of a row is "
            f"padding like a conversation. Use {max(1, row_length // multiple) * multiple}, or change the multiple."
        )
