"""Interface of a reward function: its input and its result."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardInput:
    """A completion and its prompt."""

    prompt: str
    completion: str
    """Text of the completion; with an environment, the text of the policy's last turn."""
    answer: str
    """The reference answer; empty if the prompt has none."""
    num_tokens: int
    """Number of tokens that the policy sampled."""
    is_truncated: bool
    """Whether the completion reached the limit on new tokens before it ended."""
    fields: Mapping[str, Any]
    """All other fields of the prompt's record."""
    messages: Sequence[Mapping[str, Any]] = ()
    """With an environment, the whole conversation, each message with "role" and "content"; otherwise empty."""


class TextStep(NamedTuple):
    """Reward of one step of a completion; `end` is the step's end in characters of the text."""

    end: int
    value: float


RewardFunction = Callable[
    [RewardInput],
    float | tuple[float | None, str | None] | Mapping[str, Any] | Sequence[tuple[int, float]] | None,
]
"""A reward function, which runs in a separate process. It may return:

- a finite number;
- (number, reason);
- a dict with the number under "score" (or "reward"); its other entries are the reason;
- the completion's steps as (end, value) pairs, with increasing ends between 1 and the length of the text; the reward
  is the sum of the values;
- None, or None in place of the number: the part does not apply to this prompt and is left out of its sum.
"""
