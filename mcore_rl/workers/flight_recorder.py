"""Flight recorder of NCCL and gloo: the last collectives of each rank, written next to the logs when a run hangs."""

import os
import pickle
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mcore_rl.workers.failures import collected_in

ENTRIES = 2000
"""Number of collectives that a rank records; an entry takes some hundred bytes of main memory."""
PREFIX = "collectives_of_rank_"
C10D: Any = torch._C._distributed_c10d
RECORDS_GLOO = hasattr(C10D, "_dump_fr_trace")
"""True if torch (2.8 and later) records gloo's collectives too, and has other names for its variables."""
SIZE = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
FILE = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")


def arm() -> None:
    """Make torch record from the process group's start on; the user's own settings stay in force."""
    folder = collected_in()
    if folder is None:
        return
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    for names, value in ((SIZE, str(ENTRIES)), (FILE, str(folder.parent / PREFIX))):
        if not any(name in os.environ for name in names):
            os.environ[names[0] if RECORDS_GLOO else names[1]] = value


def dump(rank: int) -> str:
    """Write this rank's records; return a sentence with the path, "" if nothing was recorded."""
    prefix = next((os.environ[name] for name in FILE if os.environ.get(name)), "")
    if not (prefix and dist.is_initialized()):
        return ""
    path = Path(f"{prefix}{rank}")
    with suppress(OSError):
        if dist.is_nccl_available() and torch.cuda.is_initialized():
            trace = C10D._dump_nccl_trace()
        elif RECORDS_GLOO:
            # gloo's recorder omits the ranks of each process group, which torch's reader requires.
            record = pickle.loads(C10D._dump_fr_trace())
            for group, name in dist.distributed_c10d._world.pg_names.items():
                ranks = dist.get_process_group_ranks(group)
                record["pg_config"][name] = {"name": name, "desc": group.group_desc, "ranks": str(ranks)}
            trace = pickle.dumps(record)
        else:
            return ""
        path.write_bytes(trace)
        reader = "python -m torch.distributed.flight_recorder.fr_trace"
        names = f"{path.parent} --prefix {Path(prefix).name}"
        return f"The last collectives: {path} ({reader} {names} compares the ranks)."
    return ""
