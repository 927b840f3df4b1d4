"""Memory of this process as metrics."""

from pathlib import Path

import torch

from mcore_rl.obs.metrics import Metric


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
