"""Processes that run reward functions, so that one that hangs, crashes or raises costs one score, not the run."""

import gc
import logging
import math
import multiprocessing
import signal
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from numbers import Integral, Real
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self

import torch

from mcore_rl.rl.rewards.interface import RewardFunction, RewardInput, TextStep

GRACE_S = 1.0
"""Seconds after its time-out at which a worker that has not ended itself is killed."""
PATIENCE_S = 5.0
"""Seconds that a dying process is given to end, so that its exit status is known."""


class Job(NamedTuple):
    """One function, by its index, to be applied to one completion."""

    function: int
    scored: RewardInput


@dataclass(frozen=True, slots=True)
class Failure:
    """Reason why a function gave no number."""

    kind: Literal["raised", "not_finite", "bad_steps", "timeout", "died"]
    text: str


Outcome = float | tuple[TextStep, ...] | Failure


class RewardWorkers:
    """Forked processes that share the jobs; a process whose job takes longer than `timeout_s` is replaced."""

    def __init__(
        self,
        functions: Sequence[RewardFunction],
        *,
        workers: int,
        timeout_s: float,
        grace_s: float = GRACE_S,
    ) -> None:
        self._functions = tuple(functions)
        self._grace_s = grace_s
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
        outcomes: list[Outcome] = [Failure("died", "not scored")] * len(jobs)
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
            return Failure("timeout", f"no answer within {self._timeout_s} s")
        return Failure("died", f"the process ended with status {status}")

    def _start(self) -> "_Worker":
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        process = context.Process(
            target=_serve, args=(theirs, ours, self._functions, self._timeout_s), daemon=True
        )
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
        """Close the pipe, kill the process if it has not ended after `patience_s`, and return its exit status."""
        self.pipe.close()
        self.process.join(timeout=patience_s)
        self.process.kill()
        self.process.join()
        return self.process.exitcode


class _Busy(NamedTuple):
    worker: _Worker
    job_index: int
    deadline: float


class _Guard:
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


def _serve(
    pipe: Connection, parents: Connection, functions: tuple[RewardFunction, ...], timeout_s: float
) -> None:
    """Score until the other end is closed, by the parent or by its death."""
    gc.freeze()
    gc.enable()
    torch.set_num_threads(1)  # OpenMP's threads were not copied: a function of the user's may compute
    parents.close()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # requests to stop are for the parent
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process, even inside C code
    logging.getLogger("math_verify").setLevel(
        logging.ERROR
    )  # it warns that its time-outs are off: ours is on
    while True:
        try:
            job: Job = pipe.recv()
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_REAL, timeout_s)
        outcome = _score(functions[job.function], job.scored)
        signal.setitimer(signal.ITIMER_REAL, 0)
        pipe.send(outcome)


def _score(function: RewardFunction, scored: RewardInput) -> Outcome:
    with _Guard() as guard:
        returned: Any = function(scored)
        if isinstance(returned, Sequence) and not isinstance(returned, str):
            return _steps(returned, len(scored.completion))
        value = float(returned)
        return value if math.isfinite(value) else Failure("not_finite", str(value))
    return Failure("raised", f"{type(guard.error).__name__}: {guard.error}")


def _steps(returned: Sequence[Any], num_characters: int) -> tuple[TextStep, ...] | Failure:
    """Return the steps, or a failure where they are none of a text of so many characters."""
    steps: list[TextStep] = []
    for one in returned:
        match one:
            case (Integral() as end, Real() as value):
                steps.append(TextStep(int(end), float(value)))
            case _:
                return Failure("bad_steps", f"{one!r} is no (end, value)")
    for before, step in zip((TextStep(0, 0.0), *steps), steps, strict=False):
        if not before.end < step.end <= num_characters:
            return Failure("bad_steps", f"end {step.end} after {before.end} of {num_characters} characters")
        if not math.isfinite(step.value):
            return Failure("not_finite", str(step))
    return tuple(steps)
