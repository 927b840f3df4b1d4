"""Where the time of a step goes."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from mcore_rl.obs.metric_table import row_of
from mcore_rl.obs.metrics import Metric


class Timers:
    """Wall time of the phases of a step (`time/<phase>_s` in METRICS).

    `synchronise` waits for the device at both ends of a phase: its time is then the device's, but host and
    device no longer overlap. Without it a phase on CUDA is the time that the host took to queue the work.
    """

    def __init__(self, device: torch.device, *, synchronise: bool = False) -> None:
        self._device = device
        self._waits = synchronise and device.type == "cuda"
        self._total_s: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time inside the `with` to `time/<name>_s`, also when it ends with an error."""
        key = f"time/{name}_s"
        row_of(key)
        start_s = self._now_s()
        try:
            yield
        finally:
            self._total_s[key] = self._total_s.get(key, 0.0) + self._now_s() - start_s

    def take(self) -> list[Metric]:
        """The totals since the last `take`, which then start from zero: called once a step."""
        metrics = [Metric(name, total_s) for name, total_s in self._total_s.items()]
        self._total_s.clear()
        return metrics

    def _now_s(self) -> float:
        if self._waits:
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
