"""A training program that is stopped before a call: PROGRAM HOW.PHASE.COUNT, then the program's words.

HOW is a signal that each of several ranks sends to itself, before the same call, or one of HOWS, or a file that is made
then; so it never depends on time where a run ends.
"""

import importlib
import itertools
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch.distributed as dist

from mcore_rl.programs import open_run
from mcore_rl.rl.engines.native.decoder import Decoder
from mcore_rl.rl.engines.vllm_api import VllmApi
from mcore_rl.rl.models import critic
from mcore_rl.rl.step import learner
from mcore_rl.storage.checkpoints import write
from mcore_rl.train import loop
from mcore_rl.workers.launcher import rank_of_launcher

CALLED_IN: dict[str, tuple[Any, str]] = {
    "start": (open_run, "set_up"),
    "step": (loop, "train_step"),
    "rollout": (Decoder, "step"),
    "push": (VllmApi, "load"),
    "critic": (critic, "compute_gradients"),
    "update": (learner, "compute_gradients"),
    # All shards are written, and the checkpoint has no name yet.
    "save": (write, "finish"),
}
"""Phase -> what it calls; the run is stopped before the call of this count, from 1."""


def lose_rank_1() -> None:
    """Kill rank 1 alone; another one goes on, until it hears of it."""
    if rank_of_launcher() == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def ask_launcher() -> None:
    """Have rank 0 send SIGTERM to the launcher, and every rank wait until the launcher has passed it on."""
    before, came = signal.getsignal(signal.SIGTERM), []

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)
        assert callable(before)
        before(number, frame)

    signal.signal(signal.SIGTERM, note)
    # A rank that is asked before it has come here would wait for ever for a second time.
    dist.barrier()
    if rank_of_launcher() == 0:
        os.kill(os.getppid(), signal.SIGTERM)
    while not came:
        time.sleep(0.01)


def hang() -> None:
    time.sleep(600)


HOWS: dict[str, Callable[[], None]] = {"lose_rank_1": lose_rank_1, "ask_launcher": ask_launcher, "hang": hang}


def main(argv: Sequence[str]) -> int:
    program, when, *words = argv
    how, phase, count = when.rsplit(".", 2)
    owner, function = CALLED_IN[phase]
    whole, calls = getattr(owner, function), itertools.count(1)

    def stop_and_call(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == int(count):
            if how in HOWS:
                HOWS[how]()
            elif how in signal.Signals.__members__:
                os.kill(os.getpid(), signal.Signals[how])
            else:
                Path(how).touch()
        return whole(*args, **kwargs)

    with mock.patch.object(owner, function, stop_and_call):
        return int(importlib.import_module(f"mcore_rl.programs.{program}").main(words))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
