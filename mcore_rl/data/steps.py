"""The steps of an answer: where they end in its text, and at which tokens."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile

from mcore_rl.data.chat import Chat, Conversation, answered, prompt_ids
from mcore_rl.data.growing_text import text_ends
from mcore_rl.errors import DataError


@dataclass(frozen=True, slots=True)
class SteppedAnswer:
    """A prompt with an answer as tokens, and the last token of each step."""

    ids_T: tuple[int, ...]
    is_answer_T: tuple[bool, ...]
    """True at the tokens of the answer."""
    tokens: tuple[int, ...]
    """Index in `ids_T` of the last token of each step; for the last step, the last token."""


def step_ends(text: str, separator: str) -> list[int]:
    """Return the characters up to the end of each step of a text: a step ends after a separator, and the last step
    with the text. What is only white space is no step of its own; a text without any has none.
    """
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
    """Return the index of the last token of each step, which ends at a character of `text`: the first token after which
    the text up to there is certain. A step that ends with the text has the last token.

    Reward models are trained and read at this token, and a step's reward is assigned to it. A token with only some of a
    character's bytes does not complete the character; a token with the end of a step and the beginning of the next ends
    the step.

    Args:
        ids_T: the tokens, of which the last may end the turn and have no part of the text.
        text: the text of the tokens.
        ends: characters up to the end of each step.
        decode: function that decodes token ids to text.
    """
    certain_T, last = text_ends(ids_T, decode)[:-1], len(ids_T) - 1
    return [last if end >= len(text) else bisect_left(certain_T, end) for end in ends]


def read_steps(chat: Chat, prompt: Conversation, text: str, ends: Sequence[int]) -> SteppedAnswer:
    """Return prompt and answer as tokens, with the last token of each step, as `step_tokens` has it.

    Args:
        chat: the chat's template and tokenizer.
        prompt: the turns before the answer, which may end in its beginning.
        text: the answer.
        ends: characters up to the end of each step, rising, up to the length of the text.

    Raises:
        DataError: two steps end in the same token, the tokenizer changes the text, or the template does not take the
            conversation.
    """
    whole = chat.encode(answered(prompt, text))
    ids_T, mask_T = whole.ids_T, whole.assistant_mask_T
    first = num_common(prompt_ids(chat, prompt), ids_T)
    # A tokenizer may normalize texts; a token may have the end of the prompt and the beginning of the answer.
    is_kept = chat.as_decoded(text) == text
    readable = [text[:end] if is_kept else chat.as_decoded(text[:end]) for end in ends]
    # Prompt and answer are decoded together: alone, the answer may lose a space at its beginning.
    certain_T = text_ends(ids_T, chat.decode)
    num_before = certain_T[first - 1] if first else 0
    begin = chat.decode(ids_T).find(readable[-1].rstrip(), num_before) if ends else 0
    if begin < 0:
        raise DataError(
            "the tokenizer does not give the text of the answer back, so that no step can be found"
        )
    tokens = [bisect_left(certain_T[:-1], begin + len(before)) for before in readable[:-1]]
    tokens += [len(ids_T) - 1] * bool(ends)
    for number, (before, token) in enumerate(pairwise([first - 1, *tokens]), start=1):
        if token <= before:
            where = "the prompt" if number == 1 else f"step {number - 1}"
            raise DataError(
                f"step {number} ends in the same token as {where}, as the tokenizer cuts the answer"
            )
    return SteppedAnswer(
        ids_T, tuple(index >= first and said for index, said in enumerate(mask_T)), tuple(tokens)
    )


def num_common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of tokens that both begin with."""
    return sum(1 for _ in takewhile(lambda two: two[0] == two[1], zip(one, other, strict=False)))
