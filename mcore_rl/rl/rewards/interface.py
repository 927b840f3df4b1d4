"""Interface of a reward function: what it is given, and what it returns."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardInput:
    """One completion with the prompt that it answers."""

    prompt: str
    completion: str
    """Text of the completion; with an environment, of the policy's last turn."""
    answer: str
    """The reference answer; empty where the prompt came without one."""
    num_tokens: int
    """Tokens that the policy sampled."""
    is_truncated: bool
    """Whether the completion reached the largest number of new tokens without an end."""
    fields: Mapping[str, Any]
    """All other fields that came with the prompt."""
    messages: Sequence[Mapping[str, Any]] = ()
    """With an environment the whole conversation, each message with "role" and "content"; else empty."""


class TextStep(NamedTuple):
    """Reward of a step of a completion; `end` is the number of characters of the text up to the step's end."""

    end: int
    value: float


RewardFunction = Callable[
    [RewardInput],
    float | tuple[float | None, str | None] | Mapping[str, Any] | Sequence[tuple[int, float]] | None,
]
"""Function that returns a finite number; or (number, reason); or a dict with the number as "score" (or "reward"), whose
other entries are the reason; or the completion's steps as (end, value) whose ends rise from at least 1 to at most the
length of the text: the reward is then the sum of the values; or None, in the place of the number too, where the part
does not apply to the prompt and is left out of its sum. It runs in a process of its own."""
