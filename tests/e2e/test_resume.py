"""A run that is killed, asked to stop and started again computes what it would have computed in one go."""

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch

from mcore_rl.metrics.jsonl import read_records
from tests.e2e.conftest import Finished, losses
from tests.emitted import assert_emitted
from tests.forked import RunningCommand, run_main, succeed

LOAD = "moe/expert_load"


@pytest.mark.full
def test_killed_and_stopped_the_run_is_bit_equal_in_the_end(config_file: Path, corpus: Path, tmp_path: Path) -> None:
    """With dropout, MTP and router z-loss, on TP2 x EP2, with asynchronous checkpoints every four steps."""
    fields = [
        "train.steps=12",
        "model.family=glm4_moe",
        "model.mtp_layers=1",
        "model.moe.z_loss_coeff=1e-3",
        "log.peak_tflops=0.1",
        f"data.test=['{corpus}/valid']",
    ]
    succeed("mcore_rl.programs.pretrain", [config_file, *fields], 2)
    assert_emitted("pretrain", tmp_path / "run")
    run_dir = tmp_path / "broken"
    words = [config_file, *fields, f"run_dir={run_dir}"]

    killed = run_main("tests.e2e.launched", [tmp_path / "logs/0", "pretrain", "lose_rank_1.step.7", *words])
    assert killed.returncode == 128 + signal.SIGKILL, killed.stderr
    assert max(losses(run_dir)) == 6 and not (run_dir / "DONE").exists()

    stopped = run_main("tests.e2e.launched", [tmp_path / "logs/1", "pretrain", "ask_launcher.step.5", *words])
    assert stopped.returncode == 0, "a clean stop is no failure"
    stopped_at = max(losses(run_dir))
    # The checkpoint of step 4 may not have been complete when the rank was killed.
    assert stopped_at in (5, 9) and not (run_dir / "DONE").exists()
    assert (run_dir / f"checkpoints/iter_{stopped_at:07d}").exists()

    last = succeed("mcore_rl.programs.pretrain", words, 2)
    assert f"resumed from {run_dir}/checkpoints/iter_{stopped_at:07d}" in last.stdout
    assert (run_dir / "DONE").exists()
    assert losses(run_dir) == losses(tmp_path / "run")
    # Every step's tokens are counted once, also those that were pending when a checkpoint was written.
    assert expert_tokens(run_dir) == expert_tokens(tmp_path / "run")


@pytest.mark.full
def test_on_one_rank_dropout_goes_on_with_the_numbers_of_the_run(config_file: Path, tmp_path: Path) -> None:
    """Without sequence parallelism it draws from torch's own generator, from which nothing else of a start may draw."""
    fields = ["mesh.tp=1", "mesh.ep=1", "train.steps=4", "checkpoint.interval=2", "checkpoint.asynchronous=false"]
    succeed("mcore_rl.programs.pretrain", [config_file, *fields])
    words = [config_file, *fields, f"run_dir={tmp_path}/broken"]
    killed = run_main("tests.e2e.signalled", ["pretrain", "SIGKILL.step.4", *words])
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    last = run_main("mcore_rl.programs.pretrain", words)
    assert "iter_0000002, step 2" in last.stdout, last.stderr
    assert losses(tmp_path / "broken") == losses(tmp_path / "run")


def expert_tokens(run_dir: Path) -> int:
    loads = [record[LOAD] for record in read_records(run_dir / "metrics.jsonl") if LOAD in record]
    return int(torch.tensor(loads).sum())


@pytest.mark.full
def test_a_second_run_does_not_write_to_the_folder_of_a_living_one(
    config_file: Path, mcore_rl: Callable[..., Finished], tmp_path: Path
) -> None:
    words = ["pretrain", config_file, "train.steps=2000"]
    with running(words, tmp_path / "output") as first:
        wait_for_step(tmp_path / "run", 1, first)
        second = mcore_rl(*words)
        assert second.returncode == 2
        assert f"{tmp_path}/run is being written by process {ranks_of(first)[0].pid} on " in second.stderr
        first.send_signal(signal.SIGUSR1)
        assert first.wait() == 0, first.text


def test_ctrl_c_saves_and_while_starting_ends_at_once_both_without_a_traceback(
    config_file: Path, tmp_path: Path
) -> None:
    logs = tmp_path / "logs"
    starting = RunningCommand(
        [logs, "pretrain", "hang.start.1", config_file, f"run_dir={tmp_path}/never"],
        tmp_path / "starting",
        "tests.e2e.launched",
    )
    words = ["pretrain", config_file, "train.steps=2000", "checkpoint.interval=none"]
    with running(words, tmp_path / "training") as training:
        while not (logs / "rank_1.log").exists():
            assert starting.poll() is None, starting.text
            time.sleep(0.02)
        wait_for_step(tmp_path / "run", 3, training)
        for run in (starting, training):
            run.send_signal(signal.SIGINT)
            assert run.wait() == 130 and "Traceback" not in run.text, run.text
    said = "Ctrl-C while starting: ended at once, nothing was trained that could be lost.\n"
    assert starting.text == said
    saved = max(losses(tmp_path / "run"))
    assert (tmp_path / f"run/checkpoints/iter_{saved:07d}").exists()
    last = "Stopped by Ctrl-C, and saved. The same command goes on from there."
    assert training.text.splitlines()[-1] == last
    assert f"stopping after step {saved}: SIGINT came" in training.text


@contextmanager
def running(words: Sequence[object], output: Path) -> Iterator[RunningCommand]:
    """`mcore-rl words...` beside this process, and no longer than inside."""
    run = RunningCommand(words, output)
    try:
        yield run
    finally:
        run.kill()


def ranks_of(run: RunningCommand) -> list[psutil.Process]:
    """The processes of its ranks, in order: a rank's output goes to its log, and that of rank 0 to a pipe."""
    outputs = {os.readlink(f"/proc/{child.pid}/fd/1"): child for child in psutil.Process(run.pid).children()}
    return [outputs[name] for name in sorted(outputs, key=lambda name: (not name.startswith("pipe:"), name))]


def wait_for_step(run_dir: Path, step: int, run: RunningCommand) -> None:
    metrics = run_dir / "metrics.jsonl"
    while not metrics.exists() or f'"step": {step},' not in metrics.read_text():
        assert run.poll() is None, run.text
        time.sleep(0.02)


ONE_RANK = ("mesh.tp=1", "mesh.ep=1", "train.eval_batches=none", "checkpoint.interval=10", "optim.schedule=constant")


@pytest.mark.full
@pytest.mark.parametrize("shuffle", ["epoch", "whole"])
def test_a_longer_run_reads_on_in_the_order_of_the_shorter_one_or_is_refused(
    config_file: Path, corpus: Path, tmp_path: Path, shuffle: str
) -> None:
    """126 sequences: steps of 8 begin the second epoch in 20 steps, and the third in 40."""
    data = [f"data.train=['{corpus}/valid']", f"data.shuffle={shuffle}"]
    words = [config_file, *ONE_RANK, *data]
    short = succeed("mcore_rl.programs.pretrain", [*words, "train.steps=20"])
    said = f"{corpus}/valid has 4,040 tokens to train on, 126 sequences; 100.00% of the run's, 1.27 epochs"
    assert said in short.stdout
    before = losses(tmp_path / "run")
    (tmp_path / "run/DONE").unlink()
    longer = run_main("mcore_rl.programs.pretrain", [*words, "train.steps=40"])
    if shuffle == "whole":
        assert longer.returncode == 2
        change = (
            f'data.shuffle is "data.train[0] = {corpus}/valid with 2 epochs shuffled as one and the last apart" there, '
            f'"data.train[0] = {corpus}/valid with 3 epochs shuffled as one and the last apart" here'
        )
        assert change in longer.stderr.replace('\\\\"', '"')
        assert 'checkpoint.allow_changes=["data.shuffle"]' in longer.stderr
        accepted = ["train.steps=40", "checkpoint.allow_changes=['data.shuffle']"]
        assert run_main("mcore_rl.programs.pretrain", [*words, *accepted]).returncode == 0
        return
    assert longer.returncode == 0, longer.stderr
    succeed("mcore_rl.programs.pretrain", [*words, "train.steps=40", f"run_dir={tmp_path}/straight"])
    assert max(before) == 20 and before.items() <= losses(tmp_path / "straight").items()
    assert losses(tmp_path / "run") == losses(tmp_path / "straight")
