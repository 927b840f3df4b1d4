"""Whether a run fits in the main memory of this machine, where its ranks are processes on the cores."""

import os
from collections.abc import Iterator
from pathlib import Path

from mcore_rl.config.run import RunConfig
from mcore_rl.plan.memory import GIB, memory_by_stage

NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


def local_memory_violations(
    config: RunConfig, num_ranks: int, seq_length: int, *, trains: bool
) -> Iterator[str]:
    """Yield a sentence when weights (and, if it `trains`, gradients and optimizer state) exceed this machine's memory.

    Activations are not counted: their estimate is rough on CPUs, and what is refused here could never run. Nothing is
    known of a GPU's memory before CUDA is asked.
    """
    on_gpu = config.platform.device == "cuda" or (config.platform.device == "auto" and NVIDIA_DRIVER.exists())
    if on_gpu:
        return
    stages = memory_by_stage(config, num_ranks, seq_length)
    each = num_ranks // config.mesh.pp
    needed = sum(each * (stage.permanent if trains else stage.weights) for stage in stages)
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > there:
        what = "weights, gradients and optimizer state" if trains else "the weights"
        yield (
            f"{what} of this model take {needed / GIB:,.0f} GiB on {num_ranks} local ranks, and this machine has "
            f"{there / GIB:,.0f} GiB. Correct the sizes in [model] if one is a slip, or run it on more machines."
        )
