"""Failures of user-defined functions, as records that can be counted, shown, and sent between processes."""

import traceback
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Literal, Self

MAX_TEXT = 2000
"""Longest error text or reason that a worker sends, in characters; longer text is cut in the middle."""
MAX_TRACEBACK = 8000
"""Longest traceback that a worker sends, in characters."""


@dataclass(frozen=True, slots=True)
class FailedScore:
    """Reason why a function or environment returned no usable number."""

    kind: Literal["raised", "not_finite", "bad_steps", "bad_reply", "template", "timeout", "died"]
    text: str
    """One sentence: class and text of the exception, or a description of the problem."""
    error: str = ""
    """Class name of the exception; empty if none was raised."""
    traceback: str = ""
    """Traceback, starting at the user's function; empty if no exception was raised."""


class CaughtException:
    """Context that catches any `Exception` from the user's code inside, to be counted as a failure."""

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        self.error = error
        return isinstance(error, Exception)

    def failure(self, own_file: str) -> FailedScore:
        """Return the caught failure, with its traceback from the first frame outside `own_file`."""
        error = self.error
        assert error is not None
        frames = error.__traceback__
        while frames is not None and _file(frames.tb_frame) == own_file:
            frames = frames.tb_next  # our own frames, above the user's function
        name = type(error).__name__
        text, shown = f"{name}, whose text cannot be made", ""
        with CaughtException():
            text = f"{name}: {error}"
            shown = "".join(traceback.format_exception(type(error), error, frames))
        return FailedScore("raised", cut(text, MAX_TEXT), error=name, traceback=cut(shown, MAX_TRACEBACK))


def cut(text: str, most: int) -> str:
    """Return `text`; if longer than `most` characters, its beginning, a note, and its end."""
    if len(text) <= most:
        return text
    end = most // 4
    return f"{text[: most - end]} … ({len(text) - most} characters cut) … {text[-end:]}"


def _file(frame: FrameType) -> str:
    return frame.f_code.co_filename
