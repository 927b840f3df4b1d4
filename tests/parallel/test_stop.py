"""A request to stop that reaches one rank ends all ranks after the same step."""

import os
import signal
from pathlib import Path

import pytest

from mcore_rl.train.stop import StopRequest
from tests.ranks import run_ranks


def steps_until_stopped(file: Path, signals: dict[int, tuple[int, int]]) -> tuple[int, str]:
    """On a rank: after which step it stopped, and why; `signals[rank]` is a signal and the step it comes in."""
    number, when = signals.get(int(os.environ["RANK"]), (0, -1))
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)
    step = 0
    with StopRequest(file) as stop:
        while not (reason := stop.agreed()):
            step += 1
            if step == when:
                if number:
                    os.kill(os.getpid(), number)
                else:
                    file.touch()
            assert step < 100
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)) == before
    return step, reason


@pytest.mark.parametrize(
    ("signals", "reason"),
    [
        ({1: (signal.SIGUSR1, 3)}, "SIGUSR1 came"),
        ({0: (signal.SIGTERM, 3)}, "SIGTERM came"),
        ({0: (signal.SIGTERM, 3), 1: (signal.SIGTERM, 3), 2: (signal.SIGTERM, 3)}, "SIGTERM came"),
        ({0: (0, 3)}, "STOP was made"),
    ],
    ids=["usr1-on-one", "term-on-rank-0", "term-on-all", "file"],
)
def test_all_ranks_stop_after_the_same_step(
    signals: dict[int, tuple[int, int]], reason: str, tmp_path: Path
) -> None:
    ranks = run_ranks(steps_until_stopped, 3, tmp_path / "STOP", signals)
    assert {step for step, _ in ranks} == {3}
    assert all(why.endswith(reason) for _, why in ranks)
