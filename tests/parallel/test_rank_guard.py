"""Ranks that fail while others wait in a collective: under nobody who would end them, under ours, under torchrun."""

import platform
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from mcore_rl.workers.failures import FAILURES
from mcore_rl.workers.launcher import free_port, launch_local
from tests.forked import begin_main, run_main
from tests.ranks import TIMEOUT_S

ROOT = Path(__file__).parents[2]
ENDED_WITHIN_S = 60.0
"""Far above what the guard takes on a busy machine, and far below what waits otherwise: gloo's half an hour."""
HEAD = """
import os, pathlib, signal, sys, time
import torch, torch.distributed as dist
from mcore_rl.workers.launcher import rank_of_launcher, world_size_of_launcher
from mcore_rl.workers.rank_guard import rank_guard
from mcore_rl.errors import DataError

rank = rank_of_launcher()

def join():
    dist.init_process_group("gloo", rank=rank, world_size=world_size_of_launcher())
    dist.all_reduce(torch.ones(1))

def wait_in_collective():
    while True:
        dist.all_reduce(torch.ones(1))

def about_to_fail():
    pathlib.Path(sys.argv[1]).touch()

with rank_guard():
"""
RAISE = """
    join()
    if rank == {failing}:
        about_to_fail()
        raise ValueError("boom of {failing}")
    wait_in_collective()
"""


@dataclass
class Outcome:
    """What became of a run: status and stderr of each rank, and when all were gone after `about_to_fail`."""

    statuses: list[int]
    errors: list[str]
    ended_after_s: float | None


def since(failed):
    return time.time() - failed.stat().st_mtime if failed.exists() else None


def write(tmp_path, body):
    program = tmp_path / "a_program.py"
    program.write_text(HEAD + body)
    return program, tmp_path / "failed"


def run_bare(tmp_path, body, rank_variable="RANK", world_variable="WORLD_SIZE", **environment):
    """Two ranks as plain processes: who is to end them, if not they themselves? Under the launchers they are new ones
    of Python, here copies of a warm one.
    """
    program, failed = write(tmp_path, body)
    shared = {world_variable: "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    errors = [tmp_path / f"stderr_{rank}" for rank in range(2)]
    ranks = [
        begin_main(
            "tests.script", [program, failed], errors[rank], **{rank_variable: str(rank)}, **shared, **environment
        )
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            rank.join(TIMEOUT_S)
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
    return Outcome([rank.exitcode for rank in ranks], [path.read_text() for path in errors], since(failed))


@pytest.mark.parametrize("failing", [0, 1])
def test_ranks_in_a_collective_end_when_another_fails(tmp_path, failing):
    outcome = run_bare(tmp_path, RAISE.format(failing=failing))
    other = 1 - failing
    assert outcome.ended_after_s < ENDED_WITHIN_S
    assert outcome.statuses == [1, 1]
    headline, cause, first = outcome.errors[failing].splitlines()[:3]
    assert headline == f"rank {failing} on {platform.node()}: {cause}" and first.startswith("Traceback")
    assert cause == f"ValueError: boom of {failing}"
    assert "Traceback" in outcome.errors[failing] and "Traceback" not in outcome.errors[other]
    assert f"Rank {other} ends because rank {failing} failed: ValueError" in outcome.errors[other]


def test_a_failure_before_the_process_group_ends_those_that_wait_for_it_as_tasks_of_srun_too(tmp_path):
    body = """
    if rank == 1:
        about_to_fail()
        raise ValueError("boom")
    join()
"""
    outcome = run_bare(tmp_path, body, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
    assert outcome.ended_after_s < ENDED_WITHIN_S
    assert outcome.statuses == [1, 1]


def test_an_error_of_the_user_comes_without_traceback_once_and_with_status_2(tmp_path):
    outcome = run_bare(
        tmp_path,
        """
    join()
    about_to_fail()
    raise DataError("no such file")
""",
    )
    assert sorted(outcome.statuses) in ([1, 2], [2, 2])
    said = "".join(outcome.errors)
    assert said.count("DataError: no such file") == 1 and "Traceback" not in said


def test_the_reason_is_known_where_the_log_of_the_rank_that_failed_is_on_a_full_disk(tmp_path):
    lost = RAISE.replace("        raise", "        os.dup2(os.open('/dev/full', os.O_WRONLY), 2)\n        raise")
    outcome = run_bare(tmp_path, lost.format(failing=1))
    assert outcome.ended_after_s < ENDED_WITHIN_S
    assert outcome.statuses == [1, 1]
    assert outcome.errors[0] == "Rank 0 ends because rank 1 failed: ValueError: boom of 1\n"


def test_a_rank_that_lost_its_peer_gives_way_to_the_peers_own_words(tmp_path):
    """Rank 1 closes its connections first and says why a second later: rank 0 hears of the former at once."""
    outcome = run_bare(
        tmp_path,
        """
    join()
    if rank == 0:
        wait_in_collective()
    try:
        raise ValueError("the cause")
    finally:
        about_to_fail()
        dist.destroy_process_group()
        time.sleep(1)
""",
    )
    assert outcome.statuses == [1, 1]
    assert "Rank 0 ends because rank 1 failed: ValueError: the cause" in outcome.errors[0]
    assert "Traceback" not in outcome.errors[0] and "ValueError: the cause" in outcome.errors[1]


@pytest.mark.matrix("0")
@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_rank_does_not_leave_the_other_waiting(tmp_path, killed):
    outcome = run_bare(
        tmp_path,
        f"""
    join()
    if rank == {killed}:
        about_to_fail()
        os.kill(os.getpid(), signal.SIGKILL)
    wait_in_collective()
""",
    )
    assert outcome.ended_after_s < ENDED_WITHIN_S
    assert outcome.statuses[killed] == -signal.SIGKILL and outcome.statuses[1 - killed] == 1
    if killed:  # rank 0 took the store with it
        assert f"rank 1 on {platform.node()} is gone without a word: killed, or" in outcome.errors[0]


def test_a_rank_that_does_not_notice_the_death_of_another_hears_of_it(tmp_path):
    """As with NCCL, where nothing breaks when a peer dies; the process above the dead rank has recorded it."""
    outcome = run_bare(
        tmp_path,
        """
    from mcore_rl.workers.failures import note_failure, rank_death
    join()
    if rank == 1:
        note_failure(rank_death(1, signal.SIGKILL))
        about_to_fail()
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)
""",
        **{FAILURES: str(tmp_path / "failures")},
    )
    assert outcome.ended_after_s < ENDED_WITHIN_S and outcome.statuses == [1, -signal.SIGKILL]
    headline = f"rank 1 on {platform.node()} was killed by SIGKILL"
    assert f"Rank 0 ends because rank 1 failed: {headline}" in outcome.errors[0]


def test_ranks_that_are_done_at_different_times_all_end_well(tmp_path):
    outcome = run_bare(
        tmp_path,
        """
    join()
    dist.destroy_process_group()
    time.sleep(2 * rank)
""",
    )
    assert outcome.statuses == [0, 0] and "Rank" not in "".join(outcome.errors)


@pytest.mark.full
def test_under_our_launcher_the_traceback_comes_first(tmp_path, monkeypatch, capfd):
    program, failed = write(tmp_path, RAISE.format(failing=1))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    assert launch_local(program.stem, [str(failed)], 2, tmp_path / "logs") == 1
    assert since(failed) < ENDED_WITHIN_S
    # Rank 0's own sentence stands before it where the machine is so busy that rank 0 looked sooner than the launcher.
    ends = "Rank 0 ends because rank 1 failed: ValueError: boom of 1\n"
    errors = capfd.readouterr().err.removeprefix(ends)
    assert errors.startswith("ValueError: boom of 1\nTraceback") and errors.count("boom of 1") <= 4
    assert f"First cause: rank 1 on {platform.node()}: ValueError: boom of 1 (exit status 1)" in errors


@pytest.mark.full
@pytest.mark.parametrize(
    ("failing", "raised"), [(0, "on_rank_zero(action)"), (0, "on_every_rank(action)"), (1, "on_every_rank(action)")]
)
def test_the_first_cause_is_of_the_rank_that_met_an_error_which_all_raise(
    tmp_path, monkeypatch, capfd, failing, raised
):
    """Though the other rank is the first to end of it, in an error of its own words."""
    body = f"""
    from mcore_rl.errors import CheckpointError
    from mcore_rl.megatron.agree import on_every_rank, on_rank_zero

    def action():
        if rank == {failing}:
            raise DataError("the disk is full")

    join()
    try:
        {raised}
    except DataError as error:
        time.sleep(0 if rank != {failing} else 2)  # longer than a busy machine is late
        raise CheckpointError(f"not saved: {{error}}") from error
"""
    program, _ = write(tmp_path, body)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    assert launch_local(program.stem, [], 2, tmp_path / "logs") == 2
    errors = capfd.readouterr().err
    last = errors.splitlines()[-1]
    assert last.startswith(f"First cause: rank {failing} on {platform.node()}, by the error above (exit status 2)")
    assert last.endswith(f"logs/rank_{failing}.log") or failing == 0
    assert errors.count("the disk is full") == 1 and "ends because" not in errors, errors


@pytest.mark.full
def test_under_torchrun_the_traceback_comes_first(tmp_path):
    program, failed = write(tmp_path, RAISE.format(failing=1))
    done = run_main("torch.distributed.run", ["--nproc-per-node=2", program, failed])
    assert since(failed) < ENDED_WITHIN_S
    assert done.returncode == 1
    before, _, after = done.stderr.partition("ValueError: boom of 1")
    assert "Traceback" not in before and before.endswith(f"rank 1 on {platform.node()}: ")
    assert "ValueError: boom of 1" in after.split("FAILED")[1]  # torchrun's own summary
