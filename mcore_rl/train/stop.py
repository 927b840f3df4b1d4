"""Being asked to end early, and all ranks ending after the same step."""

import signal
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch.distributed as dist

from mcore_rl.parallel.agree import world_max

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
FILE = 1
"""What the ranks exchange: nothing, the file, or a signal's number."""

Handler = Callable[[int, FrameType | None], Any] | int | None


class StopRequest:
    """While entered, SIGTERM and SIGUSR1 are remembered, not obeyed; a file says the same to all ranks."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._heard = 0
        self._before: dict[signal.Signals, Handler] = {}

    def __enter__(self) -> "StopRequest":
        for number in SIGNALS:
            self._before[number] = signal.signal(number, self._hear)
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def agreed(self) -> str | None:
        """Collective over the world, between steps: why to stop, the same on all ranks; None: go on."""
        if not self._heard and dist.get_rank() == 0 and self._file.exists():
            self._heard = FILE
        heard = world_max(self._heard)
        if heard == FILE:
            return f"{self._file} was made"
        return f"{signal.Signals(heard).name} came" if heard else None

    def _hear(self, number: int, _: FrameType | None) -> None:
        self._heard = number
