"""A process that gets nowhere ends, and says where it was; one that is merely suspended does not."""

import os
import platform
import signal
import time
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.config.load import load_config
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.errors import HUNG_STATUS
from mcore_rl.storage.files import write_atomically
from mcore_rl.workers.failures import FAILURES, first_cause
from mcore_rl.workers.watchdog import Limits, Phase, Watchdog
from tests.ranks import forkserver

LIMIT_S = 1.0


def never_returns() -> None:
    time.sleep(600)


def work(limit_s: float | None, beats: int, hangs: bool, folder: Path) -> None:
    """The work of a rank under a watchdog; in `folder` it writes when it starts, what it logs, and that it left."""
    os.environ[FAILURES] = str(folder / "failures")
    errors = os.open(folder / "errors", os.O_WRONLY | os.O_CREAT)
    os.dup2(errors, 2)
    with Watchdog(Limits(start_s=limit_s, step_s=limit_s, pause_s=limit_s), 3) as watchdog:
        write_atomically(folder / "started", str(time.monotonic()))
        for _ in range(beats):
            time.sleep(0.1)
            watchdog.begin("step")
        if hangs:
            never_returns()
    (folder / "left").touch()


def started(folder: Path, *args: Any) -> tuple[ForkServerProcess, float]:
    """A process with that work, once it is inside of its watchdog, and the monotonic time at which it was."""
    folder.mkdir(exist_ok=True)
    process = forkserver().Process(target=work, args=(*args, folder))
    process.start()
    while not (folder / "started").exists():
        is_alive = process.is_alive()
        assert is_alive or (folder / "started").exists(), (folder / "errors").read_text()
        time.sleep(0.01)
    return process, float((folder / "started").read_text())


def status_of(process: ForkServerProcess) -> int | None:
    process.join(300)
    return process.exitcode


def test_a_process_that_hangs_says_where_and_ends_with_its_own_status(tmp_path: Path) -> None:
    process, since_s = started(tmp_path, LIMIT_S, 15, True)
    assert status_of(process) == HUNG_STATUS
    assert time.monotonic() - since_s > 1.4 + LIMIT_S, "beats were not heard"
    errors = (tmp_path / "errors").read_text()
    assert "never_returns" in errors and "Rank 3 finished nothing in 1 s" in errors
    cause = first_cause(tmp_path / "failures")
    assert (cause.rank, cause.status) == (3, HUNG_STATUS) and "never_returns" in cause.text
    assert cause.headline.startswith(f"rank 3 on {platform.node()} finished nothing in 1 s (train.hang_s)")


def test_a_process_that_beats_or_has_no_limit_leaves_well(tmp_path: Path) -> None:
    # A beat comes twenty times as often as it must: one of a busy machine may be late.
    folders = tmp_path / "beating", tmp_path / "unlimited"
    beating, _ = started(folders[0], 2 * LIMIT_S, 25, False)
    unlimited, _ = started(folders[1], None, 2, False)
    assert status_of(beating) == status_of(unlimited) == 0
    assert all((folder / "left").exists() for folder in folders)


def test_the_time_of_a_suspended_process_does_not_count(tmp_path: Path) -> None:
    process, _ = started(tmp_path, 2 * LIMIT_S, 5, False)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(3 * LIMIT_S)
    os.kill(process.pid, signal.SIGCONT)
    assert status_of(process) == 0 and (tmp_path / "left").exists()


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


def test_a_step_has_time_to_give_up_a_server() -> None:
    limits = Limits(start_s=600, step_s="auto", pause_s=600, wait_s=2460)
    assert [limits.of("step", longest_s)[0] for longest_s in (0, 4, 300)] == [2460, 2460, 3000]
    assert limits.of("start", 0)[0] == limits.of("pause", 4)[0] == 600
    assert Limits(start_s=None, step_s="auto", pause_s=600, wait_s=2460).of("step", 0)[0] is None
    served = load_config(RlRunConfig, None, ["rl.engine.kind=vllm", "rl.engine.count=2"])
    assert served.server_wait_s > served.served.request_timeout_s + served.served.update_timeout_s


def test_a_pause_between_steps_is_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0, 10, 50, 100, 104, 200, 203])
    monkeypatch.setattr("mcore_rl.workers.watchdog.time.monotonic", lambda: next(times))
    watchdog = Watchdog(Limits(start_s=None, step_s="auto", pause_s=None), 0)
    # Steps from 10 to 50, in which kernels are compiled, from 100 to 104, and from 200 to 203 s.
    for phase in ("step", "pause", "step", "pause", "step", "pause"):
        watchdog.begin(phase)
    assert watchdog._longest_step_s == 4
