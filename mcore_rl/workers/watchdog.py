"""A watchdog that ends a rank without progress, and with it the run, which can then resume from its last checkpoint."""

import faulthandler
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from types import TracebackType
from typing import Literal

from mcore_rl.errors import HUNG_STATUS
from mcore_rl.workers import flight_recorder
from mcore_rl.workers.failures import Order, note_failure, rank_failure
from mcore_rl.workers.rank_guard import end_process

LINGER_S = 2.0
"""Seconds between a rank's message and its end, in which ranks that wait for it write their own."""
TICKS = 50
"""Number of looks at the clock within a limit."""
LONGEST_TICK_S = 5.0
AUTO_FACTOR = 10.0
"""With limit `auto`, a step hangs if it takes this many times as long as the longest step before it."""
AUTO_LEAST_S = 300.0
"""Minimum limit of `auto`, for steps of less than half a minute."""

Phase = Literal["start", "step", "pause"]
"""The work that a run is doing: its set-up; a step; an evaluation or a save between two steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Seconds that each phase of a run may take; None for no limit."""

    start_s: float | None
    step_s: float | Literal["auto"] | None
    pause_s: float | None
    wait_s: float = 0.0
    """Seconds that one wait for a server may take, for which `auto` always leaves time."""

    def of(self, phase: Phase, longest_step_s: float) -> tuple[float | None, str]:
        """Return a phase's limit and its setting; `longest_step_s` is 0 before a step is measured."""
        if phase == "start":
            return self.start_s, "train.hang_start_s"
        if phase == "pause":
            return self.pause_s, "train.hang_save_s"
        if self.step_s != "auto":
            return self.step_s, "train.hang_s"
        if not longest_step_s:
            limit_s = None if self.start_s is None else max(self.start_s, self.wait_s)
            return limit_s, "train.hang_start_s, for the first two steps"
        limit_s = max(AUTO_LEAST_S, AUTO_FACTOR * longest_step_s, self.wait_s)
        return limit_s, f'train.hang_s="auto", the longest step before took {longest_step_s:.1f} s'


class Watchdog:
    """A limit while entered: a phase that takes longer ends the process with HUNG_STATUS, and all stacks on stderr.

    Only time in which this process was allowed to run counts.
    """

    def __init__(self, limits: Limits, rank: int) -> None:
        self._limits = limits
        self._rank = rank
        self._phase: Phase = "start"
        self._began_s = time.monotonic()
        self._longest_step_s = 0.0
        self._num_steps = 0
        self._idle_s = 0.0
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        self._thread.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._left.set()
        self._thread.join()

    def begin(self, phase: Phase) -> None:
        """Restart the clock, because something was finished and `phase` begins."""
        now_s = time.monotonic()
        if self._phase == "step":
            if self._num_steps:  # kernels are compiled in the first step, which is no measure
                self._longest_step_s = max(self._longest_step_s, now_s - self._began_s)
            self._num_steps += 1
        self._phase, self._began_s, self._idle_s = phase, now_s, 0.0

    def _watch(self) -> None:
        given = (self._limits.start_s, self._limits.step_s, self._limits.pause_s)
        tick_s = min([LONGEST_TICK_S, *(limit / TICKS for limit in given if isinstance(limit, float | int))])
        last_s = time.monotonic()
        while not self._left.wait(tick_s):
            now_s = time.monotonic()
            self._idle_s += min(now_s - last_s, 2 * tick_s)
            last_s = now_s
            limit_s, setting = self._limits.of(self._phase, self._longest_step_s)
            if limit_s is not None and self._idle_s >= limit_s:
                self._end(limit_s, setting)

    def _end(self, limit_s: float, setting: str) -> None:
        headline = f"Rank {self._rank} finished nothing in {limit_s:g} s ({setting})."
        sys.stderr.write(headline + " It hangs, or waits for one. Its threads, this one last:\n")
        sys.stderr.flush()
        faulthandler.dump_traceback(sys.__stderr__ or 2)
        main = sys._current_frames().get(threading.main_thread().ident or 0)
        stack = "".join(traceback.format_stack(main)) if main else ""
        cause = f"finished nothing in {limit_s:g} s ({setting}); it hangs, or waits for another rank"
        trace = flight_recorder.dump(self._rank)
        if trace:
            sys.stderr.write(trace + "\n")
            cause += f". {trace}"
        text = f"{headline} It was here:\n{stack}"
        note_failure(rank_failure(self._rank, HUNG_STATUS, cause, text, Order.CONSEQUENCE))
        time.sleep(LINGER_S)
        end_process(HUNG_STATUS)
