"""Environments: the interface, the built-in ones by name, and worker processes that run them."""

import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any, NamedTuple, Protocol

import numpy

from mcore_rl.config.extension import load_extension
from mcore_rl.config.rl.rollout import EnvironmentConfig
from mcore_rl.errors import ConfigError
from mcore_rl.rl.types import Problem
from mcore_rl.rl.workers import MAX_TEXT, CaughtException, FailedScore, WorkerPool, cut

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
        """Answer the text of a turn. Returns the next messages for the policy to answer (ignored at the end), the
        reward of this turn, and whether the conversation has ended.
        """
        ...


ENVIRONMENTS = {
    "calculator": "mcore_rl.rl.environments.builtin:Calculator",
    "guessing": "mcore_rl.rl.environments.builtin:Guessing",
    "python": "mcore_rl.rl.environments.builtin:PythonTool",
    "reasoning_gym": "mcore_rl.rl.environments.builtin:ReasoningGym",
    "textarena": "mcore_rl.rl.environments.builtin:TextArena",
}
"""Class of each built-in environment; its module, and the packages that it needs, are imported only when it is used."""


def environment_maker(config: EnvironmentConfig) -> Callable[[], Environment]:
    """Return a function that creates an environment of the config. Raises ConfigError if the name is unknown, a package
    or sandbox is missing, or the arguments do not match.
    """
    assert config.name is not None
    kind = load_extension("rl.environment.name", ENVIRONMENTS.get(config.name, config.name))
    make: Callable[[], Environment] = partial(kind, **config.arguments)
    try:
        make()
    except TypeError as error:
        raise ConfigError(
            f'rl.environment.arguments do not fit rl.environment.name="{config.name}": {error}.'
        ) from error
    return make


CHARACTERS_PER_TOKEN = 64
"""Upper bound on the characters of a token. Messages longer than this times the tokens that a conversation may have
are neither sent nor tokenized."""
REPLY_FORMS = "wanted: (messages, reward, whether it has ended)"

MakeEnvironment = Callable[[], Environment]


class EnvironmentCall(NamedTuple):
    """A call of an environment: `start` with a problem, or `step` with the text of a turn."""

    state: bytes | None
    """The pickled environment; None: create and start a new environment."""
    argument: Problem | str


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentAnswer:
    """Answer of an environment to a call."""

    state: bytes
    """The pickled environment after the call."""
    messages: tuple[Message, ...]
    """Next messages for the policy to answer; empty if they are too long to be sent."""
    reward: float = 0.0
    is_done: bool = False
    is_too_long: bool = False
    """Whether the messages are longer than any conversation may be."""


class EnvironmentWorkers(WorkerPool):
    """Worker processes that run environments: an EnvironmentAnswer or FailedScore for each EnvironmentCall."""

    def __init__(self, make: MakeEnvironment, config: EnvironmentConfig) -> None:
        """Start the processes; `make` creates an environment (`environment_maker`)."""
        super().__init__(
            partial(_answer, make, CHARACTERS_PER_TOKEN * config.max_tokens),
            workers=config.workers,
            timeout_s=config.timeout_s,
            max_memory_gib=config.max_memory_gib,
        )


def _answer(make: MakeEnvironment, max_characters: int, call: EnvironmentCall) -> EnvironmentAnswer | FailedScore:
    with CaughtException() as guard:
        reward, is_done = 0.0, False
        if call.state is None:
            environment = make()
            assert isinstance(call.argument, Problem)
            messages: Any = environment.start(call.argument)
        else:
            environment = pickle.loads(call.state)  # trusted: these bytes were pickled by this function
            assert isinstance(call.argument, str)
            returned: Any = environment.step(call.argument)
            match returned:
                # Comparing NumPy numbers gives a NumPy bool, which is neither a bool nor a number.
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
        try:
            state = pickle.dumps(environment)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise TypeError(
                f"{type(environment).__name__} cannot be pickled between two calls: {error}. Open in each call what "
                "cannot be pickled, or leave it out with __getstate__"
            ) from error
        return EnvironmentAnswer(
            state=state,
            messages=() if is_too_long else problem,
            reward=reward,
            is_done=is_done,
            is_too_long=is_too_long,
        )
    return guard.failure(__file__)


def _checked(messages: Any, *, needs_one: bool) -> tuple[Message, ...] | FailedScore:
    if isinstance(messages, Sequence) and not isinstance(messages, str | bytes):
        is_right = all(
            isinstance(message, Mapping)
            and isinstance(message.get("role"), str)
            and isinstance(message.get("content"), str)
            for message in messages
        )
        if is_right and (messages or not needs_one):
            return tuple(dict(message) for message in messages)
    shown = cut(repr(messages), MAX_TEXT // 2)
    return FailedScore("bad_reply", f'{shown} is no list of messages with "role" and "content"')
