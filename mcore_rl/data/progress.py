"""Progress of a long job over files, on a terminal or in a log."""

import time
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

LOG_INTERVAL_S = 15.0
"""Seconds between two lines where there is no terminal to draw a bar on."""


class DocumentProgress:
    """A progress bar with MB/s, documents/s and the time that remains; without a terminal, a line now and then."""

    def __init__(self, console: Console, title: str) -> None:
        self._console = console
        self._title = title
        self._started = self._logged = time.monotonic()
        self._total = self._done = self._done_before = self._documents = 0
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            _Rates(self),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
            speed_estimate_period=120.0,
        )

    def begin(self, total_bytes: int, done_bytes: int) -> None:
        """Start drawing; `done_bytes` were done by an earlier run and do not count as speed."""
        self._started = self._logged = time.monotonic()
        self._total, self._done, self._done_before = total_bytes, done_bytes, done_bytes
        self._bar.add_task(self._title, total=total_bytes, completed=done_bytes)
        self._bar.start()

    def add(self, num_bytes: int, documents: int) -> None:
        """Advance by `num_bytes` and `documents`."""
        self._done += num_bytes
        self._documents += documents
        for task in self._bar.task_ids:
            self._bar.advance(task, num_bytes)
        if not self._console.is_terminal and time.monotonic() - self._logged > LOG_INTERVAL_S:
            self._logged = time.monotonic()
            left = (self._total - self._done) / max(self.bytes_per_s, 1.0)
            self._console.print(
                f"{self._title}: {self._done / max(self._total, 1):.1%}, {self.rates()}, {left:.0f} s left",
                soft_wrap=True,
            )

    @property
    def seconds(self) -> float:
        """Seconds since `begin`."""
        return time.monotonic() - self._started

    @property
    def bytes_per_s(self) -> float:
        """Bytes per second of this run."""
        return (self._done - self._done_before) / max(self.seconds, 1e-9)

    def rates(self) -> str:
        """Return MB/s and documents/s of this run as text."""
        return (
            f"{self.bytes_per_s / 1e6:.2f} MB/s, {self._documents / max(self.seconds, 1e-9):.0f} documents/s"
        )

    def __enter__(self) -> "DocumentProgress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()


class _Rates(ProgressColumn):
    def __init__(self, progress: DocumentProgress) -> None:
        super().__init__()
        self._progress = progress

    def render(self, task: Task) -> Text:
        """Return the speeds."""
        return Text(self._progress.rates())
