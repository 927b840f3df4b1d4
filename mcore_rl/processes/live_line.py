"""A line at the bottom of the terminal that shows how far a run is, below the lines that rank 0 prints.

Rank 0 writes into a pipe, so the process that started it draws the line: rank 0 gives it the text in a file, which it
has where there is a terminal alone.
"""

import os
import shutil
import threading
from contextlib import suppress
from pathlib import Path
from typing import IO

LIVE_FILE = "MCORE_RL_LIVE_FILE"
"""Environment variable with the file in which rank 0 gives the text of the line."""
CLEAR = b"\r\x1b[K"
"""Return to the first column, and clear the line."""


def has_live_line() -> bool:
    """Return whether the process that started this rank shows a live line."""
    return LIVE_FILE in os.environ


def show_live_line(text: str) -> None:
    """Show `text`, one line, in place of the text before; a full disk leaves that."""
    with suppress(OSError):
        Path(os.environ[LIVE_FILE]).write_text(text, encoding="utf-8")


class LiveLine:
    """The line, and the terminal's other lines above it. Several threads may write."""

    def __init__(self, console: IO[bytes], path: Path | None) -> None:
        """Prepare to draw.

        Args:
            console: The terminal.
            path: File with the text of the line; None: `console` is no terminal, and there is no line.
        """
        self.path = path
        self._console = console
        if path is not None:
            path.unlink(missing_ok=True)
        self._lock = threading.Lock()
        self._text = ""
        self._is_shown = False
        self._is_at_start = True
        """Whether the terminal's last line is complete, so that the live line may follow."""

    def write(self, console: IO[bytes], chunk: bytes) -> None:
        """Write output of the run to `console` above the line; OSError where the console is gone."""
        with self._lock:
            self._clear()
            console.write(chunk)
            console.flush()
            self._is_at_start = chunk.endswith(b"\n")
            self._draw()

    def poll(self) -> None:
        """Draw the line anew where its text has changed."""
        if self.path is None:
            return
        # Rank 0 has written no text yet, or the terminal is gone.
        with suppress(OSError, ValueError):
            text = self.path.read_text(encoding="utf-8")
            with self._lock:
                if text and text != self._text:
                    self._text = text
                    self._clear()
                    self._draw()

    def close(self) -> None:
        """Clear the line until rank 0 gives another text."""
        with self._lock, suppress(OSError):
            self._text = ""
            self._clear()
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    def _clear(self) -> None:
        if self._is_shown:
            self._console.write(CLEAR)
            self._console.flush()
            self._is_shown = False

    def _draw(self) -> None:
        # A line as wide as the terminal would make it scroll.
        shown = self._text[: shutil.get_terminal_size().columns - 1]
        if shown and self._is_at_start:
            self._console.write(CLEAR + shown.encode())
            self._console.flush()
            self._is_shown = True
