"""`mcore-rl doctor` on this CPU; on machines with CUDA, which are emulated, in tests/unit/megatron/patches."""

import argparse
import json
import socket
from pathlib import Path

import pytest
import torch

from mcore_rl.cli.machine import doctor
from mcore_rl.megatron.cpu.compiled import build_id, library_path
from mcore_rl.megatron.patches.found import Found
from mcore_rl.megatron.patches.table import INSTALLED

KERNELS = [
    "grouped products of experts (torch)",
    "DeepEP dispatcher",
]


def found(**changes: object) -> Found:
    fields = {"has_cuda": True, "has_te": False, "has_apex": False, "unusable": {}} | changes
    return Found(**fields)  # type: ignore[arg-type]


def lacks(machine: Found, **kernels: bool) -> list[str]:
    there = dict.fromkeys(KERNELS, False) | kernels
    return [what for what, _ in doctor.missing(machine, there)]


def test_the_cpu_of_this_machine_is_sound(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(argparse.Namespace(json=True, nodes=None)) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["devices"] == [] and report["layers"] == "torch" and report["adam"] == "torch"
    assert report["communication"]["library"] == "gloo"
    assert [patch["symbol"] for patch in report["patches"]] == [patch.symbol for patch in INSTALLED]
    assert [entry["what"] for entry in report["missing"]] == ["a GPU"]


def test_people_read_a_line_a_topic(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(argparse.Namespace(json=False, nodes=None)) == 0
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
    assert line.startswith(
        f"CPU        compiled layers, build {build_id()} (a run of one rank has 2 threads here"
    )


def test_the_first_node_of_a_job_reports_on_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(argparse.Namespace(json=False, nodes=tmp_path)) == 0
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


def test_a_driver_without_a_gpu_for_torch_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = tmp_path / "version"
    driver.write_text("NVRM version: NVIDIA UNIX Open Kernel Module 580.65\n")
    monkeypatch.setattr(doctor, "NVIDIA_DRIVER", driver)
    faults = list(doctor.faults(found(has_cuda=False)))
    assert faults[0].startswith("there is an NVIDIA driver, but torch")
    assert doctor.main(argparse.Namespace(json=False, nodes=None)) == 1
