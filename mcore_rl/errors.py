"""The errors that are the user's to mend. Each message has the value, the expectation, and the remedy."""

import re
import signal
import sys
from collections.abc import Collection, Mapping
from types import MappingProxyType

REFUSED_STATUS = 2
HUNG_STATUS = 75
INTERRUPTED_STATUS = 130
PIPE_CLOSED_STATUS = 141

EXIT_STATUSES: Mapping[int, str] = MappingProxyType(
    {
        0: "the command did what it was asked for; a training: all steps are done, or a stop was asked for and the "
        "checkpoint is written",
        1: "a fault of the program or of the machine, with a traceback; of `convert verify` and `inspect --diff`: the "
        "checkpoints differ",
        REFUSED_STATUS: "arguments, config, data or checkpoint are wrong: the message has the remedy, and there is no "
        "traceback",
        HUNG_STATUS: "a rank hung: a step took longer than `train.hang_s`, or a start or save than its limit",
        INTERRUPTED_STATUS: "ended by Ctrl-C; a training has saved, unless it was starting or Ctrl-C came twice",
        PIPE_CLOSED_STATUS: "the reader of the output, such as `head`, ended first",
    }
)
"""Exit statuses of commands and ranks; 128 + n is the end by signal n. mcore_rl/launch/job.py has the statuses of
jobs.
"""


class McoreRlError(Exception):
    """Base of the errors below: printed without a traceback, exit status 2."""

    rank: int | None = None
    """Rank that met the error, where all ranks raise it together; None: the rank that raises it."""
    keys: Collection[str] = ()
    """Settings that are the mistake: without them, the other settings can still be read and checked."""


class ConfigError(McoreRlError):
    """A setting that is unknown, of the wrong type, or at odds with another."""


class DataError(McoreRlError):
    """Training data or a tokenizer that is missing, corrupt, or does not fit."""


class CheckpointError(McoreRlError):
    """A checkpoint that is missing, incomplete, foreign, or could not be written."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint with files that are missing, cut off, or changed since they were written."""


class TrainingError(McoreRlError):
    """A run that cannot go on, for example because its gradients stay infinite."""


class EngineError(McoreRlError):
    """A rollout engine that failed."""


class StoppedError(McoreRlError):
    """A wait for servers that ended because the run was asked to stop; nothing is wrong."""


class RoutingError(McoreRlError):
    """Routes of a replay that are missing, twice there, damaged, or different from the routers' choices."""


def after_echo(number: int = signal.SIGINT) -> str:
    """Return the beginning of a message after a signal: after Ctrl-C the terminal shows ^C, which ends its line."""
    return "\n" if number == signal.SIGINT and sys.stderr.isatty() else ""


def error_text(error: McoreRlError) -> str:
    """Return the text that the user reads instead of a traceback."""
    separator = "\n" if "\n" in str(error) else " "
    return f"{type(error).__name__}:{separator}{escaped(str(error))}"


CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
r"""Control characters but for newline and tab: with these a text could clear a terminal or set its title."""


def escaped(text: str) -> str:
    r"""Return a text of a model or of data for a terminal: its control characters as `\x1b`; newline and tab stay."""
    return CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)
