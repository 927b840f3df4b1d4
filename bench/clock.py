"""Measuring on a machine that others use too: CPU time of this process, and how far wall time was from it.

It also has what every benchmark reports beside its figures to be judged by: machine, peaks, contention, spread.
"""

import datetime
import json
import platform
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch

from mcore_rl.metrics.attempts import cpu_name
from mcore_rl.storage.checkpoint import megatron_version

CONTENDED = 1.3
"""Contention above which a row is never quoted."""


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
    """The fastest matrix products of this machine, by torch, one thread, fp32."""

    SIZE = 1024

    def __init__(self) -> None:
        self._left, self._right = (torch.randn(self.SIZE, self.SIZE) for _ in range(2))
        self._clock = Clock()

    def measure(self) -> None:
        """One more round."""
        torch.mm(self._left, self._right)
        with self._clock:
            for _ in range(8):
                torch.mm(self._left, self._right)

    def gflops(self) -> float:
        """GFLOP/s in the best round."""
        return gflops(min(self._clock.cpu_s), 8 * 2 * self.SIZE**3)


class Others:
    """CPU seconds of the machine's other programs while a block of code and its children ran, every time it ran.

    A program that waits for a disk takes more wall than CPU seconds with the machine to itself, so that its contention
    is measured by what others took.
    """

    def __init__(self) -> None:
        self._others_s = self._wall_s = 0.0

    def add(self, own_cpu_s: float, machine_cpu_s: float, wall_s: float) -> None:
        """Count `wall_s` seconds, in which all CPUs together worked `machine_cpu_s`, of which `own_cpu_s` for us."""
        self._others_s += max(0.0, machine_cpu_s - own_cpu_s)
        self._wall_s += wall_s

    @property
    def contention(self) -> float:
        """All CPUs over those that others left to us: 1 is a machine to oneself."""
        taken = self._others_s / max(self._wall_s, 1e-9)
        num_cpus = psutil.cpu_count() or 1
        return num_cpus / max(num_cpus - taken, 1e-3)


def machine_cpu_s() -> float:
    """Return the CPU seconds of all programs on all CPUs since the machine began."""
    times = psutil.cpu_times()
    waiting = times.idle + getattr(times, "iowait", 0.0)
    guests = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)  # they are in user and nice too
    return float(sum(times) - waiting - guests)


def ratio_over_rounds(numerators: Sequence[float], denominators: Sequence[float]) -> dict[str, Any]:
    """Return `ratio`, of the medians, and `ratio_quartiles`, the first and third of the ratios of each round, in which
    the two were measured one after the other.
    """
    ratios = sorted(a / b for a, b in zip(numerators, denominators, strict=True))
    quarter = len(ratios) // 4
    return {
        "ratio": round(median(numerators) / median(denominators), 3),
        "ratio_quartiles": [round(ratios[quarter], 3), round(ratios[-1 - quarter], 3)],
    }


def circumstances(contention: float, peaks: Peaks) -> dict[str, Any]:
    """Return what a row holds beside its figures: contention, whether that forbids to quote it, and the peaks."""
    return {
        "contention": round(contention, 2),
        "is_contended": contention > CONTENDED,
        "peak_gflops": round(peaks.gflops(), 1),
    }


def circumstances_line(row: Mapping[str, Any]) -> str:
    """Return the `circumstances` of a row in words, with the machine."""
    line = (
        f"{cpu_name()} ({torch.backends.cpu.get_cpu_capability()}), one core: {row['peak_gflops']:.0f} GFLOP/s; "
        f"contention {row['contention']:.2f}"
    )
    return f"{line}: CONTENDED, never quoted" if row["is_contended"] else line


def versions() -> dict[str, str]:
    """Return the versions that figures depend on, and the machine."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "megatron-core": megatron_version(),
        "transformers": version("transformers"),
        "machine": cpu_name(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
    }


def write_results(path: Path, figures: Mapping[str, Any], arguments: Sequence[str] | None = None) -> None:
    """Write `figures` with their date, versions and command to `path`, which is named like its module.

    `arguments` are those of the command; None: as this process was started.
    """
    words = ["python", "-m", f"bench.{path.stem}", *(sys.argv[1:] if arguments is None else arguments)]
    document = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(words),
        "versions": versions(),
        **figures,
    }
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")
    print(f"written to {path}")
