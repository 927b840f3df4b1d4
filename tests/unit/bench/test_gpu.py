"""`make gpu` without a GPU: the code of its steps on small shapes. No figure of it is a measurement."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench.gpu import steps
from bench.gpu.__main__ import run_step
from mcore_rl.parallel.mesh import Mesh

REPOSITORY = Path(__file__).parents[3]


def test_a_rehearsal_keeps_its_results_with_versions(tmp_path: Path) -> None:
    output = tmp_path / "rehearsal.json"
    command = [
        sys.executable,
        "-m",
        "bench.gpu",
        "--device",
        "cpu",
        "--steps",
        "training",
        "--output",
        output,
    ]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(output.read_text())
    assert document["is_rehearsal"] and document["versions"]["torch"] == torch.__version__
    training = document["steps"]["training"]
    assert training["status"] == "ok" and len(training["figures"]["fp32"]["losses"]) == 5


def test_a_step_that_takes_too_long_is_a_result_and_no_end() -> None:
    outcome = run_step("training", "cpu", 1.0)
    assert outcome["status"] == "failed" and outcome["summary"] == "it did not end within 1 s"
    assert run_step("training", "cpu", 0.5)["summary"] == "no time was left"


def test_a_difference_beyond_the_tolerance_fails_a_step() -> None:
    steps.expect("losses", 1e-6, 1e-5)
    for difference in (2e-5, float("nan")):
        with pytest.raises(AssertionError, match="losses: differ by"):
            steps.expect("losses", difference, 1e-5)


def test_weights_come_back_from_the_device_bit_for_bit(one_rank: Mesh) -> None:
    outcome = steps.conversion(steps.Machine(is_gpu=False, mesh=one_rank))
    assert outcome.figures["families"] == steps.FAMILY_CASES and len(steps.FAMILY_CASES) >= 10
