"""Failures of functions of the user's own, as records that can be counted, shown, and sent between processes."""

import traceback
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Literal, Self

MAX_TEXT = 2000
"""Characters of an error's text or of a reason that leave a worker; what is longer is cut in the middle."""
MAX_TRACEBACK = 8000
"""Characters of a traceback that leave a worker."""


@dataclass(frozen=True, slots=True)
class FailedScore:
    """Reason why a function, or an environment, gave no number."""

    kind: Literal["raised", "not_finite", "bad_steps", "bad_reply", "template", "timeout", "died"]
    text: str
    """One sentence: class and text of an exception, or what was returned or happened."""
    error: str = ""
    """Name of the exception's class; empty where none was raised."""
    traceback: str = ""
    """Traceback of the exception from the function on; empty where none was raised."""


class CaughtException:
    """Catches an exception of any kind inside: it comes from the user's code, and is counted."""

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
        """Return the failure that was caught, with its traceback from the first frame that is not of `own_file`."""
        error = self.error
        assert error is not None
        frames = error.__traceback__
        while frames is not None and _file(frames.tb_frame) == own_file:
            frames = frames.tb_next  # our own, above the function
        name = type(error).__name__
        text, shown = f"{name}, whose text cannot be made", ""
        with CaughtException():
            text = f"{name}: {error}"
            shown = "".join(traceback.format_exception(type(error), error, frames))
        return FailedScore("raised", cut(text, MAX_TEXT), error=name, traceback=cut(shown, MAX_TRACEBACK))


def cut(text: str, most: int) -> str:
    """Return `text`, or where it is longer than `most` characters its beginning, a note, and its end."""
    if len(text) <= most:
        return text
    end = most // 4
    return f"{text[: most - end]} … ({len(text) - most} characters cut) … {text[-end:]}"


def _file(frame: FrameType) -> str:
    return frame.f_code.co_filename
