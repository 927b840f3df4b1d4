"""Interface of an environment: what it is given, and what it returns."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from mcore_rl.rl.types import Problem

Message = Mapping[str, Any]
"""A turn with "role" and "content", as a chat template takes it."""


class Environment(Protocol):
    """One conversation. An object is made for each completion, with rl.environment.arguments as keyword arguments.

    It runs in worker processes, and is pickled between two calls: a process that ends costs one conversation. What
    cannot be pickled, such as an open connection, is opened anew in each call, or left out by `__getstate__`.
    """

    def start(self, prompt: Problem) -> Sequence[Message]:
        """Return the messages that the policy answers first, equal for all completions of the prompt."""
        ...

    def step(self, completion: str) -> tuple[Sequence[Message], float, bool]:
        """Answer a turn of the policy.

        Args:
            completion: text of the turn.

        Returns:
            The messages that the policy answers next (ignored at the end), the reward of this turn, and whether the
            conversation has ended.
        """
        ...
