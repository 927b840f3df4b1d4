"""Reward functions: their input and result, and worker processes in which a function that hangs costs one score."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Integral, Real
from typing import Any, NamedTuple

import numpy

from mcore_rl.rl.workers import GRACE_S, MAX_TEXT, CaughtException, FailedScore, WorkerPool, cut


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
    [RewardInput], float | tuple[float | None, str | None] | Mapping[str, Any] | Sequence[tuple[int, float]] | None
]
"""A reward function, which runs in a separate process. It may return:

- a finite number;
- (number, reason);
- a dict with the number under "score" (or "reward"); its other entries are the reason;
- the completion's steps as (end, value) pairs, with increasing ends between 1 and the length of the text; the reward
  is the sum of the values;
- None, or None in place of the number: the part does not apply to this prompt and is left out of its sum.
"""


SCORE_KEYS = ("score", "reward")
"""Keys under which a returned dict may have its score."""
SCORE_FORMS = "wanted: a number, (number, reason), a dict with 'score', or steps [(end, value), ...]"


class Job(NamedTuple):
    """A function, by its index, to apply to a completion."""

    function: int
    scored: RewardInput


@dataclass(frozen=True, slots=True)
class Score:
    """Score that a reward function gave to a completion."""

    value: float
    """The number, or the sum of the steps' values."""
    steps: tuple[TextStep, ...] | None = None
    """Steps of the completion; None: the function returned a single number."""
    reason: str = ""
    """The function's reason for the score."""
    applies: bool = True
    """Whether the part applies to the completion; if not, the value is NaN."""


Outcome = Score | FailedScore


class RewardWorkers(WorkerPool):
    """Worker processes that apply reward functions; `run` returns the outcome of each job."""

    def __init__(
        self,
        functions: Sequence[RewardFunction],
        *,
        workers: int,
        timeout_s: float,
        max_memory_gib: float | None = None,
        grace_s: float = GRACE_S,
    ) -> None:
        """Start the processes; all arguments but `functions` are WorkerPool's."""
        super().__init__(
            partial(_apply, tuple(functions)),
            workers=workers,
            timeout_s=timeout_s,
            max_memory_gib=max_memory_gib,
            grace_s=grace_s,
        )


def _apply(functions: Sequence[RewardFunction], job: Job) -> Outcome:
    with CaughtException() as guard:
        return outcome_of(functions[job.function](job.scored), len(job.scored.completion))
    return guard.failure(__file__)


def outcome_of(returned: Any, num_characters: int) -> Outcome:
    """Convert a reward function's result to an outcome; ends of steps are at most `num_characters`, the length of the
    text. Raises TypeError if the result has none of the accepted forms, ValueError if a text is not a number.
    """
    reason = ""
    if isinstance(returned, Mapping):
        found = [key for key in SCORE_KEYS if key in returned]
        if len(found) != 1:
            keys = cut(", ".join(map(str, returned)) or "none", MAX_TEXT // 2)
            raise TypeError(f"the function returned a dict with the keys {keys}; {SCORE_FORMS}")
        others = {key: value for key, value in returned.items() if key != found[0]}
        reasons = [str(others.pop("reason"))] if others.get("reason") else []
        reason = "; ".join([*reasons, *(f"{key}: {value}" for key, value in others.items())])
        returned = returned[found[0]]
    elif isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], str | None):
        returned, reason = returned[0], returned[1] or ""
    reason = cut(reason, MAX_TEXT)
    if isinstance(returned, Sequence) and not isinstance(returned, str | bytes):
        steps: list[TextStep] = []
        for entry in returned:
            match entry:
                case (Integral() as end, Real() | numpy.bool_() as value) if not isinstance(end, bool):
                    steps.append(TextStep(int(end), float(value)))
                case _:
                    return FailedScore("bad_steps", f"{cut(repr(entry), MAX_TEXT // 2)} is no (end, value)")
        for before, step in zip((TextStep(0, 0.0), *steps), steps, strict=False):
            if not before.end < step.end <= num_characters:
                return FailedScore("bad_steps", f"end {step.end} after {before.end} of {num_characters} characters")
            if not math.isfinite(step.value):
                return FailedScore("not_finite", str(step))
        return Score(sum(step.value for step in steps), tuple(steps), reason)
    if returned is None:
        return Score(math.nan, None, reason, applies=False)
    number = float(returned)
    return Score(number, None, reason) if math.isfinite(number) else FailedScore("not_finite", str(number))
