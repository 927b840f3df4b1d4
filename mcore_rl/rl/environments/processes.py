"""Environments in worker processes: an object is bytes between two calls, so that any process can take the next."""

import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any, NamedTuple

import numpy

from mcore_rl.config.rl.environment import EnvironmentConfig
from mcore_rl.rl.environments.interface import Environment, Message
from mcore_rl.rl.types import Problem
from mcore_rl.rl.workers.failure import MAX_TEXT, CaughtException, FailedScore, cut
from mcore_rl.rl.workers.pool import WorkerPool

CHARACTERS_PER_TOKEN = 64
"""Characters beyond which a token has none: longer messages than this times the tokens that a conversation may have are
not sent, nor made into tokens."""
REPLY_FORMS = "wanted: (messages, reward, whether it has ended)"

MakeEnvironment = Callable[[], Environment]


class EnvironmentCall(NamedTuple):
    """A call of an environment: `start` with a problem, or `step` with the text of a turn."""

    state: bytes | None
    """The pickled environment; None: it is to be made, and started."""
    argument: Problem | str


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentAnswer:
    """Answer of an environment to one call."""

    state: bytes
    """The pickled environment after the call."""
    messages: tuple[Message, ...]
    """Messages that the policy answers next; empty where they are too long to be sent."""
    reward: float = 0.0
    is_done: bool = False
    is_too_long: bool = False
    """Whether the messages are longer than any conversation."""


class EnvironmentWorkers(WorkerPool):
    """Processes that run one kind of environment; `run` takes EnvironmentCall, returns EnvironmentAnswer or
    FailedScore.
    """

    def __init__(self, make: MakeEnvironment, config: EnvironmentConfig) -> None:
        """Start the processes.

        Args:
            make: makes an environment; see `environment_maker`.
            config: the section `rl.environment`.
        """
        super().__init__(
            partial(_answer, make, CHARACTERS_PER_TOKEN * config.max_tokens),
            workers=config.workers,
            timeout_s=config.timeout_s,
            max_memory_gib=config.max_memory_gib,
        )


def _answer(
    make: MakeEnvironment, max_characters: int, call: EnvironmentCall
) -> EnvironmentAnswer | FailedScore:
    """Make one call of an environment."""
    with CaughtException() as guard:
        reward, is_done = 0.0, False
        if call.state is None:
            environment = make()
            assert isinstance(call.argument, Problem)
            messages: Any = environment.start(call.argument)
        else:
            environment = pickle.loads(call.state)  # our own bytes, which come from this function
            assert isinstance(call.argument, str)
            returned: Any = environment.step(call.argument)
            match returned:
                # A comparison of numpy's numbers is numpy's bool, which is no bool and no number.
                case (messages, Real() | numpy.bool_() as value, bool() | numpy.bool_() as ended):
                    reward, is_done = float(value), bool(ended)
                case _:
                    return FailedScore(
                        "bad_reply", f"step returned {cut(repr(returned), MAX_TEXT // 2)}; {REPLY_FORMS}"
                    )
            if not math.isfinite(reward):
                return FailedScore("not_finite", f"the reward of a turn is {reward}")
        if isinstance(problem := _checked(messages, needs_one=not is_done), FailedScore):
            return problem
        is_too_long = sum(len(message["content"]) for message in problem) > max_characters
        return EnvironmentAnswer(
            state=_pickled(environment),
            messages=() if is_too_long else problem,
            reward=reward,
            is_done=is_done,
            is_too_long=is_too_long,
        )
    return guard.failure(__file__)


def _checked(messages: Any, *, needs_one: bool) -> tuple[Message, ...] | FailedScore:
    """Return the messages as they can be sent, or the reason why they cannot."""
    if isinstance(messages, Sequence) and not isinstance(messages, str | bytes):
        is_right = all(
            isinstance(one, Mapping)
            and isinstance(one.get("role"), str)
            and isinstance(one.get("content"), str)
            for one in messages
        )
        if is_right and (messages or not needs_one):
            return tuple(dict(message) for message in messages)
    shown = cut(repr(messages), MAX_TEXT // 2)
    return FailedScore("bad_reply", f'{shown} is no list of messages with "role" and "content"')


def _pickled(environment: Environment) -> bytes:
    try:
        return pickle.dumps(environment)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise TypeError(
            f"{type(environment).__name__} cannot be pickled between two calls: {error}. Open in each call what cannot "
            "be pickled, or leave it out with __getstate__"
        ) from error
