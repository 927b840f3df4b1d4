"""What a reward function is given."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
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


RewardFunction = Callable[[Judged], float]
"""A finite number; a user's own is named `module:function` in the config. It runs in a process of its own."""
