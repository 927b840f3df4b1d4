"""A forked call: its result, its errors, and that it sees the past and ends with its parent."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch

from mcore_rl.errors import CheckpointError
from mcore_rl.workers.forked_call import ForkedCall, ForkedCallError
from mcore_rl.workers.forked_rank import STOP_SIGNALS
from tests.forked import is_gone, wait_for


def test_the_call_sees_memory_as_it_was() -> None:
    weights = torch.arange(4.0)
    read_end, write_end = os.pipe()

    def late_sum() -> float:
        os.read(read_end, 1)
        return float(weights.sum())

    call = ForkedCall(late_sum)
    weights.zero_()
    assert call.is_running()
    os.write(write_end, b"x")
    assert call.result() == 6.0
    assert not call.is_running()


def test_a_result_larger_than_a_pipe_comes_back_whole() -> None:
    call = ForkedCall(lambda: list(range(300_000)))
    while call.is_running():
        time.sleep(0.01)
    assert call.result() == list(range(300_000))


def test_our_errors_are_raised_as_they_are_and_others_and_a_kill_are_reported() -> None:
    def raising(error: Exception) -> Callable[[], None]:
        def fail() -> None:
            raise error

        return fail

    with pytest.raises(CheckpointError, match=r"^the disk is full$"):
        ForkedCall(raising(CheckpointError("the disk is full"))).result()
    with pytest.raises(ForkedCallError, match=r"^ZeroDivisionError: of nothing$"):
        ForkedCall(raising(ZeroDivisionError("of nothing"))).result()
    with pytest.raises(ForkedCallError, match="ended by SIGKILL"):
        ForkedCall(lambda: os.kill(os.getpid(), signal.SIGKILL)).result()


def test_requests_to_stop_do_not_end_it() -> None:
    def survive() -> str:
        for number in STOP_SIGNALS:
            os.kill(os.getpid(), number)
        return "alive"

    assert ForkedCall(survive).result() == "alive"


def test_it_ends_with_its_parent(tmp_path: Path) -> None:
    def parent() -> None:
        ForkedCall(lambda: time.sleep(600))
        (child,) = psutil.Process().children()
        (tmp_path / "pid").write_text(str(child.pid))
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(ForkedCallError):
        ForkedCall(parent).result()
    pid = int((tmp_path / "pid").read_text())
    wait_for(lambda: is_gone(pid))
