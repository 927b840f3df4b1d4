"""Checks that a run fits in the available memory: of its devices, or of this machine if ranks are processes."""

import os
from collections.abc import Iterator
from pathlib import Path

from mcore_rl.planning.memory import GIB, memory_by_stage, memory_of_fullest_rank
from mcore_rl.planning.training import Training

NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


def local_memory_violations(training: Training, *, trains: bool) -> Iterator[str]:
    """Yield a sentence if weights (and, if it `trains`, gradients and optimizer state) exceed this machine's memory.

    Activations are not counted: their estimate is rough on CPUs, and a refused config could never run. Nothing is known
    of a GPU's memory before CUDA is asked.
    """
    device = training.platform.device
    if device == "cuda" or (device == "auto" and NVIDIA_DRIVER.exists()):
        return
    each = training.world_size // training.mesh.pp
    needed = sum(each * (stage.permanent if trains else stage.weights) for stage in memory_by_stage(training))
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > there:
        what = "weights, gradients and optimizer state" if trains else "the weights"
        yield (
            f"{what} of this model take {needed / GIB:,.0f} GiB on {training.world_size} local ranks, and this machine "
            f"has {there / GIB:,.0f} GiB. Correct the sizes in [model] if one is a slip, or run it on more machines."
        )


def device_memory_lines(training: Training, device_bytes: int) -> Iterator[str]:
    """Yield the estimate against the memory of a device, and a warning if the estimate is larger."""
    memory = memory_of_fullest_rank(training)
    yield f"memory, estimated: {memory.describe()} of {device_bytes / GIB:.1f}"
    if memory.total > device_bytes:
        yield (
            f"warning: the estimate is {(memory.total - device_bytes) / GIB:.1f} GiB more than the device has. "
            "`mcore-rl plan CONFIG --cluster CLUSTER.toml --nodes N --search` lists meshes that fit."
        )
