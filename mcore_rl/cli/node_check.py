"""Check whether this node is fit for a job: its GPUs, its memory, and all-reduces with its neighbours.

Run once on every node (`srun --ntasks-per-node=1`), with the job's hosts in the same order everywhere. The nodes are
a ring, and each measures an all-reduce over all ranks of it and one neighbour, then of it and the other neighbour. A
node that fails with both is unfit: the neighbour of a broken node is fine with its other neighbour. Where a job has
two nodes that fail together, either may be the cause, and both are unfit. CUDA with NCCL, CPU with gloo.

Exit status: 0 fit, 3 unfit; the reason is on stdout. This file imports no torch: each rank is a process of its own, see
node_check_rank.py.
"""

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

UNFIT = 3
SHARED_MEMORY = Path("/dev/shm")
SHARED_MEMORY_BYTES = 16 * 2**20
"""Free bytes of /dev/shm per rank; with less, NCCL and data loaders fail with unrelated errors."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of an all-reduce with a neighbour, or among the ranks of this node."""

    partner: str
    gbit_per_s: float
    """Bus bandwidth: 2 (n - 1) / n of the bytes per second; 0 on failure."""
    fault: str

    def describe(self) -> str:
        """Return a log line."""
        whom = f"with {self.partner}" if self.partner else "inside"
        return f"{whom}: {self.fault or f'all-reduce at {self.gbit_per_s:.2f} Gbit/s'}"


def main(argv: Sequence[str]) -> int:
    """Check this node and print a line per finding; return 0 if it is fit, else UNFIT."""
    args = arguments().parse_args(argv)
    rank_faults, outcomes = _of_all_ranks(argv, args.ranks)
    faults = [*shared_memory_faults(args.ranks), *rank_faults, *unfit_links(outcomes, args.min_bandwidth_gbps)]
    host = args.hosts[args.node]
    lines = [*(outcome.describe() for outcome in outcomes), *(f"UNFIT: {fault}" for fault in faults)]
    sys.stdout.write("".join(f"{host}: {line}\n" for line in [*lines, "unfit" if faults else "fit"]))
    return UNFIT if faults else 0


def arguments() -> argparse.ArgumentParser:
    """Return the parser of this program and of its ranks, which also have `--rank`."""
    parser = argparse.ArgumentParser(prog="python -m mcore_rl.cli.node_check", description=__doc__)
    parser.add_argument(
        "--hosts", type=lambda text: text.split(","), required=True, help="hosts of the job, with commas"
    )
    parser.add_argument("--node", type=int, required=True, help="index of this host among them")
    parser.add_argument("--port", type=int, required=True, help="first of 21 free ports")
    parser.add_argument("--ranks", type=int, default=1, help="ranks of a node")
    parser.add_argument("--gpus", type=int, default=0, help="GPUs of a node; 0: the ranks use its cores")
    parser.add_argument("--gpu-memory-gib", type=float, default=0.0, help="free memory that each GPU must have")
    parser.add_argument(
        "--min-bandwidth-gbps", type=float, default=0.0, help="bus bandwidth that an all-reduce must reach, Gbit/s"
    )
    return parser


def shared_memory_faults(ranks: int) -> list[str]:
    """Return the fault of /dev/shm, if any."""
    free = shutil.disk_usage(SHARED_MEMORY).free
    wanted = ranks * SHARED_MEMORY_BYTES
    if free >= wanted:
        return []
    return [f"{SHARED_MEMORY} has {free >> 20} MiB free, {ranks} ranks need {wanted >> 20}"]


def rounds(node: int, num_nodes: int) -> list[tuple[int, int, int]]:
    """Return (round, left, right) for each round in which `node` has a neighbour; a node is in a round at most once."""
    if num_nodes < 2:
        return []
    links = [(left, (left + 1) % num_nodes) for left in range(num_nodes if num_nodes > 2 else 1)]
    last = len(links) - 1
    number = {link: 2 if num_nodes % 2 and index == last else index % 2 for index, link in enumerate(links)}
    return sorted((number[link], *link) for link in links if node in link)


def unfit_links(outcomes: Sequence[Outcome], min_gbit_per_s: float) -> list[str]:
    """Return a fault if every all-reduce failed or was too slow; a good all-reduce shows that the node is fit."""
    bad = [
        outcome.fault or f"{outcome.gbit_per_s:.2f} Gbit/s, {min_gbit_per_s:g} wanted"
        for outcome in outcomes
        if outcome.fault or outcome.gbit_per_s < min_gbit_per_s
    ]
    if not outcomes or len(bad) < len(outcomes):
        return []
    return [f"no all-reduce was as it should be: {'; '.join(bad)}"]


def _of_all_ranks(argv: Sequence[str], ranks: int) -> tuple[list[str], list[Outcome]]:
    command = [sys.executable, "-m", "mcore_rl.cli.node_check_rank", *argv, "--rank"]
    processes = [subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True) for rank in range(ranks)]
    outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        return [f"its ranks ended with {[process.returncode for process in processes]}"], []
    reports = [json.loads(output) for output in outputs]
    links = zip(*([Outcome(**outcome) for outcome in report["outcomes"]] for report in reports), strict=True)
    faults = [fault for report in reports for fault in report["faults"]]
    return faults, [min(outcomes, key=lambda outcome: outcome.gbit_per_s) for outcomes in links]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
