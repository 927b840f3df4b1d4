"""A run that is killed, asked to stop and started again computes what it would have computed in one go."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch

from mcore_rl.obs.jsonl import read_records
from tests.e2e.conftest import Finished, command, losses
from tests.emitted import assert_emitted
from tests.forked import run_main

LOAD = "moe/expert_load"


def test_killed_and_stopped_the_run_is_bit_equal_in_the_end(
    config_file: Path, corpus: Path, tmp_path: Path
) -> None:
    """With dropout, MTP and router z-loss, on TP2 x EP2, with asynchronous checkpoints every four steps."""
    fields = [
        "train.steps=24",
        "model.family=glm4_moe",
        "model.mtp_layers=1",
        "model.moe.z_loss_coeff=1e-3",
        f"data.test=['{corpus}/valid']",
    ]
    straight = run_main("mcore_rl.run.pretrain", [config_file, *fields], 2)
    assert straight.returncode == 0, straight.stderr
    assert_emitted("pretrain", tmp_path / "run")
    run_dir = tmp_path / "broken"
    words = command("pretrain", config_file, *fields, f"run_dir={run_dir}")

    killed = started(words)
    wait_for_step(run_dir, 6, killed)
    os.kill(ranks_of(killed)[1].pid, signal.SIGKILL)
    assert killed.wait(timeout=30) != 0
    reached = max(losses(run_dir))
    assert 6 <= reached < 24 and not (run_dir / "DONE").exists()

    stopped = started(words)
    wait_for_step(run_dir, reached + 3, stopped)
    stopped.send_signal(signal.SIGTERM)
    assert stopped.wait(timeout=30) == 0, "a clean stop is no failure"
    stopped_at = max(losses(run_dir))
    assert reached < stopped_at < 24 and not (run_dir / "DONE").exists()
    assert (run_dir / f"checkpoints/iter_{stopped_at:07d}").exists()

    last = run_main("mcore_rl.run.pretrain", [config_file, *fields, f"run_dir={run_dir}"], 2)
    assert last.returncode == 0, last.stderr
    assert f"resumed from {run_dir}/checkpoints/iter_{stopped_at:07d}" in last.stdout
    assert (run_dir / "DONE").exists()
    assert losses(run_dir) == losses(tmp_path / "run")
    # Every step's tokens are counted once, also those that were pending when a checkpoint was written.
    assert expert_tokens(run_dir) == expert_tokens(tmp_path / "run")


def expert_tokens(run_dir: Path) -> int:
    """Return the sum of `moe/expert_load` over all records, layers and experts."""
    loads = [record[LOAD] for record in read_records(run_dir / "metrics.jsonl") if LOAD in record]
    return int(torch.tensor(loads).sum())


def test_a_second_run_does_not_write_to_the_folder_of_a_living_one(
    config_file: Path, mcore_rl: Callable[..., Finished], tmp_path: Path
) -> None:
    first = started(command("pretrain", config_file, "train.steps=2000"))
    wait_for_step(tmp_path / "run", 1, first)
    second = mcore_rl("pretrain", config_file, "train.steps=2000")
    assert second.returncode == 2
    assert f"{tmp_path}/run is being written by process {ranks_of(first)[0].pid} on " in second.stderr
    first.send_signal(signal.SIGUSR1)
    assert first.wait(timeout=30) == 0


def test_ctrl_c_saves_and_while_starting_ends_at_once_both_without_a_traceback(
    config_file: Path, tmp_path: Path
) -> None:
    words = command("pretrain", config_file, "train.steps=2000", "checkpoint.interval=none")
    starting, training = interruptible(words), interruptible([*words, f"run_dir={tmp_path}/saved"])
    for run_dir, run in ((tmp_path / "run", starting), (tmp_path / "saved", training)):
        wait_for(run_dir / "logs/0/rank_1.log", run)
        if run is training:
            wait_for_step(run_dir, 3, run)
        run.send_signal(signal.SIGINT)
        output, _ = run.communicate(timeout=60)
        assert run.returncode == 130 and "Traceback" not in output, output
        if run is starting:
            assert output == "Ctrl-C while starting: ended at once, nothing was trained that could be lost.\n"
    saved = max(losses(tmp_path / "saved"))
    assert (tmp_path / f"saved/checkpoints/iter_{saved:07d}").exists()
    last = "Stopped by Ctrl-C, and saved. The same command goes on from there."
    assert output.splitlines()[-1] == last and f"stopping after step {saved}: SIGINT came" in output


def interruptible(words: list[str]) -> "subprocess.Popen[str]":
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for(path: Path, run: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert run.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)


def started(words: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def ranks_of(run: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """The processes of its ranks, in order: a rank's output goes to its log, and that of rank 0 to a pipe."""
    outputs = {os.readlink(f"/proc/{child.pid}/fd/1"): child for child in psutil.Process(run.pid).children()}
    return [outputs[name] for name in sorted(outputs, key=lambda name: (not name.startswith("pipe:"), name))]


def wait_for_step(run_dir: Path, step: int, run: "subprocess.Popen[bytes] | subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + 120
    metrics = run_dir / "metrics.jsonl"
    while not metrics.exists() or f'"step": {step},' not in metrics.read_text():
        if run.poll() is not None or time.monotonic() > deadline:
            pytest.fail(f"step {step} was not reached")
        time.sleep(0.02)
