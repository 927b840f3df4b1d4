"""The cost of a step as metrics: the time of its phases, its speed, and the memory of this process."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch

from mcore_rl.errors import ConfigError
from mcore_rl.metrics.metric_table import row_of
from mcore_rl.metrics.metrics import Metric
from mcore_rl.planning.device import known_device

Precision = Literal["fp32", "bf16", "fp8"]


def peak_flops(device: torch.device, precision: Precision, configured_tflops: float | Literal["auto"]) -> float | None:
    """Return the peak FLOP/s of the device: as configured, else by the GPU's name, else measured (~0.2 s). None for a
    CPU, because a measurement would only show how much other processes left of it at the moment.
    """
    if configured_tflops != "auto":
        return configured_tflops * 1e12
    if device.type == "cpu":
        return None
    name = torch.cuda.get_device_name(device)
    known = known_peak_tflops(name, precision)
    if known is not None:
        return known * 1e12
    if precision == "fp8":
        raise ConfigError(f"the fp8 peak of {name} is not known: set log.peak_tflops to its dense TFLOP/s")
    return measured_peak_flops(device, torch.bfloat16 if precision == "bf16" else torch.float32)


def known_peak_tflops(device_name: str, precision: Precision) -> float | None:
    """Return the peak of the device with this CUDA name (planning/device.py); None if it is unknown."""
    device = known_device(device_name)
    return None if device is None else device.peak_tflops.get(precision)


def measured_peak_flops(device: torch.device, dtype: torch.dtype, budget_s: float = 0.2) -> float:
    """Return the FLOP/s of the fastest square matrix product within `budget_s`, with the threads of this process."""
    size = 8192 if device.type == "cuda" else 1024
    # A separate generator: every start measures, and must not change the run's random numbers for dropout.
    generator = torch.Generator(device).manual_seed(0)
    left, right = (torch.randn(size, size, device=device, dtype=dtype, generator=generator) for _ in range(2))
    _product_s(left, right)  # The first product also chooses and loads its kernel.
    best_s = _product_s(left, right)
    end_s = time.perf_counter() + budget_s
    while time.perf_counter() < end_s:
        best_s = min(best_s, _product_s(left, right))
    return 2 * size**3 / best_s


def _product_s(left: torch.Tensor, right: torch.Tensor) -> float:
    start_s = time.perf_counter()
    torch.mm(left, right)
    if left.is_cuda:
        torch.cuda.synchronize(left.device)
    return time.perf_counter() - start_s


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

    `num_tokens` are trained tokens of all ranks. `peak_flops` is each rank's; None if unknown: then there is no MFU.
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
