"""Interface of an environment."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from mcore_rl.rl.types import Problem

Message = Mapping[str, Any]
"""A turn with "role" and "content", as chat templates expect it."""


class Environment(Protocol):
    """A single conversation. An object is created per completion, with rl.environment.arguments as keyword arguments.

    It runs in worker processes and is pickled between calls, so a process that dies costs a single conversation. Open
    anything that cannot be pickled, such as a connection, in each call, or leave it out with `__getstate__`.
    """

    def start(self, prompt: Problem) -> Sequence[Message]:
        """Return the first messages for the policy to answer; they must be equal for all completions of the prompt."""
        ...

    def step(self, completion: str) -> tuple[Sequence[Message], float, bool]:
        """Answer a turn of the policy.

        Args:
            completion: text of the turn.

        Returns:
            The next messages for the policy to answer (ignored at the end), the reward of this turn, and whether the
            conversation has ended.
        """
        ...
