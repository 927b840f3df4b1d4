"""A call in a forked copy of this process, which continues meanwhile."""

import gc
import os
import pickle
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Generic, NoReturn, TypeVar

import torch

from mcore_rl.errors import McoreRlError
from mcore_rl.workers.forked_rank import STOP_SIGNALS, die_with

T = TypeVar("T")
RETURNED, FAILED, RAISED = 0, 1, 2
"""The exit statuses of the child."""


class ForkedCallError(Exception):
    """The call's process was killed, or ended by an error from outside mcore_rl; the text says how."""


class ForkedCall(Generic[T]):
    """A call of `function()` on a copy of the current memory; the copy dies with this process.

    It must not communicate or touch a GPU: sockets and CUDA context are shared.
    """

    def __init__(self, function: Callable[[], T]) -> None:
        # A file in memory, so that a long result does not wait for a reader and is not lost by a full disk.
        self._report = os.memfd_create("forked-call")
        self._status: int | None = None
        parent = os.getpid()
        with warnings.catch_warnings():
            # Python 3.12 warns of locks that other threads may hold; the locks that the child takes are made safe at
            # fork.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._pid = os.fork()
        if self._pid == 0:
            _live_as_child(parent, self._report, function)

    def is_running(self) -> bool:
        """Return whether the result is still to come."""
        if self._status is None:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            self._status = status if pid else None
        return self._status is None

    def result(self) -> T:
        """Wait for the function's result and return it, or raise its mcore_rl error; to be called once."""
        if self._status is None:
            _, self._status = os.waitpid(self._pid, 0)
        with open(self._report, "rb") as report:
            report.seek(0)
            content = report.read()
        code = os.waitstatus_to_exitcode(self._status)
        if code < 0:
            raise ForkedCallError(f"the process was ended by {signal.Signals(-code).name}")
        if code == RAISED:
            raise pickle.loads(content)
        if code != RETURNED or not content:
            raise ForkedCallError(content.decode(errors="replace") or f"the process ended with status {code}")
        value: T = pickle.loads(content)
        return value


def _live_as_child(parent: int, report: int, function: Callable[[], object]) -> NoReturn:
    status, content = FAILED, b""
    try:
        die_with(parent)
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)  # a request to stop is for the parent, which waits for us
        gc.disable()  # the garbage includes the parent's tensors on the GPU
        torch.set_num_threads(1)  # OpenMP's threads were not copied
        content = pickle.dumps(function())
        status = RETURNED
    except McoreRlError as error:
        content = pickle.dumps(error)
        status = RAISED
    finally:
        unforeseen = sys.exception()
        if unforeseen is not None:
            content = "".join(traceback.format_exception_only(unforeseen)).strip().encode()
        with open(report, "wb") as file:
            file.write(content)
        os._exit(status)
