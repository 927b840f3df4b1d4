"""Ranks get the cores and the order of GPUs that a machine with two sockets asks for."""

import os
import subprocess
import sys

import pytest

from mcore_rl.workers.rank_process import RANKS_PER_NODE, Core, allowed_cores, bind, by_numa, divide, visible_gpus

SOCKETS = [Core(threads=(i, i + 8), numa=i // 4) for i in range(8)]
"""Two NUMA nodes of four cores with two hardware threads each."""


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def machine(tmp_path):
    """Those sockets, and four GPUs of which the first and the last hang on socket 1."""
    for node in range(2):
        threads = f"{4 * node}-{4 * node + 3},{4 * node + 8}-{4 * node + 11}\n"
        write(tmp_path / f"sys/devices/system/node/node{node}/cpulist", threads)
    for thread in range(16):
        siblings = f"{thread % 8},{thread % 8 + 8}\n"
        write(tmp_path / f"sys/devices/system/cpu/cpu{thread}/topology/thread_siblings_list", siblings)
    for index, numa in enumerate((1, 0, 0, 1)):
        bus = f"0000:{index + 1}b:00.0"
        write(tmp_path / f"proc/driver/nvidia/gpus/{bus}/information", f"Model: H100\nGPU UUID: \t GPU-{index}\n")
        write(tmp_path / f"sys/bus/pci/devices/{bus}/numa_node", f"{numa}\n")
    return tmp_path


def test_gpus_of_a_socket_stand_side_by_side_so_that_a_tensor_parallel_pair_shares_one(machine):
    gpus = visible_gpus(machine, {})
    assert [(gpu.name, gpu.numa) for gpu in gpus] == [("0", 1), ("1", 0), ("2", 0), ("3", 1)]
    assert [gpu.name for gpu in by_numa(gpus)] == ["0", "3", "1", "2"]
    chosen = visible_gpus(machine, {"CUDA_VISIBLE_DEVICES": "GPU-2,GPU-3,GPU-1"})
    assert [gpu.name for gpu in by_numa(chosen)] == ["GPU-2", "GPU-1", "GPU-3"]
    assert visible_gpus(machine, {"CUDA_VISIBLE_DEVICES": "MIG-1"}) == []
    assert visible_gpus(machine / "sys", {}) == []


def test_cores_are_those_that_the_job_may_use_with_both_of_their_threads(machine):
    assert sorted(allowed_cores(set(range(16)), machine), key=lambda core: core.threads) == SOCKETS
    assert allowed_cores({3, 9}, machine) in (
        [Core(threads=(3,), numa=0), Core(threads=(9,), numa=0)],
        [Core(threads=(9,), numa=0), Core(threads=(3,), numa=0)],
    )


def test_each_rank_gets_its_share_of_the_cores_near_its_gpu():
    shares = divide(SOCKETS, 4, [1, 1, 0, 0])
    first_threads = [[core.threads[0] for core in share] for share in shares]
    assert first_threads == [[4, 5], [6, 7], [0, 1], [2, 3]]
    three = divide(SOCKETS, 3, [0, 1, 0])
    assert [[core.threads[0] for core in share] for share in three] == [[0, 1], [4, 5, 6, 7], [2, 3]]


def test_without_gpus_or_where_the_kernel_knows_no_node_cores_are_divided_in_order():
    for numas in ([], [-1, -1]):
        shares = divide(SOCKETS, 2, numas)
        assert [[core.threads[0] for core in share] for share in shares] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert divide(SOCKETS, 9, []) is None
    assert divide(SOCKETS[:4], 4, [0, 0, 1, 1]) is not None  # the job may use socket 0 only


SHOWS = """
import os, subprocess, sys
from pathlib import Path
from mcore_rl.workers.rank_process import bind
line = bind(int(sys.argv[1]), Path(sys.argv[2]))
print(line)
print(os.environ["CUDA_VISIBLE_DEVICES"], os.environ["CUDA_DEVICE_ORDER"])
print(subprocess.run(["taskset", "-cp", str(os.getpid())], capture_output=True, text=True).stdout.split(": ")[1])
"""


@pytest.mark.full
def test_ranks_of_two_sockets_are_bound_as_taskset_sees_it_and_name_the_gpu_beside_them(tmp_path):
    """Two real cores of this machine, one on each emulated socket, and four GPUs: 0 and 3 on the second one."""
    first, second = sorted(os.sched_getaffinity(0))[:2]
    for node, core in enumerate((first, second)):
        write(tmp_path / f"sys/devices/system/node/node{node}/cpulist", f"{core}\n")
    for index, numa in enumerate((1, 0, 0, 1)):
        bus = f"0000:{index + 1}b:00.0"
        write(tmp_path / f"proc/driver/nvidia/gpus/{bus}/information", f"GPU UUID: GPU-{index}\n")
        write(tmp_path / f"sys/bus/pci/devices/{bus}/numa_node", f"{numa}\n")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CUDA_")}
    shown = []
    for rank, visible in ((0, "0,2"), (1, "0,2"), (1, "2,0")):
        done = subprocess.run(
            [sys.executable, "-c", SHOWS, str(rank), str(tmp_path)],
            env=environment | {RANKS_PER_NODE: "2", "CUDA_VISIBLE_DEVICES": visible},
            preexec_fn=lambda: os.sched_setaffinity(0, {first, second}),
            capture_output=True,
            text=True,
        )
        shown.append(done.stdout.split("\n")[:3])
    order = "PCI_BUS_ID"
    assert shown == [
        [f"cores {second}, GPU 0 on NUMA node 1", f"0,2 {order}", str(second)],
        [f"cores {first}, GPU 2 on NUMA node 0", f"0,2 {order}", str(first)],
        [f"cores {second}, GPU 0 on NUMA node 1", f"2,0 {order}", str(second)],
    ]


def test_a_rank_is_bound_to_some_of_the_cores_that_it_had_and_only_when_asked(monkeypatch):
    before = os.sched_getaffinity(0)
    monkeypatch.delenv(RANKS_PER_NODE, raising=False)
    assert bind(0) is None and os.sched_getaffinity(0) == before
    monkeypatch.setenv(RANKS_PER_NODE, "1")
    try:
        assert bind(0).startswith("cores ") and os.sched_getaffinity(0) == before
    finally:
        os.sched_setaffinity(0, before)
