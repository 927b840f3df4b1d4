"""Where an answer and its steps end, in text and in tokens."""

import json
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, takewhile
from pathlib import Path

import numpy

from mcore_rl.data.chat import Chat, Conversation, answered, prompt_ids
from mcore_rl.data.examples import Examples
from mcore_rl.data.tokenizer import Tokenizer
from mcore_rl.errors import DataError

OPEN = "\N{REPLACEMENT CHARACTER}"
"""Decoders put it in the place of bytes that are not, or not yet, a character."""


class GrowingText:
    """The text of tokens that are added one by one, by decodes of a few tokens each, in linear time.

    Decoders show bytes of an unfinished character as U+FFFD, with byte fallback even characters before it, and drop a
    space at the beginning: U+FFFD at the end is text only once other text follows it.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], whole: str | None = None) -> None:
        """Take a tokenizer's decode and, where it is known, the text of all tokens, which shows what stays broken."""
        self._decode, self._whole = decode, whole
        self._num_closed = None if whole is None else len(whole.rstrip(OPEN))
        self._open: list[int] = []
        self._context: list[int] = []  # tokens before the open ones: behind them, a decoder drops no space
        self._base: list[int] = []  # the last of them that have text alone
        self._num_context, self._num_before, self._num_certain = 0, 0, 0

    def add(self, token: int) -> str:
        """Add a token. Returns the characters that become certain with it."""
        self._open.append(token)
        if self._num_before == self._num_closed:
            return ""  # only broken bytes follow
        # A character has at most four tokens: in a long run without one that ends here, nothing is new.
        if len(self._open) > 8 and not any(self._decode(self._open[-n:]).strip(OPEN) for n in (1, 2, 3, 4)):
            return ""
        text = self._decode([*self._context, *self._open])[self._num_context :]
        certain = text.rstrip(OPEN)
        if self._whole is not None and not self._whole.startswith(certain, self._num_before):
            return ""  # characters of a run that a later byte breaks
        added = certain[self._num_certain - self._num_before :]
        self._num_certain += len(added)
        if certain == text:
            self._num_before += len(text)
            if text or self._open != self._context[-1:]:  # the same mark again changes nothing
                alone = self._decode(self._open)  # empty: marks without text, or a space at the beginning
                self._context = self._open if alone else [*(self._base or self._context), *self._open]
                self._num_context = len(alone or self._decode(self._context))
                self._base = self._context if alone or (self._num_context and not self._base) else self._base
            self._open = []
        return added


def text_ends(ids_T: Sequence[int], decode: Callable[[Sequence[int]], str]) -> list[int]:
    """Return, by token, the number of characters certain after it, without U+FFFD at their end; the last is all."""
    whole = decode(ids_T)
    growing = GrowingText(decode, whole)
    ends = list(accumulate(len(growing.add(token)) for token in ids_T))
    return [*ends[:-1], len(whole)] if ends else []


GENERATION_CONFIG = "generation_config.json"
"""File of a Hugging Face folder that names its end tokens, in `eos_token_id`."""

LOOKED_AT = 1000
"""Conversations in which `no_end_warning` looks for an end token."""


def end_tokens(tokenizer: Tokenizer, chat: Chat | None, path: str | None) -> dict[int, str]:
    """Return the ids of the tokens that end a completion, and for each the place that names it: the end of the
    template's turn, which fine-tuned models end with, `eos_token`, generation_config.json in the folder `path`, the end
    of a document. Raises DataError if generation_config.json cannot be read or names an unknown id.
    """
    ends: dict[int, str] = {}  # filled by setdefault: a token that several places name is shown with the first
    for token in chat.turn_end_ids if chat is not None else ():
        ends.setdefault(token, "end of the assistant's turn in the chat template")
    if tokenizer.eos_id is not None:
        ends.setdefault(tokenizer.eos_id, "eos_token of the tokenizer")
    for token in _ids_of_generation_config(Path(path) / GENERATION_CONFIG, tokenizer) if path else ():
        ends.setdefault(token, f"eos_token_id in {GENERATION_CONFIG}")
    ends.setdefault(tokenizer.eod_id, "end of a document")
    return ends


def token_name(tokenizer: Tokenizer, token: int) -> str:
    """Return the text of a token, or the name of a special token that decodes to nothing."""
    names = {tokenizer.pad_id: "<pad>", tokenizer.bos_id: "<bos>", tokenizer.eod_id: "<eod>"}
    return tokenizer.decode([token]) or names.get(token, f"<{token}>")


def describe_ends(ends: Mapping[int, str], tokenizer: Tokenizer) -> str:
    """Return one line for the log: the text, id and origin of each end token."""
    tokens = [f"{token_name(tokenizer, token)!r} ({token}, {origin})" for token, origin in ends.items()]
    return f"a completion ends at {', '.join(tokens)}"


def no_end_warning(examples: Examples, ends: Mapping[int, str], tokenizer: Tokenizer) -> str | None:
    """Return a warning if the first conversations train on none of `ends`: such a model never stops."""
    num_looked_at = min(len(examples), LOOKED_AT)
    num_tokens = int(examples.starts_N[num_looked_at])
    trained_T = examples.ids_T[:num_tokens][examples.assistant_mask_T[:num_tokens]]
    if numpy.isin(trained_T, list(ends)).any():
        return None
    return (
        f"warning: none of the first {num_looked_at} conversations trains on a token that ends a completion, and "
        f"{describe_ends(ends, tokenizer)}. The model learns no end to its answers, and will write to the largest "
        "length. Let data.chat_template end the assistant's turn with such a token, before {% endgeneration %} where "
        "the template has that mark."
    )


def _ids_of_generation_config(path: Path, tokenizer: Tokenizer) -> list[int]:
    if not path.is_file():
        return []
    try:
        entry = json.loads(path.read_bytes()).get("eos_token_id")
    except (ValueError, AttributeError) as error:
        raise DataError(f"{path} is no JSON object: {error}. Copy it again.") from error
    ids = entry if isinstance(entry, list) else [] if entry is None else [entry]
    for token in ids:
        if not isinstance(token, int) or not 0 <= token < tokenizer.vocab_size:
            raise DataError(
                f"{path} names eos_token_id={entry!r}, and the tokenizer beside it has the ids 0 to "
                f"{tokenizer.vocab_size - 1}. Correct eos_token_id, or delete it."
            )
    return ids


@dataclass(frozen=True, slots=True)
class SteppedAnswer:
    """A prompt with an answer as tokens, and the last token of each step."""

    ids_T: tuple[int, ...]
    is_answer_T: tuple[bool, ...]
    tokens: tuple[int, ...]
    """Index in `ids_T` of the last token of each step; for the last step, the last token."""


def step_ends(text: str, separator: str) -> list[int]:
    """Return the end of each step of a text, in characters; white space alone is no step."""
    ends: list[int] = []
    begin = 0
    while begin < len(text):
        found = text.find(separator, begin)
        end = len(text) if found < 0 else found + len(separator)
        if text[begin:end].replace(separator, "").strip():
            ends.append(end)
        elif ends:
            ends[-1] = end  # blank lines belong to the step before them
        begin = end
    return ends


def step_tokens(
    ids_T: Sequence[int], text: str, ends: Sequence[int], decode: Callable[[Sequence[int]], str]
) -> list[int]:
    """Return the index of the last token of each step that ends at one of the characters `ends` of `text`: the first
    token after which the text up to there is certain; for the end of the text, the last token. Rewards are read and
    trained there.
    """
    certain_T, last = text_ends(ids_T, decode)[:-1], len(ids_T) - 1
    return [last if end >= len(text) else bisect_left(certain_T, end) for end in ends]


def read_steps(chat: Chat, prompt: Conversation, text: str, ends: Sequence[int]) -> SteppedAnswer:
    """Return prompt and answer as tokens, with the last token of each step (`step_tokens`); `ends` are rising
    characters of `text`. Raises DataError if two steps end in one token, the tokenizer changes the text, or the
    template does not take the conversation.
    """
    whole = chat.encode(answered(prompt, text))
    ids_T, mask_T = whole.ids_T, whole.assistant_mask_T
    first = num_common(prompt_ids(chat, prompt), ids_T)
    # A tokenizer may normalize texts; a token may have the end of the prompt and the beginning of the answer.
    is_kept = chat.as_decoded(text) == text
    readable = [text[:end] if is_kept else chat.as_decoded(text[:end]) for end in ends]
    if len(ends) > 1 and not readable[-1].strip():
        raise DataError("the answer is only white space, in which no step can be found")
    # Prompt and answer are decoded together: alone, the answer may lose a space at its beginning.
    certain_T = text_ends(ids_T, chat.decode)
    num_before = certain_T[first - 1] if first else 0
    begin = chat.decode(ids_T).find(readable[-1].rstrip(), num_before) if ends else 0
    if begin < 0:
        raise DataError("the tokenizer does not give the text of the answer back, so that no step can be found")
    tokens = [bisect_left(certain_T[:-1], begin + len(before)) for before in readable[:-1]]
    tokens += [len(ids_T) - 1] * bool(ends)
    for number, (before, token) in enumerate(pairwise([first - 1, *tokens]), start=1):
        if token <= before:
            where = "the prompt" if number == 1 else f"step {number - 1}"
            raise DataError(f"step {number} ends in the same token as {where}, as the tokenizer cuts the answer")
    return SteppedAnswer(ids_T, tuple(index >= first and said for index, said in enumerate(mask_T)), tuple(tokens))


def num_common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of tokens that both begin with."""
    return sum(1 for _ in takewhile(lambda two: two[0] == two[1], zip(one, other, strict=False)))
