"""Requests to stop a run early. All ranks agree to stop after the same step."""

import signal
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch.distributed as dist

from mcore_rl.megatron.agree import world_max
from mcore_rl.workers.launcher import STOPPING, TRAINING, note_stage

BEFORE_TRAINING = (signal.SIGTERM, signal.SIGUSR1)
SIGNALS = (*BEFORE_TRAINING, signal.SIGINT)
FILE_FOUND = 1
"""Value that ranks exchange for the file; 0 means no request, and larger values are signal numbers."""

Handler = Callable[[int, FrameType | None], Any] | int | None


class StopRequest:
    """Context in which SIGTERM, SIGUSR1 and SIGINT are recorded as requests instead of ending the process; a file is a
    request too.

    SIGINT (Ctrl-C) is recorded only from the first step on: before it nothing can be lost, and the user is waiting.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._request = 0
        self._before: dict[signal.Signals, Handler] = {}
        self._is_training = False

    def __enter__(self) -> "StopRequest":
        for number in SIGNALS:
            self._before[number] = signal.getsignal(number)
        for number in BEFORE_TRAINING:
            signal.signal(number, self._record)
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def agreed(self) -> str | None:
        """Collective over the world, between steps: return why to stop, or None; the same on all ranks."""
        if not self._request and dist.get_rank() == 0 and self._file.exists():
            self._request = FILE_FOUND
        if not self._is_training:
            signal.signal(signal.SIGINT, self._record)
        request = world_max(self._request)
        if dist.get_rank() == 0 and (request or not self._is_training):
            # After the exchange every rank records signals.
            note_stage(STOPPING if request else TRAINING)
        self._is_training = True
        if request == FILE_FOUND:
            return f"{self._file} was made"
        return f"{signal.Signals(request).name} came" if request else None

    def _record(self, number: int, _: FrameType | None) -> None:
        self._request = number
