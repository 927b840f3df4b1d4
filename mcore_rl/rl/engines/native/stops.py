"""The rules by which a completion ends."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

MARGIN = 8
"""Tokens read beyond those that a stop string can have: some decode to nothing, the first may lose its space."""


@dataclass(frozen=True, slots=True)
class Stops:
    """Tokens and strings that end a completion."""

    tokens: frozenset[int]
    strings: tuple[str, ...]
    decode: Callable[[Sequence[int]], str]

    def ends(self, tokens_T: Sequence[int]) -> bool:
        """Whether the newest token ends the completion, which did not end before."""
        if tokens_T[-1] in self.tokens:
            return True
        if not self.strings:
            return False
        longest = max(len(string.encode()) for string in self.strings)
        tail = self.decode(tokens_T[-longest - MARGIN :])
        return any(string in tail for string in self.strings)
