"""The steps of an answer: where they end in its text, and at which tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile

from mcore_rl.data.chat import Chat, Conversation
from mcore_rl.errors import DataError


@dataclass(frozen=True, slots=True)
class SteppedAnswer:
    """A prompt with an answer as tokens, and the last token of each step."""

    ids_T: tuple[int, ...]
    is_answer_T: tuple[bool, ...]
    """True at the tokens of the answer."""
    tokens: tuple[int, ...]
    """Index in `ids_T` of the last token of each step; that of the last step is the last token."""


def step_ends(text: str, separator: str) -> list[int]:
    """Return the characters up to the end of each step of a text: a step ends after a separator, and the last one with
    the text. What is only white space is no step of its own; a text without any has none.
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


def read_steps(chat: Chat, prompt: Conversation, text: str, ends: Sequence[int]) -> SteppedAnswer:
    """Return prompt and answer as tokens. A step's last token is the last one that the answer up to there and the whole
    answer have in common.

    Args:
        chat: the chat's template and tokenizer.
        prompt: the turns before the answer.
        text: the answer.
        ends: characters up to the end of each step, rising, the last one the length of the text.

    Raises:
        DataError: two steps end in the same token, or the template does not take the conversation.
    """

    def encoded(answer: str) -> tuple[tuple[int, ...], tuple[bool, ...]]:
        turn = {"role": "assistant", "content": answer}
        whole = chat.encode(Conversation(messages=(*prompt.messages, turn), tools=prompt.tools))
        return whole.ids_T, whole.assistant_mask_T

    ids_T, mask_T = encoded(text)
    first = num_common(chat.prompt(prompt), ids_T)
    tokens = [num_common(encoded(text[:end])[0], ids_T) - 1 for end in ends[:-1]] + [len(ids_T) - 1] * bool(
        ends
    )
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
