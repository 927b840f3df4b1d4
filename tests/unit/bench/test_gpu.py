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

from bench.gpu import equal, measured, steps
from bench.gpu.__main__ import STEPS, run_step, table_of
from bench.gpu.device import Machine, NotRunError
from mcore_rl.config.model import ModelConfig
from mcore_rl.megatron.mesh import Mesh
from mcore_rl.rl.engines.server_api import HttpClient, Owner
from mcore_rl.rl.engines.vllm_api import VllmApi
from tests.emulated_machine import emulated
from tests.fake_server import FakeServer
from tests.served_model import ModelAnswers
from tests.servers import vllm_server

REPOSITORY = Path(__file__).parents[3]


def is_this_torch(version: str) -> bool:
    """Whether a package's version is that of torch, whose own has the build after it: "2.13.0+cu130"."""
    return bool(version) and torch.__version__.startswith(version)


@pytest.mark.full
def test_a_rehearsal_keeps_its_results_with_versions(tmp_path: Path) -> None:
    output = tmp_path / "rehearsal.json"
    command = [sys.executable, "-m", "bench.gpu", "--device", "cpu", "--steps", "training", "--output", output]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(output.read_text())
    assert document["is_rehearsal"] and is_this_torch(document["versions"]["torch"])
    training = document["steps"]["training"]
    assert training["status"] == "ok" and len(training["figures"]["fp32"]["losses"]) == 5
    table = output.with_suffix(".md").read_text()
    assert table in done.stdout and "fp32 losses beside the CPU's" in table and "at most 1e-05" in table


def test_every_step_has_a_function_and_a_limit_of_time() -> None:
    assert steps.ALL.keys() - {"reference"} == STEPS.keys() and steps.ALL.keys() >= steps.NEEDS_MESH


@pytest.mark.full
def test_a_step_that_takes_too_long_is_a_result_and_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)  # the bench is not installed
    outcome = run_step("training", "cpu", 1.0)
    assert outcome["status"] == "failed" and outcome["summary"] == "it did not end within 1 s"
    assert run_step("training", "cpu", 0.5)["summary"] == "no time was left"


def test_a_difference_beyond_the_tolerance_fails_a_step_at_its_end() -> None:
    on = Machine(is_gpu=False, mesh=None)  # type: ignore[arg-type]
    on.expect("losses", 1e-6, 1e-5)
    assert not on.wrong
    for difference in (2e-5, float("nan")):
        on.expect("losses", difference, 1e-5)
    assert [text.partition(" by ")[0] for text in on.wrong] == ["losses: differ"] * 2
    assert on.table[1] == ("losses", "differ by 2.0e-05", "at most 1e-05")


def test_a_kernel_that_is_not_there_is_not_run_rather_than_equal() -> None:
    on = Machine(is_gpu=False, mesh=None)  # type: ignore[arg-type]
    assert equal.packed_difference(on) is None
    on.expect_if_run("packed sequences", None, 2e-2)
    assert on.table == [("packed sequences", "not run", "torch has no kernel for it here")] and not on.wrong


def test_a_baseline_that_fails_fails_its_step_and_the_others_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def our_step(*_: Any, local: bool = False) -> Callable[[], None]:
        if local:
            raise TypeError("local_spec() got an unexpected keyword argument")
        return lambda: None

    monkeypatch.setattr(measured, "our_step", our_step)
    monkeypatch.setattr(measured, "transformers_step", lambda *_, **__: lambda: None)
    on = Machine(is_gpu=False, mesh=None)  # type: ignore[arg-type]
    measured.slice(on)
    assert on.wrong == ["Megatron local failed: TypeError: local_spec() got an unexpected keyword argument"]
    assert {"ours", "transformers"} == {name for name, one in on.figures.items() if "tflops" in str(one)}
    shown = {name: (figure, beside) for name, figure, beside in on.table}
    assert shown["Megatron local"][0] == "failed" and "MFU" in shown["training, ours"][0]
    # 989 TFLOP/s in bf16 are an H100's.
    assert "240 (MFU 24%) stock recipe; 299 (MFU 30%) tuned" in shown["training, ours"][1]


def test_the_table_has_every_figure_beside_its_mark_and_why_a_step_was_not_run() -> None:
    on = Machine(is_gpu=True, mesh=None)  # type: ignore[arg-type]
    on.beside_plan("peak", 2**30, 3 * 2**29)
    ran = {"status": "ok", "seconds": 1.0, "summary": "", "table": on.table}
    left_out = {"status": "not run", "seconds": 2.0, "summary": "vLLM is not installed", "table": []}
    document = {"date": "today", "device": "cuda", "is_rehearsal": False, "steps": {"memory": ran, "servers": left_out}}
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table_of(document).splitlines()[2:]]
    assert rows[2:] == [
        ["memory", "ok, 1 s", "", ""],
        ["", "peak", "1.000 GiB", "planned 1.500 GiB, 1.50 times as much"],
        ["servers", "not run, 2 s", "", "vLLM is not installed"],
    ]


@pytest.mark.full
def test_a_step_that_cannot_run_here_is_not_run_rather_than_ok(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.delenv("MCORE_RL_VLLM", raising=False)
    monkeypatch.setattr(measured, "VLLM", Path("no such file"))
    with pytest.raises(NotRunError, match="vLLM is not installed"):
        measured.servers(Machine(is_gpu=False, mesh=None))  # type: ignore[arg-type]
    outcome = run_step("extras", "cpu", 300.0)
    assert (outcome["status"], outcome["summary"]) == ("not run", "TransformerEngine needs a GPU")


class ServerOfTests:
    """A model of this process in place of vLLM's, behind vLLM's protocol; the tensor `forgets` is not loaded."""

    mesh: Mesh
    forgets: str | None = None

    def __init__(self, _: str, model: ModelConfig, folder: Path, **options: Any) -> None:
        assert options["dtype"] == "float32"
        theirs = vllm_server.Trainer(model, self.mesh)
        answers = ModelAnswers(theirs.chunks, theirs.mesh, model, theirs.tensors())
        answers.forgets = self.forgets
        self.fake = FakeServer(answers, logprobs_mode="processed_logprobs").__enter__()
        owner = Owner("0123abcd", "tests")
        limits = {"request_timeout_s": 60.0, "update_timeout_s": 60.0}
        self.api = VllmApi(HttpClient(self.fake.url), vocab_size=model.vocab_size, owner=owner, **limits)

    def wait(self) -> None: ...

    def close(self) -> None:
        self.fake.__exit__()


@pytest.mark.full
def test_a_server_gets_the_weights_and_answers_with_them(one_rank: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real server is vLLM's; its protocol, its push and its probe are the same."""
    monkeypatch.setenv("MCORE_RL_VLLM", "python")
    monkeypatch.setattr(vllm_server, "VllmServer", ServerOfTests)
    monkeypatch.setattr(ServerOfTests, "mesh", one_rank, raising=False)
    for step in (measured.servers, measured.slots):
        on = Machine(is_gpu=False, mesh=one_rank)
        step(on)
        assert on.figures["push"]["probe"] < 1e-5 and on.figures["tokens_per_s"] > 0
        assert {name for name, *_ in on.table} >= {"push with its probe", "probe", "peak of a push, of weights alone"}
    monkeypatch.setattr(ServerOfTests, "forgets", "model.norm.weight")
    with pytest.raises(AssertionError, match="does not have the trainer's weights"):
        measured.servers(Machine(is_gpu=False, mesh=one_rank))


def test_figures_are_printed_as_they_are_found(capsys: pytest.CaptureFixture[str]) -> None:
    on = Machine(is_gpu=False, mesh=None)  # type: ignore[arg-type]
    on.keep("first", 1.5)
    on.keep("second", [2])
    last = capsys.readouterr().out.splitlines()[-1]
    found = json.loads(last.removeprefix("RESULT "))
    assert found["figures"] == {"first": 1.5, "second": [2]} and is_this_torch(found["versions"]["torch"])


PROGRAM = """
import subprocess, sys, time
print('RESULT {{"summary": "", "figures": {{"first": 1.5}}}}', flush=True)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", {marker!r}], start_new_session={apart})
{then}
"""


@pytest.mark.parametrize(
    ("then", "apart", "summary"),
    [
        # A server has a session of its own.
        ("time.sleep(600)", True, "it did not end within 4 s"),
        ("raise ValueError('no')", False, "ValueError: no"),
    ],
    ids=["too long", "fails"],
)
def test_what_a_step_has_found_is_kept_and_its_processes_end(
    then: str, apart: bool, summary: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = str(tmp_path / "marker")
    program, python = tmp_path / "program.py", tmp_path / "python"
    program.write_text(PROGRAM.format(then=then, marker=marker, apart=apart))
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
    # Five configs, and page-locked memory: the emulated GPU counts the latter.
    locked = found["memory"]["figures"]["page-locked for the optimizer in main memory"]
    assert len(found["memory"]["figures"]) == 6 and locked["peak_bytes"] > 0
    assert found["rl"]["figures"]["same_tokens"] == 1.0
    assert not any(step["wrong"] for step in found.values())


@pytest.mark.full
def test_weights_come_back_from_the_device_bit_for_bit(one_rank: Mesh) -> None:
    on = Machine(is_gpu=False, mesh=one_rank)
    equal.conversion(on)
    assert on.figures["families"] == equal.FAMILY_CASES and len(equal.FAMILY_CASES) >= 10
