"""`mcore-rl doctor` on this CPU, and nodes that look at themselves and each other: this machine is every node."""

import argparse
import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rl.cli import doctor
from mcore_rl.cli.node_check import UNFIT, Outcome, rounds, shared_memory_faults, unfit_links
from mcore_rl.cli.node_check_rank import gpu_faults
from mcore_rl.megatron.compiled import build_id, library_path
from mcore_rl.megatron.patches.gpu_packages import GpuPackages
from mcore_rl.megatron.patches.table import INSTALLED
from mcore_rl.workers.launcher import free_port

KERNELS = ["grouped products of experts (torch)", "DeepEP dispatcher"]


def found(**changes: object) -> GpuPackages:
    fields = {"has_cuda": True, "has_te": False, "has_apex": False, "unusable": {}} | changes
    return GpuPackages(**fields)  # type: ignore[arg-type]


def lacks(machine: GpuPackages, **kernels: bool) -> list[str]:
    there = dict.fromkeys(KERNELS, False) | kernels
    return [what for what, _ in doctor.missing(machine, there)]


@pytest.fixture(scope="module")
def findings() -> dict[str, Any]:
    """The findings on this machine, which takes seconds to look at itself."""
    return doctor.examine()


def told(monkeypatch: pytest.MonkeyPatch, findings: dict[str, Any], nodes: Path | None = None) -> int:
    monkeypatch.setattr(doctor, "examine", lambda: findings)
    return doctor.main(argparse.Namespace(json=False, nodes=nodes))


def test_the_cpu_of_this_machine_is_sound(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(argparse.Namespace(json=True, nodes=None)) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["devices"] == [] and report["layers"] == "torch" and report["adam"] == "torch"
    assert report["communication"]["library"] == "gloo"
    assert [patch["symbol"] for patch in report["patches"]] == [patch.symbol for patch in INSTALLED]
    assert [entry["what"] for entry in report["missing"]] == ["a GPU"]


def test_people_read_a_line_a_topic(
    findings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told(monkeypatch, findings) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "device     CPU" in lines
    (kernels,) = [line for line in lines if line.startswith("CPU        ")]
    assert "compiled layers, build " in kernels
    assert lines[-1] == "nothing is broken"
    causes = next(line for line in lines if line.startswith("patches"))
    assert "for no CUDA" in causes and "for no TransformerEngine or apex" in causes


def test_a_cpu_names_the_build_of_its_compiled_layers() -> None:
    """Ranks that share a machine have one thread each, whatever this process has."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        found = doctor.examine()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert found["cpu"]["build"] == build_id() and library_path().is_file()
    (line,) = [line for line in doctor.lines_of(found) if line.startswith("CPU ")]
    assert line.startswith(f"CPU        compiled layers, build {build_id()} (a run of one rank has 2 threads here")


def test_the_first_node_of_a_job_reports_on_all(
    findings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told(monkeypatch, findings, tmp_path) == 0
    text = (tmp_path / "report.txt").read_text()
    assert capsys.readouterr().out == text
    host = socket.gethostname()
    assert text.startswith(f"{host}:\n  versions   mcore_rl ") and text.endswith("\nnothing is broken\n")
    assert json.loads((tmp_path / f"{host}.json").read_text())["layers"] == "torch"


def test_what_a_gpu_machine_lacks_is_named_with_its_cost() -> None:
    fused = "a fused Adam (TransformerEngine or apex)"
    assert lacks(found()) == ["TransformerEngine", fused, "deep_ep", "grouped_mm of torch"]
    assert lacks(found(has_apex=True), **{KERNELS[0]: True}) == ["TransformerEngine", "deep_ep"]
    assert lacks(found(has_te=True), **dict.fromkeys(KERNELS, True)) == []


def test_a_package_that_cannot_be_imported_is_a_fault_on_a_gpu_machine_only() -> None:
    reason = "import transformer_engine.pytorch: ImportError: undefined symbol"
    broken = {"transformer_engine": reason}
    (fault,) = [f for f in doctor.faults(found(unusable=broken)) if "installed" in f]
    assert fault.startswith(f"transformer_engine is installed, but cannot be used: {reason}.")
    assert not any("installed" in fault for fault in doctor.faults(found(has_cuda=False, unusable=broken)))


def test_a_driver_without_a_gpu_for_torch_is_a_fault(
    findings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = tmp_path / "version"
    driver.write_text("NVRM version: NVIDIA UNIX Open Kernel Module 580.65\n")
    monkeypatch.setattr(doctor, "NVIDIA_DRIVER", driver)
    faults = list(doctor.faults(found(has_cuda=False)))
    assert faults[0].startswith("there is an NVIDIA driver, but torch")
    assert told(monkeypatch, findings | {"faults": faults}) == 1


@pytest.mark.parametrize("num_nodes", range(2, 9))
def test_in_each_round_a_node_has_one_neighbour_and_in_all_both(num_nodes):
    links = {node: rounds(node, num_nodes) for node in range(num_nodes)}
    for node, own in links.items():
        assert len({number for number, *_ in own}) == len(own), "two links in one round"
        partners = {left + right - node for _, left, right in own}
        assert partners == {(node - 1) % num_nodes, (node + 1) % num_nodes}
        for link in own:
            assert link in links[link[1] + link[2] - node], "the other one knows of it, in the same round"
    assert rounds(0, 1) == [], "a node alone has no neighbour"


def test_a_node_is_unfit_when_no_all_reduce_is_good_and_the_neighbour_of_a_broken_one_is_not():
    good, slow, broken = Outcome("a", 90.0, ""), Outcome("b", 10.0, ""), Outcome("c", 0.0, "refused")
    assert unfit_links([good, broken], 50.0) == unfit_links([slow, good], 50.0) == unfit_links([], 50.0) == []
    assert unfit_links([slow, broken], 50.0) == ["no all-reduce was as it should be: 10.00 Gbit/s, 50 wanted; refused"]
    assert unfit_links([slow], 0.0) == []


def test_gpus_that_are_not_there_and_shared_memory_that_is_too_small_are_faults():
    assert gpu_faults(63, 64, 80.0)[0].endswith("GPUs are seen, 64 wanted") and gpu_faults(0, 0, 80.0) == []
    assert "MiB free" in shared_memory_faults(10**9)[0] and shared_memory_faults(1) == []


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2])
def test_two_nodes_are_fit_and_told_at_what_speed_unless_more_is_wanted(ranks):
    def node(index: int, port: int, wanted: float) -> "subprocess.Popen[str]":
        words = ["--hosts", "localhost,127.0.0.1", "--node", index, "--port", port, "--ranks", ranks]
        command = [sys.executable, "-m", "mcore_rl.cli.node_check", *words, "--min-bandwidth-gbps", wanted]
        return subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, text=True)

    port = free_port()
    nodes = node(0, port, 0.0), node(1, port, 1e9)
    outputs = [process.communicate(timeout=100)[0] for process in nodes]
    assert [process.returncode for process in nodes] == [0, UNFIT], outputs
    assert "localhost: with 127.0.0.1: all-reduce at " in outputs[0] and outputs[0].endswith("localhost: fit\n")
    assert "UNFIT: no all-reduce was as it should be" in outputs[1]
