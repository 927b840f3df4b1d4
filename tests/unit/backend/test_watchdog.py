"""A process that gets nowhere ends, and says where it was; one that is merely suspended does not."""

import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mcore_rl.backend.failures import FAILURES, first_cause
from mcore_rl.backend.watchdog import Limits, Phase, Watchdog
from mcore_rl.errors import HUNG_STATUS

LIMIT_S = 1.0
PROGRAM = """
import sys, time
from mcore_rl.backend.watchdog import Limits, Watchdog

def never_returns():
    time.sleep(600)

def work_on(beats):
    for _ in range(beats):
        time.sleep(0.1)
        watchdog.begin("step")

limit_s = float(sys.argv[1]) or None
with Watchdog(Limits(start_s=limit_s, step_s=limit_s, pause_s=limit_s), 3) as watchdog:
    print("started", time.monotonic(), flush=True)
    work_on(int(sys.argv[2]))
    if sys.argv[3] == "hang":
        never_returns()
print("left", flush=True)
"""


def started(tmp_path: Path, limit_s: float, beats: int, end: str) -> "tuple[subprocess.Popen[str], float]":
    """The program, once it is inside of its watchdog, and the monotonic time at which it was."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(limit_s), str(beats), end],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {FAILURES: str(tmp_path)},
    )
    assert process.stdout is not None
    word, since_s = process.stdout.readline().split()
    assert word == "started"
    return process, float(since_s)


def test_a_process_that_hangs_says_where_and_ends_with_its_own_status(tmp_path: Path) -> None:
    process, since_s = started(tmp_path, LIMIT_S, 15, "hang")
    _, errors = process.communicate(timeout=300)
    assert process.returncode == HUNG_STATUS
    assert time.monotonic() - since_s > 1.4 + LIMIT_S, "beats were not heard"
    assert "never_returns" in errors and "Rank 3 finished nothing in 1 s" in errors
    cause = first_cause(tmp_path)
    assert (cause.rank, cause.status) == (3, HUNG_STATUS) and "never_returns" in cause.text
    assert cause.headline.startswith(f"rank 3 on {platform.node()} finished nothing in 1 s (train.hang_s)")


def test_a_process_that_beats_or_has_no_limit_leaves_well(tmp_path: Path) -> None:
    # A beat comes twenty times as often as it must: one of a busy machine may be late.
    beating, unlimited = started(tmp_path, 2 * LIMIT_S, 25, "leave"), started(tmp_path, 0.0, 2, "leave")
    for process, _ in (beating, unlimited):
        assert process.communicate(timeout=300)[0] == "left\n" and process.returncode == 0


def test_the_time_of_a_suspended_process_does_not_count(tmp_path: Path) -> None:
    process, _ = started(tmp_path, 2 * LIMIT_S, 5, "leave")
    process.send_signal(signal.SIGSTOP)
    time.sleep(3 * LIMIT_S)
    process.send_signal(signal.SIGCONT)
    assert process.communicate(timeout=300)[0] == "left\n" and process.returncode == 0


@pytest.mark.parametrize(
    ("phase", "longest_s", "limit_s", "setting"),
    [
        ("start", 0, 1800, "train.hang_start_s"),
        ("step", 0, 1800, "train.hang_start_s, for the first two steps"),
        ("step", 4, 300, 'train.hang_s="auto", the longest step before took 4.0 s'),
        ("step", 90, 900, 'train.hang_s="auto", the longest step before took 90.0 s'),
        ("pause", 4, 600, "train.hang_save_s"),
    ],
)
def test_each_phase_has_a_limit_and_that_of_a_step_follows_the_steps_before(
    phase: Phase, longest_s: float, limit_s: float, setting: str
) -> None:
    limits = Limits(start_s=1800, step_s="auto", pause_s=600)
    assert limits.of(phase, longest_s) == (limit_s, setting)


def test_a_pause_between_steps_is_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0, 10, 50, 100, 104, 200, 203])
    monkeypatch.setattr("mcore_rl.backend.watchdog.time.monotonic", lambda: next(times))
    watchdog = Watchdog(Limits(start_s=None, step_s="auto", pause_s=None), 0)
    # Steps from 10 to 50, in which kernels are compiled, from 100 to 104, and from 200 to 203 s.
    for phase in ("step", "pause", "step", "pause", "step", "pause"):
        watchdog.begin(phase)
    assert watchdog._longest_step_s == 4
