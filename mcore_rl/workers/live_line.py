"""A line at the bottom of the terminal that shows how far a run is, below the lines that rank 0 prints.

The process that started rank 0 draws it; rank 0 writes the text to the file LIVE_FILE, set only if there is a terminal.
"""

import codecs
import io
import os
import shutil
import threading
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, TextIO, cast

LIVE_FILE = "MCORE_RL_LIVE_FILE"
"""Environment variable with the file to which rank 0 writes the text of the line."""
CLEAR = b"\r\x1b[K"
"""Return to the first column and clear the line."""


def has_live_line() -> bool:
    """Return whether the process that started this rank shows a live line."""
    return LIVE_FILE in os.environ


def show_live_line(text: str) -> None:
    """Replace the text of the live line by `text`, one line; on a full disk the old text stays."""
    with suppress(OSError):
        Path(os.environ[LIVE_FILE]).write_text(text, encoding="utf-8")


def bytes_of(stream: TextIO) -> IO[bytes]:
    """Return where bytes for `stream` are written; a notebook's has text alone, which they become."""
    if hasattr(stream, "buffer"):
        return stream.buffer
    decoder = codecs.getincrementaldecoder("utf-8")("replace")

    class _Decoded(io.RawIOBase):
        def write(self, chunk: Any) -> int:
            return stream.write(decoder.decode(bytes(chunk)))

        def flush(self) -> None:
            stream.flush()

    return cast("IO[bytes]", _Decoded())


class LiveLine:
    """The live line, and the terminal's other lines above it. Several threads may write."""

    def __init__(self, console: IO[bytes], path: Path | None) -> None:
        """Prepare to draw the text in the file `path`; None if `console` is not a terminal: there is no line then."""
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
        """Write output of the run to `console` above the line. Raises OSError if the console is closed."""
        with self._lock:
            self._clear()
            console.write(chunk)
            console.flush()
            self._is_at_start = chunk.endswith(b"\n")
            self._draw()

    def poll(self) -> None:
        """Redraw the line if its text has changed."""
        if self.path is None:
            return
        # Rank 0 has written no text yet, or the terminal is closed.
        with suppress(OSError, ValueError):
            text = self.path.read_text(encoding="utf-8")
            with self._lock:
                if text and text != self._text:
                    self._text = text
                    self._clear()
                    self._draw()

    def close(self) -> None:
        """Clear the line until rank 0 writes another text."""
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
