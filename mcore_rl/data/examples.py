"""Conversations of JSON lines as token arrays; every line that cannot be used is named."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy
from numpy.typing import NDArray

from mcore_rl.config.sft import SFTDataConfig
from mcore_rl.data.chat import RAW_JOINS, Chat, Conversation, EncodedConversation, raw_joins
from mcore_rl.data.records import Record, RecordReader, beside, beyond_max, filled, listed
from mcore_rl.data.shapes import EARLIER, Dialogue, kind_of, read_tools, recognise, refuse_labels, unread_keys
from mcore_rl.errors import DataError

MEND = "name its fields: data.messages_field, or data.prompt_field and data.response_field"


@dataclass(frozen=True, kw_only=True, slots=True)
class Examples:
    """Token ids of all conversations, one after another."""

    ids_T: NDArray[numpy.int32]
    assistant_mask_T: NDArray[numpy.bool_]
    starts_N: NDArray[numpy.int64]
    """Offset of each conversation's first token, and finally the end of the last conversation."""
    source_sizes: tuple[int, ...]
    """Number of the conversations that are of each file, in the order of the files."""
    num_skipped: int
    """Conversations that are longer than a packed sequence."""
    bad_lines: tuple[str, ...] = ()
    """File, line and reason of each line that was left out because it is no conversation."""
    notes: tuple[str, ...] = ()
    """A sentence on the shape of each file, and warnings of fields with text that are not read."""

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
        notes=tuple(reader.notes),
    )


class ConversationReader(RecordReader[EncodedConversation]):
    """A reader of conversations as tokens, those that fit in a packed sequence."""

    def __init__(self, config: SFTDataConfig, chat: Chat) -> None:
        super().__init__("conversations", skips_long=config.too_long == "skip")
        self._config = config
        self._chat = chat

    def _example(self, record: Record) -> EncodedConversation:
        conversation, shape, used = conversation_of(record.fields, self._config)
        self.note(shape, unread_keys(record.fields, "conversation", used, conversation.messages))
        if self._config.chat_template == "raw" and raw_joins(conversation.messages):
            self.warn(RAW_JOINS)
        example = self._chat.encode(conversation)
        if not any(example.assistant_mask_T[1:]):
            raise DataError("no text of the assistant is trained on, by its turns' weights and this template")
        return example

    def _excess(self, example: EncodedConversation) -> str | None:
        length = len(example.ids_T) - 1
        if length <= self._config.seq_length:
            return None
        return f"{length} tokens, and data.seq_length={self._config.seq_length}. Raise it"


def conversation_of(entry: Mapping[str, Any], config: SFTDataConfig) -> tuple[Conversation, str, frozenset[str]]:
    """Return a record's conversation, its shape's name and the fields read; DataError if it has none."""
    entry = {key: value for key, value in entry.items() if value is not None}
    dialogue = _dialogue(entry, config)
    if not any(message["role"] == "assistant" for message in dialogue.messages):
        raise DataError('no turn has the role "assistant", so there is nothing to learn')
    conversation = Conversation(messages=dialogue.messages, tools=tuple(read_tools(entry)))
    said = [list(dialogue.messages), *(message.get("content") for message in dialogue.messages)]
    used = dialogue.used | {key for key, value in entry.items() if value in said}
    # What is better than another answer is a demonstration.
    refuse_labels(entry, "conversation", used | {"rejected"} if "chosen" in used else used)
    return conversation, dialogue.shape, used


def _dialogue(entry: Mapping[str, Any], config: SFTDataConfig) -> Dialogue:
    has_template = config.prompt_template is not None
    has_pair = has_template or (config.prompt_field in entry and config.response_field in entry)
    has_names = any(
        getattr(config, name) != SFTDataConfig.model_fields[name].default
        for name in ("messages_field", "prompt_field", "response_field")
    )
    if config.format == "chat" or (config.format == "auto" and config.messages_field in entry):
        if config.messages_field not in entry:
            is_default = config.messages_field == SFTDataConfig.model_fields["messages_field"].default
            mend = MEND if is_default else "data.messages_field names it; name another key"
            raise DataError(f'"{config.messages_field}" is not there (keys: {", ".join(entry)}); {mend}')
        named = {config.messages_field: None, "messages": entry[config.messages_field]}
        dialogue = recognise({**entry, **named})
        assert dialogue is not None, "it has messages"
        used = dialogue.used - {"messages"} | {config.messages_field}
        return replace(dialogue, shape=dialogue.shape.replace("messages)", f"{config.messages_field})"), used=used)
    if config.format == "prompt_response" or has_pair or has_names:
        return _pair(entry, config)
    if "text" in entry and (dialogue := _text(entry, config)):
        return dialogue
    if dialogue := recognise(entry):
        return dialogue
    if config.prompt_field in entry:
        return _pair(entry, config)
    raise DataError(f"no conversation is recognised in it (keys: {', '.join(entry) or 'none'}); {MEND}")


def _text(entry: Mapping[str, Any], config: SFTDataConfig) -> Dialogue | None:
    """Return a record of one text as an assistant's turn, which "raw" leaves as it is; None if it has a prompt."""
    if recognise({key: value for key, value in entry.items() if key != "text"}):
        return None
    if config.chat_template != "raw":
        raise DataError(
            f'it has "text" without turns (keys: {", ".join(entry)}); set data.chat_template="raw" to train on all of '
            "it, or make data for `mcore-rl pretrain` of it with `mcore-rl data preprocess`, or " + MEND
        )
    if not isinstance(entry["text"], str):
        raise DataError(f'"text" is {kind_of(entry, "text")}, wanted text')
    return Dialogue("text", ({"role": "assistant", "content": entry["text"]},), 0, frozenset(["text"]))


def _pair(entry: Mapping[str, Any], config: SFTDataConfig) -> Dialogue:
    template = config.prompt_template
    names = ["response_field"] if template is not None else ["prompt_field", "response_field"]
    for name in names:
        if not isinstance(entry.get(key := getattr(config, name)), str | list):
            is_default = key == SFTDataConfig.model_fields[name].default
            mend = MEND if is_default else f"data.{name} names it; name another key"
            raise DataError(f'"{key}" is {kind_of(entry, key)}, wanted text (keys: {", ".join(entry)}); {mend}')
    if template is None:
        prompt, used = entry[config.prompt_field], {config.prompt_field}
    else:
        prompt, used = filled(template, entry), entry.keys() - beside(template, entry).keys()
    renamed = {key: entry[key] for key in (*EARLIER, "tools") if key in entry and key not in used}
    dialogue = recognise({**renamed, "prompt": prompt, "response": entry[config.response_field]})
    assert dialogue is not None, "it has both"
    shape = f"prompt and response ({', '.join([*sorted(used), config.response_field])})"
    return Dialogue(
        shape,
        dialogue.messages,
        dialogue.num_prompt,
        frozenset((*used, *(dialogue.used & renamed.keys()), config.response_field)),
    )
