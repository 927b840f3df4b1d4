"""The text that is certain after each of its tokens."""

from collections.abc import Callable, Sequence

OPEN = "\N{REPLACEMENT CHARACTER}"
"""Decoders put it in the place of bytes that are not, or not yet, a character."""
MAX_BYTES = 4
"""Bytes of a character at most, and so the number of tokens with a part of it."""


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
        self._num_before = 0
        self._context: list[int] = []
        self._num_context = 0
        self._base: list[int] = []
        self.num_certain = 0
        """Number of characters that are certain."""

    def add(self, token: int) -> str:
        """Add a token. Returns the characters that become certain with it."""
        self._open.append(token)
        if self._num_before == self._num_closed:
            return ""  # only broken bytes follow
        if len(self._open) > 2 * MAX_BYTES and not any(
            self._decode(self._open[-num:]).strip(OPEN) for num in range(1, MAX_BYTES + 1)
        ):
            return ""  # no character ends here
        text = self._decode([*self._context, *self._open])[self._num_context :]
        certain = text.rstrip(OPEN)
        if self._whole is not None and not self._whole.startswith(certain, self._num_before):
            return ""  # characters of a run that a later byte breaks
        added = certain[self.num_certain - self._num_before :]
        self.num_certain += len(added)
        if certain == text:
            self._close(text)
        return added

    def _close(self, text: str) -> None:
        """Make the open tokens, which have `text`, the context of the next: behind it, a decoder drops no space."""
        alone = self._decode(self._open)
        if alone:
            self._base = self._context = self._open
        elif text or self._open != self._context[-1:]:
            # They have no text alone: a mark, or a space that is dropped at the beginning.
            self._context = [*(self._base or self._context), *self._open]
            alone = self._decode(self._context)
            self._base = self._base or (self._context if alone else [])
        else:  # the same mark again
            alone = self._decode(self._context)
        self._num_context, self._open = len(alone), []
        self._num_before += len(text)


def text_ends(ids_T: Sequence[int], decode: Callable[[Sequence[int]], str]) -> list[int]:
    """Return, for each token, the number of characters of the tokens' text that are certain after it; these rise, and
    the last is the length of the text.

    Certain is the text of the tokens up to this one, without U+FFFD at its end, where the whole text begins with it.
    """
    whole = decode(ids_T)
    growing = GrowingText(decode, whole)
    ends = []
    for token in ids_T:
        growing.add(token)
        ends.append(growing.num_certain)
    return [*ends[:-1], len(whole)] if ends else []
