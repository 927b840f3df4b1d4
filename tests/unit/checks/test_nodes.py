"""The findings of several nodes side by side."""

import copy
import json
import threading
from pathlib import Path
from typing import Any

from mcore_rl.checks.cluster import FAULTY, SOUND, answer, answers, differences, report

NODE: dict[str, Any] = {
    "versions": {"torch": "2.11.0", "NVIDIA driver": "590.1"},
    "devices": [{"name": "H100", "capability": "9.0", "memory_gib": 79.6, "free_gib": free} for free in (79.0, 78.5)],
    "layers": "te",
    "adam": "te",
    "kernels": {"DeepEP dispatcher": True},
    "communication": {"library": "NCCL", "version": "2.28.9"},
    "limits": {"cores": 64, "memory_gib": 503.5, "open_files": 65536, "variables": {"NCCL_IB_HCA": "mlx5"}},
    "cpu": {},
    "patches": [],
    "missing": [],
    "faults": [],
}


def node(**changes: Any) -> dict[str, Any]:
    """A node with other findings: `topic__name=value` in a topic, `topic=value` in place of one."""
    found = copy.deepcopy(NODE)
    for key, value in changes.items():
        topic, _, name = key.partition("__")
        if name:
            found[topic][name] = value
        else:
            found[topic] = value
    return found


def lines(found: dict[str, dict[str, Any]]) -> dict[str, list[str]]:
    return {host: [f"line of {host}", SOUND] for host in found}


def test_equal_nodes_are_shown_once_and_free_memory_is_no_difference() -> None:
    busy = copy.deepcopy(NODE)
    busy["devices"][0]["free_gib"] = 3.0
    found = {"n1": node(), "n2": busy, "n3": node(limits__memory_gib=501.0)}
    assert list(differences(found)) == []
    assert report({"n1": node(), "n2": busy}, lines(found), 2) == ["n1, n2:", "  line of n1", SOUND]


def test_what_differs_is_named_with_the_nodes_most_of_which_come_first() -> None:
    found = {
        "n1": node(versions__torch="2.10.0"),
        "n2": node(devices=NODE["devices"][:1]),
        "n3": node(limits__variables={}, limits__memory_gib=251.0),
    }
    assert list(differences(found)) == [
        "number of GPUs: 2 on n1, n3; 1 on n2",
        "GPU 1 name: H100 on n1, n3; not there on n2",
        "GPU 1 capability: 9.0 on n1, n3; not there on n2",
        "GPU 1 memory_gib: 79.6 on n1, n3; not there on n2",
        "versions torch: 2.11.0 on n2, n3; 2.10.0 on n1",
        "limits memory_gib: 503.5 on n1, n2; 251.0 on n3",
        "limits variables NCCL_IB_HCA: mlx5 on n1, n2; not there on n3",
    ]
    text = report(found, lines(found), 3)
    assert text[:3] == ["n1:", "  line of n1", "n2:"] and text[-1] == FAULTY
    assert "DIFFERS    versions torch: 2.11.0 on n2, n3; 2.10.0 on n1" in text


def test_a_node_that_is_broken_or_does_not_answer_is_a_fault() -> None:
    found = {"n1": node(), "n2": node(faults=["torch sees no GPU"])}
    assert report(found, lines(found), 2)[-2:] == ["FAULT      n2: torch sees no GPU", FAULTY]
    silent = report({"n1": node()}, lines({"n1": node()}), 2)
    assert silent[-2:] == ["FAULT      1 of 2 nodes have answered: n1; the job's log says why", FAULTY]


def test_the_first_node_waits_for_the_answers_of_the_others(tmp_path: Path) -> None:
    answer(tmp_path, "n1", NODE)
    late = threading.Timer(0.3, answer, (tmp_path, "n0", node(layers="torch")))
    late.start()
    found = answers(tmp_path, 2, wait_s=60.0)
    late.join()
    assert list(found) == ["n0", "n1"] and found["n1"] == json.loads(json.dumps(NODE))
    assert list(answers(tmp_path, 3, wait_s=0.0)) == ["n0", "n1"]


def test_a_build_of_the_cpus_layers_must_be_alike() -> None:
    built = {"a": node(cpu={"build": "0a", "reason": ""}), "b": node(cpu={"build": "0a", "reason": ""})}
    assert not list(differences(built))
    without = {"build": "", "reason": "there is no compiler"}
    assert list(differences(built | {"c": node(cpu=without)})) == ["compiled layers of the CPU: 0a on a, b; none on c"]
