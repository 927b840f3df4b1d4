"""Nodes look at themselves and at each other: processes on this machine, which is every node."""

import subprocess
import sys

import pytest

from mcore_rl.cli.machine.node_check import UNFIT, Outcome, rounds, shared_memory_faults, unfit_links
from mcore_rl.cli.machine.node_check_rank import gpu_faults
from mcore_rl.workers.launcher import free_port


@pytest.mark.parametrize("num_nodes", range(2, 9))
def test_in_each_round_a_node_has_one_neighbour_and_in_all_both(num_nodes):
    links = {node: rounds(node, num_nodes) for node in range(num_nodes)}
    for node, own in links.items():
        assert len({number for number, *_ in own}) == len(own), "two links in one round"
        partners = {left + right - node for _, left, right in own}
        assert partners == {(node - 1) % num_nodes, (node + 1) % num_nodes}
        for link in own:
            assert link in links[link[1] + link[2] - node], "the other one knows of it, in the same round"


def test_a_node_alone_has_no_neighbour():
    assert rounds(0, 1) == []


def test_a_node_is_unfit_when_no_all_reduce_is_good_and_the_neighbour_of_a_broken_one_is_not():
    good, slow, broken = Outcome("a", 90.0, ""), Outcome("b", 10.0, ""), Outcome("c", 0.0, "refused")
    assert unfit_links([good, broken], 50.0) == unfit_links([slow, good], 50.0) == unfit_links([], 50.0) == []
    assert unfit_links([slow, broken], 50.0) == [
        "no all-reduce was as it should be: 10.00 Gbit/s, 50 wanted; refused"
    ]
    assert unfit_links([slow], 0.0) == []


def test_gpus_that_are_not_there_and_shared_memory_that_is_too_small_are_faults():
    assert gpu_faults(63, 64, 80.0)[0].endswith("GPUs are seen, 64 wanted") and gpu_faults(0, 0, 80.0) == []
    assert "MiB free" in shared_memory_faults(10**9)[0] and shared_memory_faults(1) == []


def test_two_nodes_of_two_ranks_are_fit_and_told_at_what_speed_unless_more_is_wanted():
    def node(index: int, port: int, wanted: float) -> "subprocess.Popen[str]":
        words = ["--hosts", "localhost,127.0.0.1", "--node", index, "--port", port, "--ranks", 2]
        command = [
            sys.executable,
            "-m",
            "mcore_rl.cli.machine.node_check",
            *words,
            "--min-bandwidth-gbps",
            wanted,
        ]
        return subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, text=True)

    port = free_port()
    nodes = node(0, port, 0.0), node(1, port, 1e9)
    outputs = [process.communicate(timeout=100)[0] for process in nodes]
    assert [process.returncode for process in nodes] == [0, UNFIT], outputs
    assert "localhost: with 127.0.0.1: all-reduce at " in outputs[0] and outputs[0].endswith(
        "localhost: fit\n"
    )
    assert "UNFIT: no all-reduce was as it should be" in outputs[1]
