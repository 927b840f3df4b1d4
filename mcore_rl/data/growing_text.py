"""The text that is certain after each of its tokens."""

from collections.abc import Callable, Sequence
from itertools import accumulate

OPEN = "\N{REPLACEMENT CHARACTER}"
"""Decoders put it in the place of bytes that are not, or not yet, a character."""


class GrowingText:
    """The text of tokens that are added one by one, by decodes of a few tokens each.

    The text of the first tokens is not always a beginning of the text. The first bytes of a character decode to U+FFFD.
    With byte fallback (tokenizer.json of Llama-2, Mistral, Gemma) so does each byte token of a run that is not whole
    characters: the first byte of a character hides those before it until its last byte comes. And decoders drop a
    space at the beginning. Therefore U+FFFD at the end is not yet text: it is certain when other text follows it.

    The time is linear in the number of tokens, but for long runs of byte tokens in which some are no character.
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
    """Return, for each token, the number of characters of the tokens' text that are certain after it; the last is all.

    Certain is the text of the tokens up to this one, without U+FFFD at its end, where the whole text begins with it.
    """
    whole = decode(ids_T)
    growing = GrowingText(decode, whole)
    ends = list(accumulate(len(growing.add(token)) for token in ids_T))
    return [*ends[:-1], len(whole)] if ends else []
