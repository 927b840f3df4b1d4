"""Common record formats, recognised by their keys: chats in OpenAI's and ShareGPT's format, prompt and answer under the
usual names, and preferences as in UltraFeedback. A key that changes what a record or a turn means is read, or refused
with what to do instead.
"""

import json
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from mcore_rl.errors import DataError

Fields = Mapping[str, Any]
_TABLE: dict[str, Any] = tomllib.loads(Path(__file__).with_name("shapes.toml").read_text(encoding="utf-8"))
TRAINED: tuple[str, ...] = tuple(_TABLE["trained"])
"""Keys of a turn that is trained on or not."""
REASONING: tuple[str, ...] = tuple(_TABLE["reasoning"])
"""Keys of the assistant's reasoning before the content of its turn."""


class Label(NamedTuple):
    """Keys with a meaning in these places: records of the kinds conversation, preference, prompt and document; turns of
    the assistant, other turns, and parts of turns. Values that are not `harmless` are refused with an error that ends
    in `meaning`.
    """

    keys: tuple[str, ...]
    places: str
    harmless: tuple[object, ...]
    meaning: str


LABELS = [
    Label(
        tuple(name for key in row["keys"] for name in (_TABLE[key[1:]] if key.startswith("@") else (key,))),
        row["places"],
        tuple(row.get("harmless", ())),
        row["meaning"],
    )
    for row in _TABLE["labels"]
]
"""All such keys of the field's data formats."""
BY_PLACE = {
    place: {key: label for label in LABELS if place in label.places.split() for key in label.keys}
    for place in ("conversation", "preference", "prompt", "document", "assistant", "turn", "part")
}
IN_TURNS = {"role", "content", "tool_calls", *REASONING, *BY_PLACE["assistant"], *BY_PLACE["turn"]}


def is_absent(value: Any) -> bool:
    """Return whether a value is null, NaN or empty, with which tables fill keys that a record does not have."""
    return value is None or value in ("", [], {}) or (isinstance(value, float) and value != value)


def is_trained(turn: Fields) -> bool:
    """Return whether a turn of the assistant is trained on."""
    return all(turn[key] for key in TRAINED if not is_absent(turn.get(key)))


def refuse_labels(entry: Fields, place: str, read: Collection[str] = (), whose: str = "") -> None:
    """Raise DataError, beginning with `whose` key it is, if a key that is not `read` changes what `entry` means."""
    for key, value in entry.items():
        label = BY_PLACE[place].get(key)
        if label and key not in read and not is_absent(value) and value not in label.harmless:
            raise DataError(f'{whose}"{key}" is {value!r:.60}: {label.meaning}')


def unread_keys(entry: Fields, place: str, read: Collection[str], turns: Sequence[Fields]) -> list[str]:
    """Return the keys of a record and its turns that are neither absent nor `read` nor labels."""
    known = {*read, *BY_PLACE[place]}
    keys = [key for key, value in entry.items() if key not in known and not is_absent(value)]
    said = [(key, value) for turn in turns for key, value in turn.items() if key not in IN_TURNS]
    return keys + [f"{key} of turns" for key, value in said if not is_absent(value)]


def kind_of(entry: Fields, key: str) -> str:
    """Return what a record has under a key, for a message: "not there", "a list of 3", "a str"."""
    if key not in entry:
        return "not there"
    value = entry[key]
    return f"a list of {len(value)}" if isinstance(value, list) else f"a {type(value).__name__}"


Message = Mapping[str, Any]
ROLES: dict[str, str] = _TABLE["roles"]
"""Roles by ShareGPT's `from`."""
TURNS = {"messages": "OpenAI messages", "conversations": "ShareGPT conversations"}
"""Fields with turns, and the names of their shapes."""
ANSWERS = {
    ("prompt",): ("completion", "response"),
    ("instruction", "input"): ("output",),
    ("instruction", "context"): ("response",),
    ("question",): ("answer", "response"),
    ("problem",): ("answer", "solution"),
    ("query",): ("response", "answer"),
}
"""Fields that make up a prompt, all optional but the first, and the fields with its answer."""
NAMES = {
    ("prompt", "completion"): "TRL prompt and completion",
    ("instruction", "output"): "alpaca",
    ("instruction", "response"): "dolly",
}
PROMPTS = frozenset(key for keys in ANSWERS for key in keys)
SYSTEM = ("system", "system_prompt")
EARLIER = (*SYSTEM, "history")
"""Fields with what stands before a prompt."""
ULTRAFEEDBACK_SCORES = ("overall_score", "fine-grained_score")


@dataclass(frozen=True, slots=True)
class Dialogue:
    """Turns that were recognised in a record."""

    shape: str
    """Name of the shape, with the fields that were read."""
    messages: tuple[Message, ...]
    num_prompt: int
    """Number of turns in the prompt; the remaining turns are the answer."""
    used: frozenset[str]

    @property
    def prompt(self) -> str | list[Message]:
        """Prompt as text if it is a single user turn, else as turns."""
        turns = self.messages[: self.num_prompt]
        is_text = len(turns) == 1 and turns[0]["role"] == "user" and isinstance(turns[0].get("content"), str)
        return str(turns[0]["content"]) if is_text else list(turns)

    @property
    def answer(self) -> str:
        """Text of the last turn of the answer; "" without an answer."""
        turns = self.messages[self.num_prompt :]
        content = turns[-1].get("content") if turns else None
        return content if isinstance(content, str) else ""


def recognise(entry: Mapping[str, Any]) -> Dialogue | None:
    """Return the turns of a record by its keys; None for unknown keys, DataError for values that do not fit."""
    entry = {key: value for key, value in entry.items() if value is not None}
    for key, name in TURNS.items():
        if key in entry:
            turns = with_earlier(entry, read_turns(entry[key], key))
            is_answered = turns and turns[-1]["role"] == "assistant"
            return _dialogue(entry, name, turns, len(turns) - bool(is_answered), (key,))
    for prompt_keys, answer_keys in ANSWERS.items():
        answer = next((key for key in answer_keys if key in entry), None)
        if answer is None or prompt_keys[0] not in entry:
            continue
        prompt = with_earlier(entry, _prompt(entry, prompt_keys))
        said = _side(entry, answer, "assistant")
        name = NAMES.get((prompt_keys[0], answer), f"{prompt_keys[0]} and {answer}")
        return _dialogue(entry, name, [*prompt, *said], len(prompt), (*prompt_keys, answer))
    return None


def recognise_prompt(entry: Mapping[str, Any]) -> list[Message] | None:
    """Return the turns of a record's prompt by its keys, if its answers are in other fields; None without a prompt."""
    if "conversations" in entry:
        return read_turns(entry["conversations"], "conversations")
    return next((_prompt(entry, keys) for keys in ANSWERS if entry.get(keys[0]) is not None), None)


def with_earlier(entry: Mapping[str, Any], turns: Sequence[Message]) -> list[Message]:
    """Return turns after their record's system prompt, unless they have one, and its `history` (LLaMA-Factory)."""
    begin = bool(turns and turns[0]["role"] == "system")
    history: Any = entry.get("history") or []
    if isinstance(history, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in history):
        said = [turn for pair in history for turn in zip(("user", "assistant"), pair, strict=True)]
        history = [{"role": role, "content": text} for role, text in said]
    system = turns[:1]
    if not begin:
        text = next((entry[key] for key in SYSTEM if isinstance(entry.get(key), str) and entry[key].strip()), None)
        system = [] if text is None else [{"role": "system", "content": text}]
    return [*system, *read_turns(history, "history"), *turns[begin:]]


def read_turns(value: Any, name: str) -> list[Message]:
    """Return turns with `role` and `content`, also from ShareGPT's, with texts joined; DataError for others."""
    if not isinstance(value, list):
        raise DataError(f'"{name}" is a {type(value).__name__}, wanted a list of turns')
    return [_turn(turn, number, name) for number, turn in enumerate(value, start=1)]


def read_tools(entry: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the tools of a record, a list of objects or its JSON; a DataError where they are no such list."""
    tools = entry.get("tools") or []
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except ValueError:
            raise DataError('"tools" is text that is no JSON, wanted a list of objects') from None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise DataError(f'"tools" is a {type(tools).__name__}, wanted a list of objects')
    return tools


def as_ranking(entry: Mapping[str, Any], responses_field: str, scores_field: str) -> Mapping[str, Any]:
    """Return an UltraFeedback record as a ranking, others unchanged; DataError without a score."""
    completions = entry.get("completions")
    is_rated = isinstance(completions, list) and completions and responses_field not in entry
    if not is_rated or not all(isinstance(item, dict) and "response" in item for item in completions or ()):
        return entry
    assert isinstance(completions, list)
    for key in ULTRAFEEDBACK_SCORES:
        scores = [completion.get(key) for completion in completions]
        if all(isinstance(score, int | float) and not isinstance(score, bool) for score in scores):
            return {
                **entry,
                responses_field: [completion["response"] for completion in completions],
                scores_field: scores,
            }
    raise DataError(
        f'"completions" are responses of which one has no number as {" or ".join(ULTRAFEEDBACK_SCORES)}, so that '
        "they cannot be ranked"
    )


def _dialogue(
    entry: Mapping[str, Any], name: str, turns: Sequence[Message], num_prompt: int, keys: Sequence[str]
) -> Dialogue:
    system = turns[0].get("content") if turns else None
    earlier = [key for key in EARLIER if key not in SYSTEM or entry.get(key) == system]
    read = [key for key in (*earlier, *keys, "tools") if entry.get(key)]
    return Dialogue(f"{name} ({', '.join(read)})", tuple(turns), num_prompt, frozenset(read))


def _prompt(entry: Mapping[str, Any], keys: Sequence[str]) -> list[Message]:
    """Return the turns in the first of `keys`, or if it is text, a single turn joining the texts of all `keys`."""
    first = _side(entry, keys[0], "user")
    if isinstance(entry[keys[0]], list):
        return first
    rest = [entry[key] for key in keys[1:] if isinstance(entry.get(key), str) and entry[key].strip()]
    return [{"role": "user", "content": "\n\n".join([first[0]["content"], *rest])}]


def _side(entry: Mapping[str, Any], key: str, role: str) -> list[Message]:
    value = entry[key]
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if isinstance(value, list):
        return read_turns(value, key)
    raise DataError(f'"{key}" is a {type(value).__name__}, wanted text or a list of turns (keys: {", ".join(entry)})')


def _turn(turn: Any, number: int, name: str) -> Message:
    if isinstance(turn, dict) and "role" not in turn and isinstance(turn.get("from"), str) and "value" in turn:
        role = ROLES.get(turn["from"].lower())
        if role is None:
            raise DataError(
                f"turn {number} is from {turn['from']!r}, which is none of {', '.join(ROLES)}. Write it as "
                '{"role", "content"}, calls of tools as "tool_calls"'
            )
        others = {key: value for key, value in turn.items() if key not in ("from", "value")}
        turn = {**others, "role": role, "content": turn["value"]}
    if not isinstance(turn, dict) or not isinstance(turn.get("role"), str):
        raise DataError(f'turn {number} of "{name}" is no object with a "role"')
    content, whose = turn.get("content"), f'turn {number} of "{name}" ({turn["role"]}): '
    refuse_labels(turn, "assistant" if turn["role"] == "assistant" else "turn", whose=whose)
    if content != "" and is_absent(content) and is_absent(turn.get("tool_calls")):
        raise DataError(f"{whose}it has no content and calls no tool (keys: {', '.join(turn)}). Leave it out")
    if not isinstance(content, list):
        return turn
    for part in content:
        refuse_labels(part if isinstance(part, dict) else {}, "part", whose=whose)
    texts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
    is_text = len(texts) == len(content) and all(isinstance(text, str) for text in texts)
    return {**turn, "content": "".join(map(str, texts))} if is_text else turn
