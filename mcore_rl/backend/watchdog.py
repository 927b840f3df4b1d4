"""A rank that gets nowhere ends itself, and with it the run, which can then go on from its last checkpoint."""

import faulthandler
import sys
import threading
import time
import traceback
from types import TracebackType

from mcore_rl.backend import flight_recorder
from mcore_rl.backend.failures import Order, note_failure, rank_failure
from mcore_rl.backend.processes import end_process
from mcore_rl.errors import HUNG_STATUS

LINGER_S = 2.0
"""The time between a rank's message and its end, in which ranks that wait for it write theirs."""
TICKS = 50
"""The number of looks at the clock within a limit."""


class Watchdog:
    """While entered, a limit: when `beat` has not been called for `limit_s`, the stacks of all threads go to stderr and
    the process ends with HUNG_STATUS. With a limit of None never.

    Only time in which this process was allowed to run counts: a suspended job has no hurry.
    """

    def __init__(self, limit_s: float | None, rank: int) -> None:
        self._limit_s = limit_s or 0.0
        self._rank = rank
        self._idle_s = 0.0
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        if self._limit_s:
            self._thread.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._left.set()
        if self._limit_s:
            self._thread.join()

    def beat(self) -> None:
        """Start the time anew, because something was finished."""
        self._idle_s = 0.0

    def _watch(self) -> None:
        tick_s = min(self._limit_s / TICKS, 5.0)
        last_s = time.monotonic()
        while not self._left.wait(tick_s):
            now_s = time.monotonic()
            self._idle_s += min(now_s - last_s, 2 * tick_s)
            last_s = now_s
            if self._idle_s >= self._limit_s:
                self._end()

    def _end(self) -> None:
        headline = f"Rank {self._rank} finished nothing in {self._limit_s:g} s (train.hang_s)."
        sys.stderr.write(headline + " It hangs, or waits for one. Its threads, this one last:\n")
        sys.stderr.flush()
        faulthandler.dump_traceback(sys.__stderr__ or 2)
        main = sys._current_frames().get(threading.main_thread().ident or 0)
        stack = "".join(traceback.format_stack(main)) if main else ""
        cause = f"finished nothing in {self._limit_s:g} s (train.hang_s); it hangs, or waits for another rank"
        trace = flight_recorder.dump(self._rank)
        if trace:
            sys.stderr.write(trace + "\n")
            cause += f". {trace}"
        text = f"{headline} It was here:\n{stack}"
        note_failure(rank_failure(self._rank, HUNG_STATUS, cause, text, Order.CONSEQUENCE))
        time.sleep(LINGER_S)
        end_process(HUNG_STATUS)
