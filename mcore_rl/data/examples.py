"""Conversations of JSON lines as token arrays; every line that cannot be used is named."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
from numpy.typing import NDArray

from mcore_rl.config.sft import SFTDataConfig
from mcore_rl.data.chat import Chat, Conversation, EncodedConversation
from mcore_rl.data.records import Record, RecordReader, beyond_max, filled, listed
from mcore_rl.errors import DataError


@dataclass(frozen=True, kw_only=True, slots=True)
class Examples:
    """Token ids of all conversations, one after another."""

    ids_T: NDArray[numpy.int32]
    assistant_mask_T: NDArray[numpy.bool_]
    """True on the assistant's tokens."""
    starts_N: NDArray[numpy.int64]
    """Offset of each conversation's first token, and finally the end of the last conversation."""
    source_sizes: tuple[int, ...]
    """Number of the conversations that are of each file, in the order of the files."""
    num_skipped: int
    """Conversations that are longer than a packed sequence."""
    bad_lines: tuple[str, ...] = ()
    """File, line and reason of each line that was left out because it is no conversation."""

    def __len__(self) -> int:
        return len(self.starts_N) - 1

    @property
    def lengths_N(self) -> NDArray[numpy.int64]:
        """Positions that each conversation takes in a packed sequence: its last token is only a label."""
        lengths: NDArray[numpy.int64] = numpy.diff(self.starts_N) - 1
        return lengths

    @property
    def assistant_fraction(self) -> float:
        """Share of the tokens that are the assistant's."""
        return float(self.assistant_mask_T.mean())


def read_examples(paths: Sequence[str], config: SFTDataConfig, chat: Chat) -> Examples:
    """Return the conversations of `paths`, in order; one DataError lists the lines that cannot be trained on."""
    reader = ConversationReader(config, chat)
    ids, assistant_mask, source_ends = [], [], [0]
    for path in paths:
        for example in reader.read(path):
            # Converted at once: as Python's numbers a million conversations would not fit in memory.
            ids.append(numpy.array(example.ids_T, numpy.int32))
            assistant_mask.append(numpy.array(example.assistant_mask_T, numpy.bool_))
        source_ends.append(len(ids))
    if mistakes := [*beyond_max(reader.problems, config.max_bad), *reader.refused]:
        raise DataError(listed(mistakes))
    if not ids:
        long = f": all {reader.num_skipped} conversations are longer" if reader.num_skipped else ""
        raise DataError(
            f"{', '.join(paths)}: no conversation fits in data.seq_length={config.seq_length}{long}. Name files with "
            "conversations, or raise data.seq_length."
        )
    return Examples(
        ids_T=numpy.concatenate(ids),
        assistant_mask_T=numpy.concatenate(assistant_mask),
        starts_N=numpy.cumsum([0, *map(len, ids)], dtype=numpy.int64),
        source_sizes=tuple(numpy.diff(source_ends).tolist()),
        num_skipped=reader.num_skipped,
        bad_lines=tuple(reader.problems),
    )


class ConversationReader(RecordReader[EncodedConversation]):
    """A reader of conversations as tokens, those that fit in a packed sequence."""

    def __init__(self, config: SFTDataConfig, chat: Chat) -> None:
        super().__init__("conversations", skips_long=config.too_long == "skip")
        self._config = config
        self._chat = chat

    def _example(self, record: Record) -> EncodedConversation:
        """Return the conversation of a record; a DataError without file and line when there is nothing to train on."""
        if record.entry is None:
            raise DataError(record.problem)
        conversation = _conversation(record.entry, self._config)
        example = self._chat.encode(conversation)
        if not any(example.assistant_mask_T[1:]):
            raise DataError("the assistant has no text in it, as this template renders it")
        return example

    def _excess(self, example: EncodedConversation) -> str | None:
        length = len(example.ids_T) - 1
        if length <= self._config.seq_length:
            return None
        return f"{length} tokens, and data.seq_length={self._config.seq_length}. Raise it"


def _conversation(entry: Mapping[str, Any], config: SFTDataConfig) -> Conversation:
    wanted = config.format
    if wanted == "auto":
        has_messages = config.messages_field in entry
        is_pair = config.prompt_template is not None or config.prompt_field in entry
        wanted = "prompt_response" if is_pair and not has_messages else "chat"
    if wanted == "chat":
        return Conversation(
            messages=tuple(_messages(entry, config.messages_field)), tools=tuple(_tools(entry))
        )
    keys = [config.response_field]
    if config.prompt_template is None:
        keys.insert(0, config.prompt_field)
    for key in keys:
        if not isinstance(entry.get(key), str):
            raise DataError(f'"{key}" is {_kind(entry, key)}, wanted text (keys: {", ".join(entry)})')
    template = config.prompt_template
    prompt = entry[config.prompt_field] if template is None else filled(template, entry)
    return Conversation(
        messages=(
            {"role": "user", "content": prompt},
            {"role": "assistant", "content": entry[config.response_field]},
        )
    )


def _messages(entry: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    messages = entry.get(key)
    if not isinstance(messages, list):
        raise DataError(f'"{key}" is {_kind(entry, key)}, wanted a list (keys: {", ".join(entry)})')
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise DataError(f'turn {number} is no object with a "role"')
    if not any(message["role"] == "assistant" for message in messages):
        raise DataError('no turn has the role "assistant", so there is nothing to learn')
    return messages


def _tools(entry: Mapping[str, Any]) -> list[dict[str, Any]]:
    tools = entry.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise DataError(f'"tools" is {_kind(entry, "tools")}, wanted a list of objects')
    return tools


def _kind(entry: Mapping[str, Any], key: str) -> str:
    return f"a {type(entry[key]).__name__}" if key in entry else "not there"
