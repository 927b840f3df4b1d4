"""Measuring on a machine that others use too: CPU time of this process, and how far wall time was from it."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

import torch
from torch import Tensor

from mcore_rl.backend.cpu.kernels import CpuKernels, using
from mcore_rl.backend.cpu.products import product


@dataclass
class Clock:
    """CPU and wall seconds of a block of code, every time it ran."""

    cpu_s: list[float] = field(default_factory=list)
    wall_s: list[float] = field(default_factory=list)

    def __enter__(self) -> "Clock":
        self._start = time.process_time(), time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        cpu_s, wall_s = self._start
        self.cpu_s.append(time.process_time() - cpu_s)
        self.wall_s.append(time.perf_counter() - wall_s)

    @property
    def median_s(self) -> float:
        """Median of the CPU seconds."""
        return median(self.cpu_s)

    @property
    def spread(self) -> float:
        """Interquartile range of the CPU seconds over their median."""
        ordered = sorted(self.cpu_s)
        quarter = len(ordered) // 4
        return (ordered[-1 - quarter] - ordered[quarter]) / self.median_s


def contention(clocks: list[Clock]) -> float:
    """Wall over CPU seconds: 1 is a machine to oneself."""
    return sum(sum(clock.wall_s) for clock in clocks) / sum(sum(clock.cpu_s) for clock in clocks)


def gflops(seconds: float, flops: float) -> float:
    """GFLOP/s."""
    return flops / seconds / 1e9


class Peaks:
    """The fastest matrix products of this machine, one thread, fp32: torch's way (MKL) and oneDNN's."""

    SIZE = 1024

    def __init__(self) -> None:
        self._left, self._right = (torch.randn(self.SIZE, self.SIZE) for _ in range(2))
        self._products: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"mkl": torch.mm, "onednn": product}
        self._clocks = {name: Clock() for name in self._products}

    def measure(self) -> None:
        """One more round of each."""
        for name, function in self._products.items():
            with using(CpuKernels("onednn")):
                function(self._left, self._right)
                with self._clocks[name]:
                    for _ in range(8):
                        function(self._left, self._right)

    def gflops(self) -> dict[str, float]:
        """GFLOP/s of each in the best round."""
        flops = 8 * 2 * self.SIZE**3
        return {name: gflops(min(clock.cpu_s), flops) for name, clock in self._clocks.items()}
