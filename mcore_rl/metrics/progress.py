"""Progress of a job over files: a bar with bytes and the time that remains, and a line of JSON for each event."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

LOG_INTERVAL_S = 15.0
"""Seconds between two lines where there is no terminal to draw a bar on."""


class ByteProgress:
    """A bar on a terminal, elsewhere a line every LOG_INTERVAL_S; `log` gets every event as a line of JSON."""

    def __init__(self, console: Console, log: Path | None = None) -> None:
        self._console = console
        self._log: TextIO | None = log.open("a", encoding="utf-8") if log else None
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
            speed_estimate_period=120.0,
        )
        self._title = ""
        self._total = self._done = self._before = 0
        self._started = self._last_line = time.monotonic()

    def begin(self, title: str, total_bytes: int, done_bytes: int) -> None:
        """Start drawing; `done_bytes` were done by an earlier run and do not count as speed."""
        self._title, self._total, self._done, self._before = title, total_bytes, done_bytes, done_bytes
        self._started = self._last_line = time.monotonic()
        self._bar.add_task(title, total=total_bytes, completed=done_bytes)
        self._bar.start()
        self.event("begin", title=title, total_bytes=total_bytes, done_bytes=done_bytes)

    def add(self, num_bytes: int, fields: Mapping[str, Any] = MappingProxyType({})) -> None:
        """Count bytes that have been done; `fields` go into the log with them."""
        self._done += num_bytes
        for task in self._bar.task_ids:
            self._bar.advance(task, num_bytes)
        self.event("task", done_bytes=self._done, total_bytes=self._total, seconds=round(self.seconds, 3), **fields)
        if not self._console.is_terminal and time.monotonic() - self._last_line > LOG_INTERVAL_S:
            self._last_line = time.monotonic()
            speed = self.bytes_per_s
            self._console.print(
                f"{self._title}: {readable_bytes(self._done)} of {readable_bytes(self._total)}, "
                f"{speed / 2**20:.0f} MiB/s, {(self._total - self._done) / max(speed, 1.0):.0f} s left",
                soft_wrap=True,
                highlight=False,
            )

    def message(self, line: str) -> None:
        """Print a line for people."""
        self._console.print(line, soft_wrap=True, highlight=False, markup=False)

    def event(self, kind: str, **fields: Any) -> None:
        """Append a line for programs to the log."""
        if self._log:
            self._log.write(json.dumps({"event": kind, "time": time.time(), **fields}) + "\n")
            self._log.flush()

    @property
    def seconds(self) -> float:
        """Seconds since `begin`."""
        return time.monotonic() - self._started

    @property
    def bytes_per_s(self) -> float:
        """Bytes per second since `begin`."""
        return (self._done - self._before) / max(self.seconds, 1e-9)

    def __enter__(self) -> "ByteProgress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
        if error is not None:
            self.event("error", message=str(error))
        if self._log:
            self._log.close()


def readable_bytes(num_bytes: float) -> str:
    """Return a number of bytes with its unit, such as `1.50 GiB`."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "bytes" else f"{num_bytes:.2f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.2f} TiB"
