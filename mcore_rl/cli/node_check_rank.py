"""One rank of a node's check: its GPU, and all-reduces with the neighbours' ranks (see node_check.py)."""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from mcore_rl.cli.node_check import Outcome, arguments, rounds

GIB = 2**30
MESSAGE_BYTES = {"cuda": 256 * 2**20, "cpu": 4 * 2**20}
REPEATS = 5
ROUND_S = 60.0
"""Time limit of a round; a later round waits for the neighbour's earlier rounds."""


def main(argv: Sequence[str]) -> int:
    """Run the checks of a rank and write {"faults": [...], "outcomes": [...]} to stdout."""
    parser = arguments()
    parser.add_argument("--rank", type=int, required=True, help="rank among those of this node")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    found = {
        "faults": gpu_faults(args.rank, args.gpus, args.gpu_memory_gib),
        "outcomes": [asdict(outcome) for outcome in all_reduces(args)],
    }
    sys.stdout.write(json.dumps(found))
    return 0


def gpu_faults(rank: int, gpus: int, memory_gib: float) -> list[str]:
    """Return the fault of this rank's GPU, if any: missing, too little free memory, wrong products."""
    found = torch.cuda.device_count() if gpus else 0
    if rank >= gpus:
        return []
    if rank >= found:
        return [f"GPU {rank} is not there: {found} GPUs are seen, {gpus} wanted"]
    faults = []
    free = torch.cuda.mem_get_info(rank)[0] / GIB
    if free < memory_gib:
        faults.append(f"GPU {rank} has {free:.1f} GiB free, {memory_gib:g} wanted: is it in use?")
    ones = torch.ones(1024, 1024, device=torch.device("cuda", rank))
    if not torch.equal(ones @ ones, 1024 * ones):
        faults.append(f"GPU {rank} multiplies matrices of ones to something else than 1024")
    return faults


def all_reduces(args: argparse.Namespace) -> list[Outcome]:
    """Collective over the ranks of this node and its neighbours: return the outcome of every link on this rank."""
    links = rounds(args.node, len(args.hosts))
    if not links and args.ranks > 1:
        links = [(0, args.node, args.node)]
    outcomes = []
    for number, left, right in links:
        partner = "" if left == right else args.hosts[right if args.node == left else left]
        outcomes.append(_all_reduce(args, (number, left, right), partner))
    return outcomes


def _all_reduce(args: argparse.Namespace, link: tuple[int, int, int], partner: str) -> Outcome:
    number, left, right = link
    world_size = args.ranks * (1 if left == right else 2)
    rank = args.rank if args.node == left else args.ranks + args.rank
    limit = timedelta(seconds=ROUND_S * (number + 1))
    device = torch.device("cuda", args.rank) if args.gpus else torch.device("cpu")
    port = args.port + 10 + number
    try:
        if args.gpus:
            torch.cuda.set_device(device)
        store = TCPStore(args.hosts[left], port, world_size, is_master=rank == 0, timeout=limit)
        backend = "nccl" if args.gpus else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit)
        numbers = torch.ones(MESSAGE_BYTES[device.type] // 4, device=device)
        dist.all_reduce(numbers)
        is_right = bool((numbers == world_size).all())
        seconds = _seconds_of_all_reduce(numbers)
        dist.barrier()
    except (RuntimeError, OSError, ValueError) as error:
        return Outcome(partner, 0.0, str(error).splitlines()[0])
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    if not is_right:
        return Outcome(partner, 0.0, f"the sum of ones over {world_size} ranks is not {world_size}")
    bits = 8 * numbers.nbytes * 2 * (world_size - 1) / world_size
    return Outcome(partner, bits / seconds / 1e9, "")


def _seconds_of_all_reduce(numbers: torch.Tensor) -> float:
    if numbers.is_cuda:
        torch.cuda.synchronize()
    begin_s = time.perf_counter()
    for _ in range(REPEATS):
        dist.all_reduce(numbers)
    if numbers.is_cuda:
        torch.cuda.synchronize()
    return (time.perf_counter() - begin_s) / REPEATS


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
