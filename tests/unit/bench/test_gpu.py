"""`make gpu` without a GPU: the code of its steps on small shapes. No figure of it is a measurement."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.gpu import steps
from bench.gpu.__main__ import run_step
from mcore_rl.megatron.mesh import Mesh
from tests.emulated_machine import emulated

REPOSITORY = Path(__file__).parents[3]


@pytest.mark.full
def test_a_rehearsal_keeps_its_results_with_versions(tmp_path: Path) -> None:
    output = tmp_path / "rehearsal.json"
    command = [sys.executable, "-m", "bench.gpu", "--device", "cpu", "--steps", "training", "--output", output]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(output.read_text())
    assert document["is_rehearsal"] and document["versions"]["torch"] == torch.__version__
    training = document["steps"]["training"]
    assert training["status"] == "ok" and len(training["figures"]["fp32"]["losses"]) == 5


def test_a_step_that_takes_too_long_is_a_result_and_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)  # the bench is not installed
    outcome = run_step("training", "cpu", 1.0)
    assert outcome["status"] == "failed" and outcome["summary"] == "it did not end within 1 s"
    assert run_step("training", "cpu", 0.5)["summary"] == "no time was left"


def test_a_difference_beyond_the_tolerance_fails_a_step_at_its_end() -> None:
    on = steps.Machine(is_gpu=False, mesh=None)  # type: ignore[arg-type]
    on.expect("losses", 1e-6, 1e-5)
    assert not on.wrong
    for difference in (2e-5, float("nan")):
        on.expect("losses", difference, 1e-5)
    assert [text.partition(" by ")[0] for text in on.wrong] == ["losses: differ"] * 2


def test_a_baseline_that_fails_fails_its_step_and_the_others_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def our_step(*_: Any, local: bool = False) -> Callable[[], None]:
        if local:
            raise TypeError("local_spec() got an unexpected keyword argument")
        return lambda: None

    monkeypatch.setattr(steps, "our_step", our_step)
    monkeypatch.setattr(steps, "transformers_step", lambda *_, **__: lambda: None)
    on = steps.Machine(is_gpu=False, mesh=None)  # type: ignore[arg-type]
    outcome = steps.slice(on)
    assert on.wrong == ["Megatron local failed: TypeError: local_spec() got an unexpected keyword argument"]
    assert {"ours", "transformers"} == {name for name, one in outcome.figures.items() if "tflops" in str(one)}


def test_figures_are_printed_as_they_are_found(capsys: pytest.CaptureFixture[str]) -> None:
    on = steps.Machine(is_gpu=False, mesh=None)  # type: ignore[arg-type]
    on.keep("first", 1.5)
    on.keep("second", [2])
    last = capsys.readouterr().out.splitlines()[-1]
    found = json.loads(last.removeprefix("RESULT "))
    assert found["figures"] == {"first": 1.5, "second": [2]} and found["versions"]["torch"] == torch.__version__


PROGRAM = """
import subprocess, sys, time
print('RESULT {{"summary": "", "figures": {{"first": 1.5}}}}', flush=True)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", {marker!r}])
{then}
"""


@pytest.mark.parametrize(
    ("then", "summary"),
    [("time.sleep(600)", "it did not end within 4 s"), ("raise ValueError('no')", "ValueError: no")],
    ids=["too long", "fails"],
)
def test_what_a_step_has_found_is_kept_and_its_processes_end(
    then: str, summary: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = str(tmp_path / "marker")
    program, python = tmp_path / "program.py", tmp_path / "python"
    program.write_text(PROGRAM.format(then=then, marker=marker))
    # In place of `python -m bench.gpu.steps`.
    python.write_text(f"#!/bin/sh\nexec {sys.executable} -S {program}\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    outcome = run_step("machine", "cpu", 4.0)
    assert (outcome["status"], outcome["summary"]) == ("failed", summary)
    assert outcome["figures"] == {"first": 1.5}
    # Killed processes end a moment later.
    deadline = time.monotonic() + 30.0
    while marker.encode() in b"".join(commands()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert marker.encode() not in b"".join(commands())


def commands() -> Iterator[bytes]:
    """Yield the command lines of all processes."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            yield path.read_bytes()


@pytest.mark.full
def test_without_a_gpu_the_reason_is_given_before_a_step(tmp_path: Path) -> None:
    output = tmp_path / "results.json"
    command = [sys.executable, "-m", "bench.gpu", "--output", str(output)]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 1
    document = json.loads(output.read_text())
    # In torch's words: "not compiled with CUDA enabled", "no NVIDIA driver", "driver ... is too old".
    assert "CUDA" in document["trouble"] or "NVIDIA" in document["trouble"]
    assert f"torch cannot use a GPU here: {document['trouble']}" in done.stdout and not document["steps"]


@pytest.mark.full
def test_steps_run_on_an_emulated_gpu() -> None:
    """What a rehearsal on a CPU passes over: names, peaks, tensors on the device, graphs."""
    done = emulated("cuda", "tests.emulated_bench:run", "machine", "memory", "rl")
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["machine"]["figures"]["known_peak_tflops"] is None
    assert found["machine"]["figures"]["doctor"]["devices"][0]["name"] == "emulated GPU"
    assert len(found["memory"]["figures"]) == 5 and found["rl"]["figures"]["same_tokens"] == 1.0
    assert not any(step["wrong"] for step in found.values())


@pytest.mark.full
def test_weights_come_back_from_the_device_bit_for_bit(one_rank: Mesh) -> None:
    outcome = steps.conversion(steps.Machine(is_gpu=False, mesh=one_rank))
    assert outcome.figures["families"] == steps.FAMILY_CASES and len(steps.FAMILY_CASES) >= 10
