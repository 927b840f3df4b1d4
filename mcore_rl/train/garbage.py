"""Python garbage collection at the same time on all ranks."""

import gc
from types import TracebackType


class TimedGarbage:
    """Context in which garbage is collected only between units of work, not within them.

    Python collects after a number of allocations, on each rank at a different time, and all ranks then wait for that
    rank in the next collective.
    """

    def __init__(self, interval: int | None) -> None:
        """Collect every `interval` units of work; None: leave it to Python."""
        self._interval = interval
        self._units = 0
        self._was_enabled = False

    def __enter__(self) -> "TimedGarbage":
        if self._interval is not None:
            self._was_enabled = gc.isenabled()
            gc.disable()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._was_enabled:
            gc.enable()

    def unit_done(self) -> None:
        """Collect if it is time."""
        self._units += 1
        if self._interval is not None and self._units % self._interval == 0:
            gc.collect()

    def collect(self) -> None:
        """Collect now, at a point where all ranks stop anyway."""
        if self._interval is not None:
            gc.collect()
