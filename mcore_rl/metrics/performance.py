"""The cost of a step as metrics: the time of its phases, its speed, and the memory of this process."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from mcore_rl.metrics.metric_table import row_of
from mcore_rl.metrics.metrics import Metric


class Timers:
    """Stopwatches of the phases of a step (`time/<phase>_s` in METRICS).

    With `synchronise` a phase begins and ends with a wait for the device, so that its time is the device's; host and
    device then no longer overlap. Without it the time of a phase on CUDA is the time in which the host queued the
    work.
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


def speed_metrics(
    num_tokens: float, step_s: float, num_ranks: int, flops_per_token: float, peak_flops: float | None
) -> list[Metric]:
    """Return tokens/s, model TFLOP/s and MFU per rank, and the time of the step.

    Args:
        num_tokens: Trained tokens of the step, summed over all ranks.
        step_s: Wall time of the step.
        num_ranks: Number of ranks in the world.
        flops_per_token: Model FLOPs of forward and backward (planning/flops.py).
        peak_flops: Peak FLOP/s of each rank's device (metrics/peak.py); None if unknown: there is then no MFU.
    """
    flops = num_tokens * flops_per_token
    rank_s = step_s * num_ranks
    metrics = [
        Metric("train/step_s", step_s),
        Metric("train/tokens_per_s_per_rank", num_tokens, rank_s),
        Metric("train/model_tflops_per_rank", flops / 1e12, rank_s),
    ]
    if peak_flops is not None:
        metrics.append(Metric("train/mfu", flops, rank_s * peak_flops))
    return metrics


def memory_metrics(device: torch.device) -> list[Metric]:
    """Return main memory now and at its peak (on Linux), and on CUDA device memory now, at its peak and reserved."""
    metrics: list[Metric] = []
    status = Path("/proc/self/status")
    if status.exists():
        # Not getrusage: its peak survives exec, so that a rank would report its launcher's.
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
        metrics += [
            Metric("memory/resident_bytes", int(lines["VmRSS"].split()[0]) * 1024),
            Metric("memory/peak_resident_bytes", int(lines["VmHWM"].split()[0]) * 1024),
        ]
    if device.type == "cuda":
        metrics += [
            Metric("memory/device_bytes", torch.cuda.memory_allocated(device)),
            Metric("memory/peak_device_bytes", torch.cuda.max_memory_allocated(device)),
            Metric("memory/device_reserved_bytes", torch.cuda.memory_reserved(device)),
        ]
    return metrics
