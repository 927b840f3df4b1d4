"""One writer for a run's folder, and its DONE."""

import json
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from mcore_rl.errors import CheckpointError
from mcore_rl.rl.rewards.interface import RewardInput
from mcore_rl.rl.rewards.score import FailedPart, FailureReport
from mcore_rl.rl.rollouts.evaluation import write_samples
from mcore_rl.rl.workers import FailedScore
from mcore_rl.train.run_folder import RunFolder
from tests.ranks import run_ranks


def claimed(path: Path) -> None:
    """On a rank: become the writer and stay it."""
    RunFolder(path).claim().check()


def refused(path: Path) -> str:
    """On a rank: why not."""
    with pytest.raises(CheckpointError) as error:
        RunFolder(path).claim()
    return str(error.value)


def claimed_after(path: Path, writer: dict[str, object]) -> str:
    """On a rank: the host in the fence after claiming a folder that `writer` had, and released."""
    path.mkdir(exist_ok=True)
    (path / "writer.json").write_text(json.dumps(writer))
    (path / "STOP").touch()
    folder = RunFolder(path)
    fence = folder.claim()
    fence.check()
    assert not (path / "STOP").exists() and (path / "checkpoints").is_dir()
    host = json.loads((path / "writer.json").read_text())["host"]
    fence.release()
    assert not (path / "writer.json").exists()
    return str(host)


def attempt(pid: int, host: str = os.uname().nodename, born: int | None = None) -> dict[str, object]:
    ticks = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")")[1].split()[19]) if born is None else born
    return {"job": "", "number": 0, "host": host, "pid": pid, "born": ticks, "since": "then"}


@pytest.mark.parametrize("name", ["config.toml", "metrics.jsonl"])
def test_files_that_no_run_wrote_are_not_replaced(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("a user's")
    said = run_ranks(refused, 1, tmp_path)[0]
    assert f"run_dir {tmp_path} has {name}, which no run wrote and this one would replace" in said
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "a user's"


def test_a_living_writer_on_this_host_is_not_pushed_out(tmp_path: Path) -> None:
    tmp_path.joinpath("writer.json").write_text(json.dumps(attempt(os.getpid())))
    message = run_ranks(refused, 2, tmp_path)
    assert message[0] == message[1]
    assert f"{tmp_path} is being written by process {os.getpid()} on " in message[0]
    assert f"kill {os.getpid()}" in message[0]


def test_a_dead_writer_is_taken_over(tmp_path: Path) -> None:
    run_ranks(claimed, 1, tmp_path)
    assert (tmp_path / "writer.json").exists(), "the process ended without releasing it"
    run_ranks(claimed, 1, tmp_path)


@pytest.mark.parametrize("other", [{"born": 1}, {"host": "elsewhere"}], ids=["another process", "another host"])
def test_a_writer_that_does_not_live_here_is_taken_over(other: dict[str, Any], tmp_path: Path) -> None:
    """It has the pid of a process that does."""
    assert run_ranks(claimed_after, 1, tmp_path, attempt(os.getpid(), **other))[0] == os.uname().nodename


def test_a_zombie_is_dead(tmp_path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    process.start()
    writer = attempt(process.pid or 0)
    process.kill()
    while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    run_ranks(claimed_after, 1, tmp_path, writer)
    process.join()


def lost(path: Path) -> list[str]:
    """On a rank: what a check says after another attempt claimed the folder, and after the fence was deleted."""
    fence = RunFolder(path).claim()
    messages = []
    for content in (json.dumps({"job": "12", "number": 3, "host": "n7", "pid": 5, "born": 6}), None, "{"):
        if int(os.environ["RANK"]) == 0:
            fence_file = path / "writer.json"
            fence_file.unlink() if content is None else fence_file.write_text(content)
        with pytest.raises(CheckpointError) as error:
            fence.check()
        messages.append(str(error.value))
    return messages


def test_a_writer_that_was_taken_over_hears_it_on_all_ranks(tmp_path: Path) -> None:
    first, second = run_ranks(lost, 2, tmp_path)
    assert first == second
    assert f"{tmp_path} now belongs to job 12 attempt 3, process 5 on n7" in first[0]
    assert f"{tmp_path}/writer.json was renamed, moved or deleted while this run (process " in first[1]
    assert "is damaged" in first[2]


def renamed(path: Path) -> str:
    """On a rank: what a check says after the folder was renamed."""
    fence = RunFolder(path).claim()
    path.rename(path.with_name("renamed"))
    with pytest.raises(CheckpointError) as error:
        fence.check()
    return str(error.value)


def test_a_run_whose_folder_was_renamed_says_so_and_makes_no_folder_of_the_old_name(tmp_path: Path) -> None:
    path = tmp_path / "run"
    (message,) = run_ranks(renamed, 1, path)
    assert message.startswith(f"{path} was renamed, moved or deleted while this run (process ")
    assert "Give the folder back its name, and start again: the run resumes from its last checkpoint" in message
    assert not path.exists()


def test_what_a_run_writes_makes_no_folder_of_a_run_that_was_renamed(tmp_path: Path) -> None:
    """The user could not give the folder its name back."""
    run = tmp_path / "run"
    scored = RewardInput(prompt="p", completion="c", answer="a", num_tokens=1, is_truncated=False, fields={})
    failure = FailedScore(kind="raised", text="ValueError: no")
    failed = FailedPart(part="own:score", problem_id="p", failure=failure, scored=scored)
    for write in (lambda: write_samples(run / "samples", 1, []), lambda: FailureReport(print, run).add([failed])):
        with pytest.raises(CheckpointError, match=rf"writing {run}/.* failed: No such file or directory"):
            write()
    assert not run.exists()


def done(path: Path) -> tuple[str | None, str | None, str | None]:
    """On a rank: what a start hears before the last step, after it, and where a user has made the file."""
    folder = RunFolder(path)
    folder.claim()
    before = folder.done()
    folder.mark_done(40)
    after = folder.done()
    (path / "DONE").write_text("")
    return before, after, folder.done()


def test_a_start_after_the_last_step_is_told_so(tmp_path: Path) -> None:
    before, after, by_user = run_ranks(done, 1, tmp_path)[0]
    assert before is None
    assert by_user is not None and by_user.startswith(f"all steps are done ({tmp_path}/DONE). Delete it")
    assert after is not None and after.startswith("all 40 steps are done since 20")
    assert f"({tmp_path}/DONE). Delete it to go on, with a larger train.steps" in after


def as_attempt(number: int, path: Path, writer: dict[str, object], outcome: str) -> str:
    """On a rank that is start `number` of job 7: what became of claiming a folder that `writer` has."""
    os.environ.update(SLURM_JOB_ID="7", SLURM_RESTART_COUNT=str(number))
    (path / "writer.json").write_text(json.dumps(writer))
    return refused(path) if outcome == "refused" else str(claimed(path))


def test_a_later_attempt_of_a_job_takes_over_its_living_orphan_on_this_host(tmp_path: Path) -> None:
    orphan = attempt(os.getpid()) | {"job": "7", "number": 1}
    run_ranks(as_attempt, 1, 2, tmp_path, orphan, "claimed")
    assert json.loads((tmp_path / "writer.json").read_text())["number"] == 2


def test_an_orphan_does_not_take_over_a_later_attempt_of_its_job_on_another_host(tmp_path: Path) -> None:
    later = attempt(1, host="elsewhere") | {"job": "7", "number": 3}
    assert "an orphan of an earlier attempt" in run_ranks(as_attempt, 1, 2, tmp_path, later, "refused")[0]


def test_another_job_that_lives_here_is_not_taken_over_whatever_its_number(tmp_path: Path) -> None:
    other = attempt(os.getpid()) | {"job": "6", "number": 0}
    assert "which is running" in run_ranks(as_attempt, 1, 2, tmp_path, other, "refused")[0]
