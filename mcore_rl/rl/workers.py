"""Worker processes for user-defined functions: a function that hangs, crashes or raises costs one job, not the run."""

import gc
import logging
import multiprocessing
import os
import resource
import select
import signal
import threading
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, Literal, Self

import psutil
import torch

from mcore_rl.workers.forked_rank import STOP_SIGNALS
from mcore_rl.workers.process_tree import END_TREE, supervise

MAX_TEXT = 2000
"""Longest error text or reason that a worker sends, in characters; longer text is cut in the middle."""
MAX_TRACEBACK = 8000
"""Longest traceback that a worker sends, in characters."""


@dataclass(frozen=True, slots=True)
class FailedScore:
    """Reason why a function or environment returned no usable number."""

    kind: Literal["raised", "not_finite", "bad_steps", "bad_reply", "template", "timeout", "died"]
    text: str
    """One sentence: class and text of the exception, or a description of the problem."""
    error: str = ""
    """Class name of the exception; empty if none was raised."""
    traceback: str = ""
    """Traceback, starting at the user's function; empty if no exception was raised."""


class CaughtException:
    """Context that catches any `Exception` from the user's code inside, to be counted as a failure."""

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        self.error = error
        return isinstance(error, Exception)

    def failure(self, own_file: str) -> FailedScore:
        """Return the caught failure, with its traceback from the first frame outside `own_file`."""
        error = self.error
        assert error is not None
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename == own_file:
            frames = frames.tb_next  # our own frames, above the user's function
        name = type(error).__name__
        text, shown = f"{name}, whose text cannot be made", ""
        with CaughtException():
            text = f"{name}: {error}"
            shown = "".join(traceback.format_exception(type(error), error, frames))
        return FailedScore("raised", cut(text, MAX_TEXT), error=name, traceback=cut(shown, MAX_TRACEBACK))


def cut(text: str, most: int) -> str:
    """Return `text`; if longer than `most` characters, its beginning, a note, and its end."""
    if len(text) <= most:
        return text
    end = most // 4
    return f"{text[: most - end]} … ({len(text) - most} characters cut) … {text[-end:]}"


GRACE_S = 1.0
"""Seconds after its timeout at which a worker that has not exited is killed."""
PATIENCE_S = 5.0
"""Seconds to wait for a dying process to exit, so that its exit status is known."""
MAX_HANDED = 16
"""Most jobs sent to a process at a time: a message per job would take longer than many rewards do."""
ENDING_S = 10.0
"""Seconds that a process has to end its descendants and itself before it is killed."""
Work = Callable[[Any], Any]
"""Function from a job to its outcome; both must be picklable."""


class WorkerPool:
    """Forked processes that share jobs. A process is replaced if a job takes longer than `timeout_s`; when it ends,
    everything that it started ends too (`process_tree.supervise`).
    """

    def __init__(
        self,
        work: Work,
        *,
        workers: int,
        timeout_s: float,
        max_memory_gib: float | None = None,
        grace_s: float = GRACE_S,
    ) -> None:
        """Start the processes, which run `work` on each job; an exception in it ends the process. `max_memory_gib` is
        address space beyond the process's size at the start (None: no limit). A process that has not exited `grace_s`
        after `timeout_s` is killed.
        """
        self._work, self._max_memory_gib = work, max_memory_gib
        self._timeout_s, self._grace_s = timeout_s, grace_s
        self._changed = threading.Condition()
        """Guards the fields below, and starts: if two threads forked at once, a process would inherit both pipes."""
        self._is_closed = False
        self._num_workers = workers
        self._idle = [self._start() for _ in range(workers)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes; a process that another thread waits for ends after its jobs."""
        with self._changed:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for worker in idle:
            worker.stop(PATIENCE_S)

    def run(self, jobs: Sequence[Any]) -> list[Any]:
        """Return the outcome of each job in order, or a FailedScore if the job took too long or its process died.
        Several threads may call this at the same time and share the processes.
        """
        outcomes: list[Any] = [FailedScore("died", "not done")] * len(jobs)
        waiting = deque(range(len(jobs)))
        busy: dict[Connection, _Busy] = {}
        while waiting or busy:
            # A thread with jobs in progress waits for them; a thread without any waits for an idle process.
            while waiting and (idle := self._take(waits=not busy)) is not None:
                # Ever smaller batches: jobs behind a slow job wait for it while other processes may be idle.
                count = max(1, min(MAX_HANDED, len(waiting) // (4 * self._num_workers)))
                handed = deque(waiting.popleft() for _ in range(count))
                worker = self._hand(idle, [jobs[index] for index in handed])
                busy[worker.pipe] = _Busy(worker, handed, self._deadline())
            patience = max(0.0, min(batch.deadline for batch in busy.values()) - time.monotonic())
            ready = set(wait(list(busy), timeout=patience))
            for pipe, batch in list(busy.items()):
                is_late = time.monotonic() >= batch.deadline
                if (pipe in ready or is_late) and self._collect(batch, outcomes, is_late):
                    del busy[pipe]
                    waiting.extendleft(reversed(batch.handed))
        return outcomes

    def _deadline(self) -> float:
        return time.monotonic() + self._timeout_s + self._grace_s

    def _take(self, *, waits: bool) -> "_Worker | None":
        with self._changed:
            if waits:
                self._changed.wait_for(lambda: self._idle)
            return self._idle.pop() if self._idle else None

    def _give_back(self, worker: "_Worker") -> None:
        with self._changed:
            if not self._is_closed:
                self._idle.append(worker)
                self._changed.notify()
                return
        worker.stop(PATIENCE_S)

    def _hand(self, worker: "_Worker", jobs: list[Any]) -> "_Worker":
        """Send jobs to a worker and return it, or its replacement if it died since its last job."""
        try:
            worker.pipe.send(jobs)
        except OSError:
            worker.stop(PATIENCE_S)
            worker = self._start()
            worker.pipe.send(jobs)
        return worker

    def _collect(self, batch: "_Busy", outcomes: list[Any], is_late: bool) -> bool:
        """Store the outcomes that the worker has sent; return whether it will send no more of the batch. A worker that
        is late or died is replaced, and its current job fails; later jobs stay in `batch.handed`.
        """
        worker, handed = batch.worker, batch.handed
        try:
            while handed and worker.has_outcome():
                outcomes[handed.popleft()] = worker.pipe.recv()
                batch.deadline, is_late = self._deadline(), False
            if not handed:
                self._give_back(worker)
                return True
            if not is_late:
                return False
        except (EOFError, OSError):
            is_late = False
        status = worker.stop(0.0 if is_late else PATIENCE_S)
        self._give_back(self._start())
        if is_late or status == -signal.SIGALRM:
            outcomes[handed.popleft()] = FailedScore("timeout", f"no answer within {self._timeout_s} s")
        else:
            outcomes[handed.popleft()] = FailedScore("died", f"the process ended with status {status}")
        return True

    def _start(self) -> "_Worker":
        with self._changed:
            context = multiprocessing.get_context("fork")
            ours, theirs = context.Pipe()
            serve = partial(_serve, theirs, self._work, self._timeout_s, self._max_memory_gib)
            process = context.Process(target=_start_serving, args=(serve, theirs, ours, os.getpid()), daemon=True)
            collects = gc.isenabled()
            gc.disable()  # until the child has frozen the objects it inherits, perhaps tensors on a GPU
            with warnings.catch_warnings():
                # Python 3.12 warns about locks of other threads; a worker takes none of them.
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

    def has_outcome(self) -> bool:
        """Return whether an outcome or the end of the pipe can be read. Connection.poll is far slower."""
        poll = select.poll()
        poll.register(self.pipe, select.POLLIN)
        return bool(poll.poll(0))

    def stop(self, patience_s: float) -> int | None:
        """Close the pipe, end the process tree if it has not exited after `patience_s`, and return the exit status."""
        with suppress(OSError):
            self.pipe.send(None)  # workers forked later hold this end of the pipe too, so that its close is not seen
        self.pipe.close()
        self.process.join(timeout=patience_s)
        if self.process.exitcode is None and self.process.pid is not None:
            os.kill(self.process.pid, END_TREE)
            self.process.join(timeout=ENDING_S)
        self.process.kill()
        self.process.join()
        return self.process.exitcode


@dataclass(slots=True)
class _Busy:
    worker: _Worker
    handed: deque[int]
    """Indices of the jobs that were sent to the worker and are not done, in order."""
    deadline: float
    """Time (monotonic, in seconds) at which the first of them is late."""


def _start_serving(serve: "partial[None]", theirs: Connection, ours: Connection, parent: int) -> None:
    """Serve in a child process; this supervising process then closes its copy of the worker's end of the pipe."""
    ours.close()
    gc.freeze()
    supervise(serve, parent, after_start=theirs.close)


def _serve(pipe: Connection, work: Work, timeout_s: float, max_memory_gib: float | None) -> None:
    """Serve jobs until the parent sends None, closes its end of the pipe or dies."""
    gc.enable()
    torch.set_num_threads(1)  # a forked process has no OpenMP threads, and user code may compute
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process, even inside C code
    # It warns that its own timeouts are off; ours are on.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    if max_memory_gib is not None:
        # The address space of this process and its children: its current size, and so much more.
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        limit = psutil.Process().memory_info().vms + int(max_memory_gib * 2**30)
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    while True:
        try:
            jobs = pipe.recv()
        except EOFError:
            jobs = None
        if jobs is None:
            return
        for job in jobs:
            signal.setitimer(signal.ITIMER_REAL, timeout_s)
            outcome = work(job)
            signal.setitimer(signal.ITIMER_REAL, 0)
            pipe.send(outcome)
