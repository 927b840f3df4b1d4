"""The program as a user runs it."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.api import is_done, train
from mcore_rl.metrics.attempts_file import read_attempts
from tests.e2e.conftest import Finished, losses
from tests.forked import succeed

SHORT = ("train.steps=30", "train.micro_batch=8", "optim.lr=1e-2")


def test_a_run_learns_saves_and_is_done_once(
    config_file: Path, mcore_rl: Callable[..., Finished], tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    # As a user's shell starts it, with nothing in memory, but that it says what it imports, in launcher and ranks.
    python = [sys.executable, "-X", "importtime"]
    words = [*python, "-m", "mcore_rl.cli.cli", "pretrain", str(config_file), *SHORT]
    first = subprocess.run(words, capture_output=True, text=True, timeout=600, check=False)
    assert first.returncode == 0, first.stderr
    imported = {line.rpartition("|")[2].strip() for line in first.stderr.splitlines()}
    # torch's compiler, two seconds of every start, which torch's own optimizers and determinism import.
    assert {"mcore_rl.train.loop", "megatron.core.optimizer"} <= imported and "torch._dynamo" not in imported
    logged = losses(run_dir)
    assert list(logged) == list(range(1, 31))
    assert abs(logged[1] - 4.79) < 0.1, "at first every token is as likely as any: log 120 = 4.787"
    assert logged[30] < 3.5, "the corpus can be learned down to log 4 = 1.386"
    assert (run_dir / "DONE").exists() and (run_dir / "config.toml").exists()
    assert {path.name for path in (run_dir / "checkpoints").iterdir()} >= {"iter_0000028", "iter_0000030"}
    again = mcore_rl("pretrain", config_file, *SHORT)
    assert again.returncode == 0 and "nothing to do" in again.stdout
    longer = mcore_rl("pretrain", config_file, *SHORT, "train.steps=31")
    assert longer.returncode == 2 and f"Delete {run_dir}/DONE to train on to its train.steps" in longer.stderr


@pytest.mark.full
def test_python_is_called_with_each_step_and_its_error_ends_the_run(config_file: Path, tmp_path: Path) -> None:
    seen: dict[int, float] = {}
    calls: list[int] = []

    def on_step(step: int, values: dict[str, Any]) -> None:
        calls.append(step)
        if "train/loss_nats" in values:
            seen[step] = values["train/loss_nats"]
        if step == last:
            raise ValueError("enough")

    alone = {"mesh.tp": 1, "mesh.ep": 1}
    last = 4  # of so many that none of them is near the end by then
    ended = {**alone, "run_dir": str(tmp_path / "ended"), "train.steps": 5000}
    with pytest.raises(ValueError, match="enough"):
        train("pretrain", config_file, ended, on_step=on_step)
    assert list(seen) == [1, 2, 3, 4] and not is_done(tmp_path / "ended")
    last = -1
    seen.clear()
    calls.clear()
    run = train("pretrain", config_file, alone, on_step=on_step)
    assert is_done(run) and seen == losses(run)
    assert calls == list(range(13)), "a step with its evaluation and its checkpoint is one call"


@pytest.mark.full
def test_torchrun_and_mcore_rl_run_the_same(config_file: Path, trained: Path, tmp_path: Path) -> None:
    program = ["-m", "mcore_rl.programs.pretrain", config_file, f"run_dir={tmp_path}/torchrun"]
    succeed("torch.distributed.run", ["--standalone", "--nproc-per-node", "2", *program])
    assert losses(tmp_path / "torchrun") == losses(trained)


@pytest.mark.full
def test_a_stop_file_ends_the_run_with_a_checkpoint_and_it_goes_on_alike(
    config_file: Path, trained: Path, mcore_rl: Callable[..., Finished], tmp_path: Path
) -> None:
    interrupted = tmp_path / "interrupted"
    words = ["pretrain", f"{interrupted}/STOP.step.5", config_file, f"run_dir={interrupted}"]
    succeed("tests.e2e.signalled", words, 2)
    assert list(losses(interrupted)) == [1, 2, 3, 4, 5] and not (interrupted / "DONE").exists()
    assert mcore_rl("pretrain", config_file, f"run_dir={interrupted}").returncode == 0
    assert losses(interrupted) == losses(trained)
    starts = read_attempts(interrupted)
    assert [(start.step, start.mesh["world"]) for start in starts] == [(0, 2), (5, 2)]
    assert starts[1].command[1:4] == ["-m", "mcore_rl.programs.pretrain", str(config_file)]


@pytest.mark.full
def test_the_report_of_a_run_is_written_by_its_command(
    trained: Path, mcore_rl: Callable[..., Finished], tmp_path: Path
) -> None:
    page = tmp_path / "pages" / "report.html"
    written = mcore_rl("report", trained, "--output", page)
    assert written.returncode == 0 and written.stdout.startswith(f"{page}: 1 run,"), written.stderr
    assert f"mcore-rl pretrain {trained.parent}/pretrain.toml" in page.read_text(encoding="utf-8")
    (tmp_path / "empty").mkdir()
    nothing = mcore_rl("report", tmp_path / "empty")
    assert nothing.returncode == 2 and "give the run_dir of a training" in nothing.stderr
