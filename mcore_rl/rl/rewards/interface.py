"""What a reward function is given."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardInput:
    """One completion with what it answers."""

    prompt: str
    completion: str
    answer: str
    """The reference answer; empty where the prompt came without one."""
    num_tokens: int
    """Of the completion."""
    is_truncated: bool
    fields: Mapping[str, Any]
    """All else that came with the prompt."""


class TextStep(NamedTuple):
    """A step of a completion, after so many characters of its text, and what it is worth."""

    end: int
    value: float


RewardFunction = Callable[[RewardInput], float | Sequence[tuple[int, float]]]
"""A finite number, or the completion's steps as `TextStep`s, their ends rising from 1 at the least to the length of the
text at the most: then the reward is the sum of their values.
A user's own is named `module:function` in the config. It runs in a process of its own."""
