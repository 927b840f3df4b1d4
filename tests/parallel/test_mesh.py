"""What the groups of a mesh cost a process on gloo, and that they end with it."""

import os
from collections import Counter
from pathlib import Path

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.megatron.mesh import build_mesh, destroy_mesh
from tests.ranks import run_ranks


def test_groups_share_the_thread_that_listens_and_end_with_their_mesh() -> None:
    for built, after_one, after_three in run_ranks(threads_of_meshes, 2):
        assert built["gloo_tcp_loop"] == 1
        # Megatron keeps two groups until the next mesh.
        assert after_three == after_one and after_one["pt_gloo_runloop"] < built["pt_gloo_runloop"] / 4


def test_only_the_thread_that_listens_waits_for_those_at_work() -> None:
    for policies in run_ranks(policies_of_threads, 2):
        listener = policies.pop("gloo_tcp_loop")
        assert listener == {os.SCHED_BATCH} and set().union(*policies.values()) == {os.sched_getscheduler(0)}


def policies_of_threads() -> dict[str, set[int]]:
    """On a rank with a mesh: how the kernel schedules the threads of each name."""
    build_mesh(MeshConfig(tp=2))
    policies: dict[str, set[int]] = {}
    for task in Path("/proc/self/task").iterdir():
        name = (task / "comm").read_text().strip()
        policies.setdefault(name, set()).add(os.sched_getscheduler(int(task.name)))
    return policies


def threads_of_meshes() -> list[Counter[str]]:
    """On a rank: threads by name with a mesh, when it is gone, and when three are."""
    build_mesh(MeshConfig(tp=2))
    counts = [_threads()]
    for _ in range(3):
        destroy_mesh()
        counts.append(_threads())
        build_mesh(MeshConfig(tp=2))
    return [counts[0], counts[1], counts[3]]


def _threads() -> Counter[str]:
    names = (path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm"))
    return Counter(name for name in names if "gloo" in name)
