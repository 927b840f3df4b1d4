"""`mcore_rl.run.rl` that kills itself with SIGKILL in the middle of a phase: PHASE.COUNT, then the program's words."""

import itertools
import os
import signal
from collections.abc import Sequence
from typing import Any
from unittest import mock

from mcore_rl.rl import critic
from mcore_rl.rl.engines.native.decoder import Decoder
from mcore_rl.run import rl
from mcore_rl.train import saving

CALLED_IN: dict[str, tuple[Any, str]] = {
    "rollout": (Decoder, "step"),
    "critic": (critic, "train_step"),
    # All shards are written, and the checkpoint has no name yet.
    "save": (saving, "finish"),
}
"""Phase -> what it calls, one of whose calls is not made."""


def main(argv: Sequence[str]) -> int:
    """Run the program until the phase makes its call of this number, counted from 1."""
    phase, _, count = argv[0].partition(".")
    owner, name = CALLED_IN[phase]
    whole, calls = getattr(owner, name), itertools.count(1)

    def call_or_end(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == int(count):
            os.kill(os.getpid(), signal.SIGKILL)
        return whole(*args, **kwargs)

    with mock.patch.object(owner, name, call_or_end):
        return rl.main(argv[1:])
