"""Causes of a run's failure: each rank that knows a cause writes a file, and the first of the gravest is the run's.

The files are `<order>-<time>-<rank>.json` in a folder that all ranks see, so that the first name in alphabetical order
is the first cause; `publish` copies it to failure.json next to that folder. Imports no torch: launchers use it.
"""

import json
import os
import platform
import signal
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import IntEnum
from pathlib import Path

from mcore_rl.storage import files

FAILURES = "MCORE_RL_FAILURES"
"""Environment variable with the folder of the causes; unset: they are not collected."""
HEADLINE_LENGTH = 500
VERBS = ("was ", "is gone ", "gives no ", "finished ", "ended ")
"""Beginnings of causes that form a sentence with the rank as its subject; other causes are an error's own text."""
GIB = 2**30


class Order(IntEnum):
    """Rank of a kind of cause: a cause with a smaller value explains causes with larger values."""

    CAUSE = 0
    """An error of the rank's own, or a signal that ended it. Among these the earliest is the cause."""
    CONSEQUENCE = 1
    """A hang, a silence, SIGABRT: often because of another rank, as NCCL aborts a rank that has lost its peer."""
    LOST_PEER = 2
    """An error of communication: a rank on the other end is gone."""
    STATUS = 3
    """An exit status without a message, such as a rank's that gave way to another."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """A rank's cause for the end of its run."""

    headline: str
    """A line that names rank, host and cause; the same in the job's log, `mcore-rl jobs` and the report."""
    rank: int
    host: str
    status: int
    """Exit status of the rank; 128 + the number of the signal that ended it."""
    order: int
    text: str
    """Traceback or message; its first line is the headline's cause."""


def rank_failure(
    rank: int, status: int, cause: str, text: str = "", order: Order = Order.CAUSE, host: str = ""
) -> Failure:
    """Return the failure of a rank of this host (or of `host`), with its cause on a single line."""
    host = host or platform.node()
    line = " ".join(cause.split())
    line = line if len(line) <= HEADLINE_LENGTH else line[: HEADLINE_LENGTH - 3] + "..."
    limit = files.limit_reached(f"{cause}\n{text}")
    headline = f"rank {rank} on {host}{' ' if cause.startswith(VERBS) else ': '}{line}{limit}"
    return Failure(headline=headline, rank=rank, host=host, status=status, order=int(order), text=text or cause)


def rank_death(rank: int, number: int, oom: "OomKills | None" = None, output: str = "") -> Failure:
    """Return the failure of a rank that signal `number` ended; `oom` has counted kills since it was made."""
    reason = oom.explain() if oom is not None and number == signal.SIGKILL else ""
    order = Order.CONSEQUENCE if number == signal.SIGABRT else Order.CAUSE
    return rank_failure(rank, 128 + number, f"was killed by {signal_name(number)}{reason}", output, order)


def signal_name(number: int) -> str:
    """Return the name of a signal, such as SIGKILL for 9; its number for a real-time signal, which has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def note_failure(failure: Failure, folder: Path | None = None) -> Path | None:
    """Write the cause to `folder` (by default the launcher's) and return the file; None if causes are not collected, or
    nothing can be written: the headline then goes to stderr.
    """
    folder = folder or collected_in()
    if folder is None:
        return None
    path = folder / f"{failure.order}-{time.time():.6f}-{failure.rank}.json"
    # Keys on lines of their own, the headline first: the job script reads it with sed.
    content = json.dumps(asdict(failure), indent=1, ensure_ascii=False) + "\n"
    with suppress(OSError):
        path.parent.mkdir(exist_ok=True)  # no parents: a run's folder that was renamed is not made anew
        try:
            files.write_atomically(path, content)
        except OSError as error:
            if error.errno not in files.FULL:
                raise
            (folder.parent / files.RESERVE_FILE).unlink(missing_ok=True)
            files.write_atomically(path, content)
        return path
    # The launcher's script finds it in the log of the node, which may still be writable if the folder is not.
    sys.stderr.write(f"{files.UNWRITTEN} {path.stem}: {failure.headline}\n")
    sys.stderr.flush()
    return None


def make_reserve(folder: Path) -> None:
    """Reserve room next to `folder` that `note_failure` frees if the disk is full, so that the cause can be written."""
    reserve = folder.parent / files.RESERVE_FILE
    try:
        reserve.write_bytes(bytes(files.RESERVE_BYTES))
    except OSError:  # the disk is nearly full: what room is left is for the run's own files
        with suppress(OSError):
            reserve.unlink(missing_ok=True)


def has_noted(rank: int, folder: Path | None = None) -> bool:
    """Return whether `rank` has written a cause to `folder`, by default the launcher's folder."""
    folder = folder or collected_in()
    return folder is not None and any(folder.glob(f"[0-9]-*-{rank}.json"))


def first_cause(folder: Path) -> Failure | None:
    """Return the first of the gravest causes that ranks have written; None if there is none."""
    for path in sorted(folder.glob("[0-9]-*.json")):
        with suppress(OSError, ValueError, TypeError):  # withdrawn, or torn by a full disk
            return Failure(**json.loads(path.read_text(encoding="utf-8")))
    return None


def publish(folder: Path) -> None:
    """Copy the first cause to failure.json next to `folder`."""
    if cause := first_cause(folder):
        files.write_atomically(folder.parent / "failure.json", json.dumps(asdict(cause), indent=1, ensure_ascii=False))


def note_writer() -> None:
    """Record that this attempt writes to the run's folder: from now on its failures are the run's."""
    if folder := collected_in():
        (folder.parent / files.NOT_WRITER).unlink(missing_ok=True)


def collected_in() -> Path | None:
    """Return the folder in which the launcher collects causes of this attempt; None if it does not."""
    folder = os.environ.get(FAILURES)
    return Path(folder) if folder else None


class OomKills:
    """Count of the processes in this process's cgroup that the kernel's out-of-memory killer has ended from now on."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._file, self._limit = _memory_files(root)
        self._before = self._count()

    def explain(self) -> str:
        """Return the end of a sentence about a process that was killed: empty if memory was not the reason."""
        if self._count() <= self._before:
            return ""
        most = ""
        with suppress(OSError, ValueError):  # `max` is no number
            limit = int(self._limit.read_text(encoding="ascii"))
            if limit < 1 << 60:  # cgroup v1's largest number means no limit
                most = f"the cgroup's limit is {limit / GIB:.1f} GiB, "
        return f", out of memory ({most}oom_kill in {self._file})"

    def _count(self) -> int:
        with suppress(OSError, ValueError):
            for line in self._file.read_text(encoding="ascii").splitlines():
                name, _, value = line.partition(" ")
                if name == "oom_kill":
                    return int(value)
        return 0


def _memory_files(root: Path) -> tuple[Path, Path]:
    """Return the files with this cgroup's out-of-memory kills and its limit (v2, v1), or the whole machine's."""
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                folder, events, limit = root / "sys/fs/cgroup", "memory.events", "memory.max"
            elif "memory" in controllers.split(","):
                folder, events, limit = root / "sys/fs/cgroup/memory", "memory.oom_control", "memory.limit_in_bytes"
            else:
                continue
            folder /= path.lstrip("/")
            if (folder / events).exists():
                return folder / events, folder / limit
    return root / "proc/vmstat", root / "nowhere"
