"""Keys that change what a record or a turn means: each is read, or refused with what to do instead."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from mcore_rl.errors import DataError

Fields = Mapping[str, Any]
TRAINED = ("weight", "train", "training", "loss", "loss_mask", "loss_weight", "loss_scale")
"""Keys of a turn that is trained on (1, true) or not (0, false), by OpenAI, Mistral, axolotl, ms-swift and verl."""
REASONING = ("reasoning_content", "reasoning", "thinking")
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


LABELS = (
    Label(TRAINED, "assistant", (0, 1), "it says whether the turn is trained on. Write 1, or 0 for not trained"),
    Label(TRAINED, "turn", (0,), "only turns of the assistant are trained on. Leave the key out, or such records"),
    Label((*TRAINED, "sample_weight"), "conversation preference document part", (1,),
          "all texts of a file count alike. Leave the key out, or the texts that count less"),
    Label(("label", "kto_tag", "is_correct"), "conversation preference", (1,),
          "it says whether the answer is to be learned. Leave out records whose answer is not (data.max_bad allows "
          "such lines), or make pairs of good and bad answers for `mcore-rl dpo`"),
    Label(("rejected", "rejected_response", "rejected_messages"), "conversation", (),
          "it is the worse of two answers, for `mcore-rl dpo` and `mcore-rl rm`. Leave this key out to learn the other "
          'answer, or name that: data.response_field="chosen"'),
    Label(("labels", "completion_mask", "assistant_masks", "response_mask", "train_detail"),
          "conversation preference assistant turn", (),
          'it labels parts of a text, and whole turns are trained on. Cut it into turns, some with "weight": 0'),
    Label(("label",), "assistant turn part", (), "it rates the turn. Leave the key out, or write it into the text"),
    Label(("mask",), "conversation", (0, "User", "user", "Human", "human"),
          "it says whose turns are not trained on. Write \"weight\": 0 in each turn of the assistant that is not"),
    Label(("history",), "conversation", (), "it is not read beside a single text. Name prompt and response"),
    Label(REASONING, "conversation turn", (), "reasoning is read in the assistant's turns. Write it there"),
    Label(("images", "videos", "audios"), "conversation preference prompt assistant turn", (),
          "only texts are trained on. Leave out such records"),
    Label(("functions", "function_call"), "conversation preference prompt assistant turn", (),
          'it is an old form. Write "tools" of records, "tool_calls" of turns'),
    Label(("tools",), "prompt", (), "tools come from rl.environment. Name one, or describe them in the system prompt"),
    Label(("chat_template_kwargs",), "conversation preference prompt", (),
          "all records are rendered alike. Set data.chat_template to a file that does so"),
)  # fmt: skip
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
