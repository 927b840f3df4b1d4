"""The first of the gravest causes is the run's, whoever wrote first; the kernel's counters tell out of memory."""

import errno
import os
import platform
import resource
import signal
import subprocess
import sys
import time

import pytest

from mcore_rl.storage.files import machine_error
from mcore_rl.workers.failures import FAILURES, OomKills, Order, first_cause, note_failure, rank_death, rank_failure
from tests.unit.launch.conftest import ROOT

HOST = platform.node()


def test_a_dead_rank_and_a_rank_s_own_error_explain_the_others_and_the_earlier_of_them_is_the_cause(tmp_path):
    assert first_cause(tmp_path) is None
    written = [
        rank_failure(4, 1, "ended with status 1", order=Order.STATUS),
        rank_failure(0, 1, "RuntimeError: Connection closed by peer", order=Order.LOST_PEER),
        rank_death(3, signal.SIGABRT),  # NCCL ends a rank so that has lost its peer
        rank_death(1, signal.SIGSEGV),
        rank_failure(2, 1, "ValueError: boom", "ValueError: boom\nTraceback ..."),
    ]
    for failure, headline in zip(
        written,
        [
            f"rank 4 on {HOST} ended with status 1",
            f"rank 0 on {HOST}: RuntimeError: Connection closed by peer",
            f"rank 3 on {HOST} was killed by SIGABRT",
            f"rank 1 on {HOST} was killed by SIGSEGV",
            f"rank 1 on {HOST} was killed by SIGSEGV",
        ],
        strict=True,
    ):
        note_failure(failure, tmp_path)
        assert first_cause(tmp_path).headline == headline
        time.sleep(0.002)  # file names have milliseconds


def test_a_cause_makes_no_folder_of_a_run_that_was_renamed_anew(tmp_path, capsys):
    """The user could not give the run's folder its name back."""
    assert note_failure(rank_failure(0, 2, "gone"), tmp_path / "run/logs/7.0/failures") is None
    assert list(tmp_path.iterdir()) == [] and capsys.readouterr().err.endswith(f"rank 0 on {HOST}: gone\n")


def test_an_error_of_a_limit_of_the_process_names_the_limit_and_what_to_do():
    """The address space gets a limit that nothing here reaches: `ulimit -v` counts it in KiB."""
    before, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (1 << 45, hard))
    try:
        limited = {
            rank_failure(0, 1, "OSError: [Errno 24] Too many open files: 'a.bin'"): (
                "n",
                resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            ),
            rank_failure(0, 1, "RuntimeError: Resource temporarily unavailable"): ("v", 1 << 35),
            rank_failure(0, 1, "the last line", "MemoryError\nthe last line"): ("v", 1 << 35),
            rank_death(0, signal.SIGABRT, None, "terminate called without an active exception"): ("v", 1 << 35),
        }
        for failure, (option, most) in limited.items():
            assert f". The limit `ulimit -{option}` is {most}: raise it, here or where " in failure.headline
        explained = machine_error(OSError(errno.EMFILE, os.strerror(errno.EMFILE), "a.bin"))
        assert str(explained).startswith("a.bin: Too many open files. The limit `ulimit -n` is ")
        for error in (MemoryError(), ImportError("libtorch_cpu.so: failed to map segment from shared object")):
            explained = machine_error(error)
            assert f"this process: {type(error).__name__}" in str(explained)
            assert f"The limit `ulimit -v` is {1 << 35}: raise it" in str(explained)
        assert machine_error(ValueError("boom")) is None
        assert rank_failure(0, 2, str(explained)).headline.count("ulimit") == 1
        assert "ulimit" not in rank_failure(0, 1, "ValueError: boom").headline
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (before, hard))
    if before == resource.RLIM_INFINITY:
        assert "ulimit" not in rank_failure(0, 1, "MemoryError").headline


def test_a_long_error_of_several_lines_becomes_one_line_of_500_characters():
    assert rank_failure(0, 1, "A:\n - b\n - c", host="n1").headline == "rank 0 on n1: A: - b - c"
    assert len(rank_failure(0, 1, "x" * 9999, host="n1").headline) == len("rank 0 on n1: ") + 500


@pytest.mark.parametrize(
    ("line", "events", "limit"),
    [
        ("0::/job_7/step_0", "sys/fs/cgroup/job_7/step_0/memory.events", "memory.max"),
        ("4:memory:/job_7", "sys/fs/cgroup/memory/job_7/memory.oom_control", "memory.limit_in_bytes"),
        ("0::/", "proc/vmstat", ""),
    ],
)
def test_out_of_memory_is_what_the_counter_of_the_cgroup_says(tmp_path, line, events, limit):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(f"9:freezer:/\n{line}\n")
    file = tmp_path / events
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("low 0\noom 4\noom_kill 2\n")
    oom = OomKills(tmp_path)
    assert rank_death(1, signal.SIGKILL, oom).headline == f"rank 1 on {HOST} was killed by SIGKILL"
    file.write_text("low 0\noom 5\noom_kill 3\n")
    most = ""
    if limit:
        (file.parent / limit).write_text("17179869184\n")
        most = "the cgroup's limit is 16.0 GiB, "
    expected = f"rank 1 on {HOST} was killed by SIGKILL, out of memory ({most}oom_kill in {file})"
    assert rank_death(1, signal.SIGKILL, oom).headline == expected
    assert "memory" not in rank_death(1, signal.SIGSEGV, oom).headline


PROGRAM = """
import os, signal, sys
{body}
"""


def run_rank(tmp_path, body, ask=0):
    """The module of `body` as rank 5 below its process; `ask` is a signal for that process."""
    (tmp_path / "a_rank.py").write_text(PROGRAM.format(body=body))
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}", "RANK": "5", "WORLD_SIZE": "8"}
    process = subprocess.Popen(
        [sys.executable, "-m", "mcore_rl.workers.rank_process", "a_rank", "one", "two"],
        env=environment | {FAILURES: str(tmp_path / "failures")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    if ask:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(ask)
    output, errors = process.communicate(timeout=300)
    return process.returncode, output, errors, first_cause(tmp_path / "failures")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_the_process_above_a_rank_records_the_signal_that_ended_it_and_ends_likewise(tmp_path, number):
    status, _, _, cause = run_rank(tmp_path, f"os.kill(os.getpid(), {int(number)})")
    assert (status, cause.headline) == (-number, f"rank 5 on {HOST} was killed by {number.name}")
    assert (cause.rank, cause.status) == (5, 128 + number)


def test_an_error_that_nobody_handles_is_recorded_last_line_first(tmp_path):
    status, _, errors, cause = run_rank(tmp_path, "import no_such_module")
    last = "ModuleNotFoundError: No module named 'no_such_module'"
    assert (status, cause.headline) == (1, f"rank 5 on {HOST}: {last}")
    assert cause.text.splitlines()[0] == last and errors.rstrip().endswith(last)


def test_a_rank_ends_with_its_own_status_and_arguments_and_a_good_one_leaves_no_cause(tmp_path):
    status, output, _, cause = run_rank(tmp_path, "print(__name__, sys.argv[1:])")
    assert (status, output, cause) == (0, "__main__ ['one', 'two']\n", None)
    status, _, _, cause = run_rank(tmp_path, "sys.exit(7)")
    assert (status, cause.headline) == (7, f"rank 5 on {HOST} ended with status 7")


@pytest.mark.full
def test_a_signal_for_the_process_is_one_for_the_rank_and_no_failure(tmp_path):
    # Sleeps again and again: a signal that comes just before a call that blocks waits for the end of that call.
    sleep = "import time; os.write(1, b'ready\\n')\nwhile True: time.sleep(.05)"
    save = "signal.signal(signal.SIGTERM, lambda *_: (os.write(1, b'saved\\n'), os._exit(0)))\n"
    assert run_rank(tmp_path, save + sleep, signal.SIGTERM)[:2] == (0, "saved\n")
    status, _, errors, cause = run_rank(tmp_path, sleep, signal.SIGTERM)
    assert (status, errors, cause) == (-signal.SIGTERM, "", None)
    status, _, errors, cause = run_rank(tmp_path, sleep, signal.SIGINT)
    assert (status, errors, cause) == (130, "Rank 5 was interrupted.\n", None)
