"""NCCL's flight recorder: the last collectives of each rank, written beside the logs when a run hangs."""

import os
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

from mcore_rl.backend.failures import collected_in

ENTRIES = 2000
"""Number of collectives that a rank keeps; an entry takes some hundred bytes of main memory."""
PREFIX = "nccl_trace_rank_"


def arm() -> None:
    """Have NCCL record from the start of the process group on, and write on its own time-outs too.

    The user's own settings stay. Newer versions of torch have other names for these variables, and know these too.
    """
    folder = collected_in()
    if folder is None:
        return
    os.environ.setdefault("TORCH_NCCL_TRACE_BUFFER_SIZE", str(ENTRIES))
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    os.environ.setdefault("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", str(folder.parent / PREFIX))


def dump(rank: int) -> str:
    """Write what NCCL recorded on this rank; return a sentence with the path, "" where nothing was recorded."""
    prefix = os.environ.get("TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
    if not (prefix and dist.is_initialized() and dist.is_nccl_available() and torch.cuda.is_initialized()):
        return ""
    path = Path(f"{prefix}{rank}")
    with suppress(OSError):
        trace = torch._C._distributed_c10d._dump_nccl_trace()  # type: ignore[attr-defined]  # not for CPUs
        path.write_bytes(trace)
        reader = f"python -m torch.distributed.flight_recorder.fr_trace {path.parent} --prefix {PREFIX}"
        return f"NCCL's last collectives: {path} ({reader} compares the ranks)."
    return ""
