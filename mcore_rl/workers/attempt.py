"""The identity of a process: its job, the attempt of that job, its host and its pid there."""

import os
import platform
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """A start of a job."""

    job: str
    """Slurm's job id; empty without Slurm."""
    number: int
    """Number of restarts of the job before this run."""
    host: str
    pid: int
    born: int
    """Start of the process in the kernel's ticks since boot, because a pid may be used again."""

    def is_alive_here(self) -> bool:
        """Return whether the process runs on this host; False for another host, about which nothing is known."""
        return self.host == platform.node() and _birth(self.pid) == self.born

    def supersedes(self, other: "Attempt") -> bool:
        """Return whether this is a later start of the same job: Slurm has ended the other run, or will."""
        return bool(self.job) and self.job == other.job and self.number > other.number

    def describe(self) -> str:
        """Return the attempt in words, for messages."""
        job = f"job {self.job} attempt {self.number}, " if self.job else ""
        return f"{job}process {self.pid} on {self.host}"


def this_attempt() -> Attempt:
    """Return the attempt that this process belongs to."""
    pid = os.getpid()
    born = _birth(pid)
    assert born is not None
    return Attempt(
        job=os.environ.get("SLURM_JOB_ID", ""),
        number=int(os.environ.get("SLURM_RESTART_COUNT") or 0),
        host=platform.node(),
        pid=pid,
        born=born,
    )


def _birth(pid: int) -> int | None:
    # Field 22 of /proc/<pid>/stat; None also for a process that is only a zombie.
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    state, *fields = text.rpartition(")")[2].split()  # the name before may hold spaces and parentheses
    return None if state in "ZX" else int(fields[18])
