"""A rank of a job below a small process that outlives it and records how it died.

    python -m mcore_rl.workers.rank_process mcore_rl.programs.pretrain CONFIG.toml key=value ...

A rank that SIGKILL, SIGSEGV or the out-of-memory killer ends cannot report it, and its launcher knows nothing of other
nodes. The first error in a log then comes from a rank that did nothing wrong but lost its peer. Imports no torch.

The rank may be bound to cores near its GPU. GPUs are ordered by NUMA node, so that neighbouring local ranks (a
tensor-parallel group) have neighbouring GPUs, and each rank gets its share of that node's physical cores.
"""

import os
import re
import runpy
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mcore_rl.errors import INTERRUPTED_STATUS
from mcore_rl.workers.failures import OomKills, Order, has_noted, note_failure, rank_death, rank_failure
from mcore_rl.workers.forked_rank import die_with, end_by_signal, stop_signals
from mcore_rl.workers.launcher import raise_open_files, rank_of_launcher

RANKS_PER_NODE = "MCORE_RL_BIND"
"""Environment variable with the number of ranks of this node among which its cores are divided; unset: no binding."""
UNKNOWN = -1
"""The kernel's value for a device with an unknown NUMA node."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """A GPU of this node."""

    name: str
    """Index or UUID, as CUDA_VISIBLE_DEVICES names it."""
    numa: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Core:
    """A physical core: its hardware threads and its NUMA node."""

    threads: tuple[int, ...]
    numa: int


def bind(local_rank: int, root: Path = Path("/")) -> str | None:
    """Bind this process to the cores of a local rank and order its GPUs, by `proc` and `sys` below `root`. Returns a
    line for the log; None if no binding was requested, or the cores cannot be divided.
    """
    num_ranks = int(os.environ.get(RANKS_PER_NODE, "0"))
    if not num_ranks or sys.platform != "linux":
        return None
    gpus = by_numa(visible_gpus(root))
    cores = allowed_cores(os.sched_getaffinity(0), root)
    numas = [gpus[i % len(gpus)].numa for i in range(num_ranks)] if gpus else []
    share = divide(cores, num_ranks, numas)
    if share is None:
        return None
    threads = sorted(thread for core in share[local_rank] for thread in core.threads)
    os.sched_setaffinity(0, threads)
    line = f"cores {_ranges(threads)}"
    if gpus and len(gpus) >= num_ranks:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpu.name for gpu in gpus)
        # The driver lists GPUs by bus; CUDA's own default is the fastest first, and an index would name a different
        # GPU.
        os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
        line += f", GPU {gpus[local_rank].name} on NUMA node {gpus[local_rank].numa}"
    return line


def by_numa(gpus: Sequence[Gpu]) -> list[Gpu]:
    """Return the GPUs grouped by NUMA node, and within a node in their order."""
    first = {gpu.numa: index for index, gpu in reversed(list(enumerate(gpus)))}
    return sorted(gpus, key=lambda gpu: first[gpu.numa])


def divide(cores: Sequence[Core], num_ranks: int, numas: Sequence[int]) -> list[list[Core]] | None:
    """Divide physical cores among a node's ranks; `numas` are the NUMA nodes of their GPUs, empty without GPUs. Returns
    disjoint cores of each rank, as many within a NUMA node; None if a rank would have none.
    """
    ordered = sorted(cores, key=lambda core: (core.numa, core.threads))
    if not numas or UNKNOWN in numas or not {core.numa for core in ordered} >= set(numas):
        groups = {UNKNOWN: (list(range(num_ranks)), ordered)}
    else:
        groups = {
            numa: (
                [rank for rank in range(num_ranks) if numas[rank] == numa],
                [core for core in ordered if core.numa == numa],
            )
            for numa in set(numas)
        }
    shares: list[list[Core]] = [[] for _ in range(num_ranks)]
    for ranks, of_group in groups.values():
        size = len(of_group) // len(ranks)
        if not size:
            return None
        for index, rank in enumerate(ranks):
            shares[rank] = of_group[index * size : (index + 1) * size]
    return shares


def visible_gpus(root: Path = Path("/"), environment: Mapping[str, str] = os.environ) -> list[Gpu]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES names, else all, as the driver lists them; none without a driver."""
    found: dict[str, Gpu] = {}
    folders = sorted((root / "proc/driver/nvidia/gpus").glob("*"), key=lambda path: path.name)
    for index, folder in enumerate(folders):
        numa, uuid = UNKNOWN, ""
        with suppress(OSError, ValueError):
            text = (folder / "information").read_text(encoding="utf-8", errors="replace")
            match = re.search(r"GPU UUID:\s*(\S+)", text)
            uuid = match[1] if match else ""
            numa = int((root / "sys/bus/pci/devices" / folder.name / "numa_node").read_text(encoding="ascii"))
        found[str(index)] = found[uuid] = Gpu(name=str(index), numa=numa)
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    names = [str(index) for index in range(len(folders))] if visible is None else visible.split(",")
    # A part of a GPU (MIG) has no entry of its own.
    return [Gpu(name=name, numa=found[name].numa) for name in names] if set(names) <= set(found) else []


def allowed_cores(threads: set[int], root: Path = Path("/")) -> list[Core]:
    """Return the physical cores that have some of the hardware threads `threads`."""
    numas: dict[int, int] = {}
    for folder in (root / "sys/devices/system/node").glob("node[0-9]*"):
        with suppress(OSError, ValueError):
            for thread in _threads((folder / "cpulist").read_text(encoding="ascii")):
                numas[thread] = int(folder.name.removeprefix("node"))
    cores = set()
    for thread in threads:
        siblings = {thread}
        with suppress(OSError, ValueError):
            file = root / f"sys/devices/system/cpu/cpu{thread}/topology/thread_siblings_list"
            siblings = _threads(file.read_text(encoding="ascii"))
        cores.add(Core(threads=tuple(sorted(siblings & threads)), numa=numas.get(thread, 0)))
    return list(cores)


def _threads(text: str) -> set[int]:
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def _ranges(threads: Sequence[int]) -> str:
    parts: list[list[int]] = []
    for thread in threads:
        if parts and thread == parts[-1][1] + 1:
            parts[-1][1] = thread
        else:
            parts.append([thread, thread])
    return ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in parts)


def main(argv: Sequence[str]) -> int:
    """Run module `argv[0]` with the arguments that follow, in a child; end as the child ends, and record a failure."""
    rank, oom = rank_of_launcher(), OomKills()
    raise_open_files()
    if bound := bind(int(os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or 0)):
        sys.stderr.write(f"rank {rank}: {bound}\n")
        sys.stderr.flush()
    # They stay blocked, and `_ended` takes them one by one: a handler's signal that comes just before a blocking call
    # would wait for the end of that call. SIGCHLD, blocked, is kept even though nobody handles it.
    awaited = {*stop_signals(), signal.SIGCHLD}
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        _be_the_rank(parent, rank, argv, before - awaited)
    code, asked = _ended(child, awaited)
    if code < 0:
        # A rank that was asked to end before it could listen has not failed.
        if -code not in asked:
            note_failure(rank_death(rank, -code, oom))
        end_by_signal(-code)
    if code and code - 128 not in asked and not has_noted(rank):
        note_failure(rank_failure(rank, code, f"ended with status {code}", order=Order.STATUS))
    return code


def _ended(child: int, awaited: Set[int]) -> tuple[int, list[int]]:
    """Send the rank in the process `child` requests to stop among `awaited`, which are blocked, until it ends. Returns
    its exit code, negative for a signal, and the requests that came.
    """
    asked: list[int] = []
    while True:
        number = signal.sigwait(awaited)
        if number != signal.SIGCHLD:
            asked.append(number)
            os.kill(child, number)
            continue
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status), asked


def _be_the_rank(parent: int, rank: int, argv: Sequence[str], mask: Set[int]) -> None:
    die_with(parent)
    for number in stop_signals():
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    sys.argv[1:] = argv[1:]
    try:
        runpy.run_module(argv[0], run_name="__main__", alter_sys=True)
    finally:
        error = sys.exception()
        if isinstance(error, KeyboardInterrupt):  # Ctrl-C ends the rank without a traceback
            sys.stderr.write(f"Rank {rank} was interrupted.\n")
            sys.stderr.flush()
            os._exit(INTERRUPTED_STATUS)
        if error is not None and not isinstance(error, SystemExit):
            cause = f"{type(error).__name__}: {error}"
            text = "".join(traceback.format_exception(error)).rstrip()
            note_failure(rank_failure(rank, 1, cause, f"{cause}\n{text}"))
    sys.exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
