"""From a step of a text to the token that ends it."""

from bisect import bisect_left
from collections.abc import Callable, Sequence


def last_token_of(
    tokens_T: Sequence[int], text: str, end: int, decode: Callable[[Sequence[int]], str]
) -> int:
    """Return the index of the first token with which the text of these tokens has `end` characters; where the step ends
    with the text it is the last token.
    """
    if end >= len(text):
        return len(tokens_T) - 1
    # A prefix's text grows with its tokens, so a bisection decodes few of them.
    return bisect_left(range(len(tokens_T) - 1), end, key=lambda index: len(decode(tokens_T[: index + 1])))
