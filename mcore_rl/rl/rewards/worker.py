"""Processes that run reward functions, so that one that hangs, crashes or raises costs one score, not the run."""

import gc
import logging
import math
import multiprocessing
import os
import resource
import signal
import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from numbers import Integral, Real
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self

import psutil
import torch

from mcore_rl.rl.rewards.interface import RewardFunction, RewardInput, TextStep
from mcore_rl.rl.rewards.process_tree import END_TREE, REQUESTS, supervise

GRACE_S = 1.0
"""Seconds after its time-out at which a worker that has not ended itself is killed."""
PATIENCE_S = 5.0
"""Seconds that a dying process is given to end, so that its exit status is known."""
ENDING_S = 10.0
"""Seconds that a process is given to end its descendants and itself; then it is killed."""
MAX_TEXT = 2000
"""Characters of an error's text or of a reason that leave a worker; what is longer is cut in the middle."""
MAX_TRACEBACK = 8000
"""Characters of a traceback that leave a worker."""
SCORE_KEYS = ("score", "reward")
"""Keys of a returned dict, one of which has the score."""
WANTED = "wanted: a number, (number, reason), a dict with 'score', or steps [(end, value), ...]"


class Job(NamedTuple):
    """One function, by its index, to be applied to one completion."""

    function: int
    scored: RewardInput


@dataclass(frozen=True, slots=True)
class FailedScore:
    """Reason why a function gave no number."""

    kind: Literal["raised", "not_finite", "bad_steps", "timeout", "died"]
    text: str
    """One sentence: class and text of an exception, or what was returned or happened."""
    error: str = ""
    """Name of the exception's class; empty where none was raised."""
    traceback: str = ""
    """Traceback of the exception from the function on; empty where none was raised."""


@dataclass(frozen=True, slots=True)
class Score:
    """Score that a function gave a completion."""

    value: float
    """The number, or the sum of the steps' values."""
    steps: tuple[TextStep, ...] | None = None
    """Steps of the completion; None: the function returned a number."""
    reason: str = ""
    """The function's own remark on the score."""


Outcome = Score | FailedScore


class RewardWorkers:
    """Forked processes that share the jobs; a process whose job takes longer than `timeout_s` is replaced.

    With a process ends everything that it has started: see `process_tree.supervise`.
    """

    def __init__(
        self,
        functions: Sequence[RewardFunction],
        *,
        workers: int,
        timeout_s: float,
        max_memory_gib: float | None = None,
        grace_s: float = GRACE_S,
    ) -> None:
        """Start the processes.

        Args:
            timeout_s: seconds for one job.
            max_memory_gib: GiB of address space that a process may take beyond what it inherits; None: no limit.
            grace_s: seconds after `timeout_s` until a process that has not ended itself is killed.
        """
        self._functions = tuple(functions)
        self._grace_s = grace_s
        self._max_memory_gib = max_memory_gib
        self._timeout_s = timeout_s
        self._idle = [self._start() for _ in range(workers)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes."""
        while self._idle:
            self._idle.pop().stop(PATIENCE_S)

    def run(self, jobs: Sequence[Job]) -> list[Outcome]:
        """Return the outcome of each job, in order."""
        outcomes: list[Outcome] = [FailedScore("died", "not scored")] * len(jobs)
        waiting = list(reversed(range(len(jobs))))
        busy: dict[Connection, _Busy] = {}
        while waiting or busy:
            while waiting and self._idle:
                index = waiting.pop()
                worker = self._hand(jobs[index])
                busy[worker.pipe] = _Busy(worker, index, time.monotonic() + self._timeout_s + self._grace_s)
            patience = max(0.0, min(one.deadline for one in busy.values()) - time.monotonic())
            ready = set(wait(list(busy), timeout=patience))
            for pipe, one in list(busy.items()):
                is_late = time.monotonic() >= one.deadline
                if pipe in ready or is_late:
                    del busy[pipe]
                    outcomes[one.job_index] = self._collect(one.worker, is_late)
        return outcomes

    def _hand(self, job: Job) -> "_Worker":
        """Give the job to an idle worker and return the worker; one that died since its last job is replaced."""
        worker = self._idle.pop()
        try:
            worker.pipe.send(job)
        except OSError:
            worker.stop(PATIENCE_S)
            worker = self._start()
            worker.pipe.send(job)
        return worker

    def _collect(self, worker: "_Worker", is_late: bool) -> Outcome:
        """Return the worker's outcome; a worker without one is replaced."""
        try:
            if worker.pipe.poll():
                outcome: Outcome = worker.pipe.recv()
                self._idle.append(worker)
                return outcome
        except (EOFError, OSError):
            is_late = False
        status = worker.stop(0.0 if is_late else PATIENCE_S)
        self._idle.append(self._start())
        if is_late or status == -signal.SIGALRM:
            return FailedScore("timeout", f"no answer within {self._timeout_s} s")
        return FailedScore("died", f"the process ended with status {status}")

    def _start(self) -> "_Worker":
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        serve = partial(_serve, theirs, self._functions, self._timeout_s, self._max_memory_gib)
        process = context.Process(target=_start_serving, args=(serve, theirs, ours, os.getpid()), daemon=True)
        collects = gc.isenabled()
        gc.disable()  # until the child has set aside what it inherits, perhaps tensors on a GPU
        with warnings.catch_warnings():
            # Python 3.12 warns of locks that other threads may hold; a worker takes none of theirs.
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
        if collects:
            gc.enable()
        theirs.close()
        return _Worker(process, ours)


@dataclass(frozen=True, slots=True)
class _Worker:
    process: "multiprocessing.context.ForkProcess"
    pipe: Connection

    def stop(self, patience_s: float) -> int | None:
        """Close the pipe, end the process and its descendants if it has not ended after `patience_s`, and return its
        exit status.
        """
        self.pipe.close()
        self.process.join(timeout=patience_s)
        if self.process.exitcode is None and self.process.pid is not None:
            os.kill(self.process.pid, END_TREE)
            self.process.join(timeout=ENDING_S)
        self.process.kill()
        self.process.join()
        return self.process.exitcode


class _Busy(NamedTuple):
    worker: _Worker
    job_index: int
    deadline: float


class _CaughtException:
    """Catches an exception of any kind inside: it comes from the user's code, and is counted."""

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        self.error = error
        return isinstance(error, Exception)


def _start_serving(serve: "partial[None]", theirs: Connection, ours: Connection, parent: int) -> None:
    """Score in a process of its own, under this one; only the worker itself has its end of the pipe then."""
    ours.close()
    gc.freeze()
    supervise(serve, parent, after_start=theirs.close)


def _serve(
    pipe: Connection,
    functions: tuple[RewardFunction, ...],
    timeout_s: float,
    max_memory_gib: float | None,
) -> None:
    """Score until the other end is closed, by the parent or by its death."""
    gc.enable()
    torch.set_num_threads(1)  # OpenMP's threads were not copied: a function of the user's may compute
    for number in REQUESTS:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process, even inside C code
    logging.getLogger("math_verify").setLevel(
        logging.ERROR
    )  # it warns that its time-outs are off: ours is on
    if max_memory_gib is not None:
        _limit_memory(max_memory_gib)
    while True:
        try:
            job: Job = pipe.recv()
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_REAL, timeout_s)
        outcome = _score(functions[job.function], job.scored)
        signal.setitimer(signal.ITIMER_REAL, 0)
        pipe.send(outcome)


def _limit_memory(max_memory_gib: float) -> None:
    """Limit the address space of this process, and of each that it starts, to what it has now and so much more."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = psutil.Process().memory_info().vms + int(max_memory_gib * 2**30)
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _score(function: RewardFunction, scored: RewardInput) -> Outcome:
    with _CaughtException() as guard:
        return _outcome(function(scored), len(scored.completion))
    assert guard.error is not None
    return _raised(guard.error)


def _raised(error: BaseException) -> FailedScore:
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next  # our own, above the function
    name = type(error).__name__
    text, shown = f"{name}, whose text cannot be made", ""
    with _CaughtException():
        text = f"{name}: {error}"
        shown = "".join(traceback.format_exception(type(error), error, frames))
    return FailedScore("raised", cut(text, MAX_TEXT), error=name, traceback=cut(shown, MAX_TRACEBACK))


def cut(text: str, most: int) -> str:
    """Return `text`, or where it is longer than `most` characters its beginning, a note, and its end."""
    if len(text) <= most:
        return text
    end = most // 4
    return f"{text[: most - end]} … ({len(text) - most} characters cut) … {text[-end:]}"


def _outcome(returned: Any, num_characters: int) -> Outcome:
    """Return the score that a function's result stands for, for a text of so many characters."""
    reason = ""
    if isinstance(returned, Mapping):
        returned, reason = _named(returned)
    elif isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], str | None):
        returned, reason = returned[0], returned[1] or ""
    reason = cut(reason, MAX_TEXT)
    if isinstance(returned, Sequence) and not isinstance(returned, str | bytes):
        steps = _steps(returned, num_characters)
        if isinstance(steps, FailedScore):
            return steps
        return Score(sum(step.value for step in steps), steps, reason)
    if returned is None:
        raise TypeError(f"the function returned None; {WANTED}")
    value = float(returned)
    return Score(value, None, reason) if math.isfinite(value) else FailedScore("not_finite", str(value))


def _named(returned: Mapping[Any, Any]) -> tuple[Any, str]:
    """Return the score of a dict, and its other entries as the reason."""
    found = [key for key in SCORE_KEYS if key in returned]
    if len(found) != 1:
        keys = cut(", ".join(map(str, returned)) or "none", MAX_TEXT // 2)
        raise TypeError(f"the function returned a dict with the keys {keys}; {WANTED}")
    others = {key: value for key, value in returned.items() if key != found[0]}
    reason = [str(others.pop("reason"))] if others.get("reason") else []
    return returned[found[0]], "; ".join([*reason, *(f"{key}: {value}" for key, value in others.items())])


def _steps(returned: Sequence[Any], num_characters: int) -> tuple[TextStep, ...] | FailedScore:
    """Return the steps, or a failure where they are none of a text of so many characters."""
    steps: list[TextStep] = []
    for one in returned:
        match one:
            case (Integral() as end, Real() as value):
                steps.append(TextStep(int(end), float(value)))
            case _:
                return FailedScore("bad_steps", f"{cut(repr(one), MAX_TEXT // 2)} is no (end, value)")
    for before, step in zip((TextStep(0, 0.0), *steps), steps, strict=False):
        if not before.end < step.end <= num_characters:
            return FailedScore(
                "bad_steps", f"end {step.end} after {before.end} of {num_characters} characters"
            )
        if not math.isfinite(step.value):
            return FailedScore("not_finite", str(step))
    return tuple(steps)
