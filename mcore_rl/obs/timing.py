"""Time of each phase of a step."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from mcore_rl.obs.metric_table import row_of
from mcore_rl.obs.metrics import Metric


class Timers:
    """Stopwatches of the phases of a step (`time/<phase>_s` in METRICS).

    With `synchronise` a phase begins and ends with a wait for the device, so that its time is the device's; host and
    device then no longer overlap. Without it the time of a phase on CUDA is what the host took to queue the work.
    """

    def __init__(self, device: torch.device, *, synchronise: bool = False) -> None:
        self._device = device
        self._waits = synchronise and device.type == "cuda"
        self._total_s: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time inside the `with` to `time/<name>_s`, also when an exception ends it."""
        key = f"time/{name}_s"
        row_of(key)
        start_s = self._now_s()
        try:
            yield
        finally:
            self._total_s[key] = self._total_s.get(key, 0.0) + self._now_s() - start_s

    def take(self) -> list[Metric]:
        """Return the totals since the last call, once per step, and start again from zero."""
        metrics = [Metric(name, total_s) for name, total_s in self._total_s.items()]
        self._total_s.clear()
        return metrics

    def _now_s(self) -> float:
        if self._waits:
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
