"""The only file that runs Slurm's commands. It parses their plain text: what `--json` writes differs by version."""

import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_rl.errors import McoreRlError

TIMEOUT_S = 20
OF_A_JOB = re.compile("SRUN_|SLURM_(?!CONF|CLUSTERS|JWT)")
"""Beginnings of the names of environment variables of jobs and steps; the others are of the client programs."""
SEPARATOR = "|"
UNOPENED = "53"
"""The signal that Slurm records for a job that it could not start because its log could not be opened."""
STATES: dict[str, Any] = tomllib.loads(Path(__file__).with_name("states.toml").read_text(encoding="utf-8"))
ALIVE: list[str] = STATES["alive"]
"""States of a job that has not ended, or will start again."""
UNREACHABLE: list[str] = STATES["unreachable"]
"""Parts of the messages of Slurm's commands when no controller answers; all else is a controller's answer."""


class SlurmError(McoreRlError):
    """A command of Slurm is missing, was refused, or does not answer."""


class SlurmUnreachableError(SlurmError):
    """No controller answers: Slurm's programs are installed, but the cluster is down, elsewhere, or not set up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QueuedJob:
    """State of a job in Slurm."""

    job: str
    state: str
    """State in Slurm's words: RUNNING, PENDING, COMPLETED, FAILED, CANCELLED, TIMEOUT, NODE_FAIL."""
    reason: str = ""
    """Reason for which it waits, or status with which it ended."""
    nodes: str = ""

    @property
    def is_alive(self) -> bool:
        """Whether the job waits or runs."""
        return self.state in ALIVE

    def describe(self) -> str:
        """Return the state, with the reason for which the job waits."""
        return f"{self.state} ({self.reason})" if self.reason else self.state


def environment() -> dict[str, str]:
    """Return the environment without this job's or step's variables: a new job's srun takes options from them."""
    return {name: value for name, value in os.environ.items() if not OF_A_JOB.match(name)}


def has(command: str) -> bool:
    """Return whether the command is on the PATH."""
    return shutil.which(command) is not None


def submit(arguments: Sequence[str]) -> str:
    """Submit a job with `sbatch *arguments` and return its id."""
    answer = _ask(["sbatch", "--parsable", *arguments])
    return answer.strip().splitlines()[-1].partition(";")[0]  # id[;cluster]


def would_start(script: str) -> str:
    """Return the controller's answer to a job script that is not submitted: when and where it would start."""
    command = ["sbatch", "--test-only"]
    return " ".join(_run(command, script).stderr.split())


def cancel(job: str) -> None:
    """End a job that waits or runs."""
    _ask(["scancel", job])


def in_queue(jobs: Sequence[str], timeout_s: float = TIMEOUT_S) -> dict[str, QueuedJob]:
    """Return the jobs among `jobs` that wait or run, by id; also elements of arrays that Slurm lists, as 12_3."""
    if not jobs:
        return {}
    layout = SEPARATOR.join(("%F", "%K", "%T", "%r", "%N"))
    command = ["squeue", "--noheader", "--format", layout, "--jobs", ",".join(jobs)]
    try:
        answer = _run(command, timeout_s=timeout_s).stdout
    except SlurmError as error:
        if "Invalid job id" in str(error):  # none of them is known any more
            return {}
        raise
    found: dict[str, QueuedJob] = {}
    for line in answer.splitlines():
        job, element, state, reason, nodes = (line.split(SEPARATOR) + [""] * 5)[:5]
        for key in (job, f"{job}_{element}"):
            # An array or a heterogeneous job as a whole runs when a part of it does.
            if key not in found or state == "RUNNING":
                why = reason if state == "PENDING" else ""
                if re.search("hold|held", f"{state} {reason}", re.IGNORECASE):
                    by = " by an administrator" if "Admin" in reason else ""
                    why = f"{reason or state}: held until `scontrol release {job}`{by}"
                found[key] = QueuedJob(job=key, state=state, reason=why, nodes=nodes)
    return found


def ended(job: str) -> QueuedJob | None:
    """Return the state of a job that has left the queue, from accounting, else from the controller for some minutes."""
    return _from_accounting(job) or _from_controller(job)


def _from_accounting(job: str) -> QueuedJob | None:
    if not has("sacct"):
        return None
    fields = "JobID,State,ExitCode,NodeList"
    command = ["sacct", "--allocations", "--noheader", "--parsable2", "--duplicates", "--jobs", job]
    try:
        answer = _ask([*command, "--format", fields])
    except SlurmError:
        return None  # no accounting on this cluster
    lines = [line.split(SEPARATOR) for line in answer.splitlines() if line.count(SEPARATOR) == 3]
    starts = [line for line in lines if line[0] in (job, f"{job}+0")]  # not a heterogeneous job's other parts
    if not starts:
        return None
    _, state, status, nodes = starts[-1]
    return QueuedJob(
        job=job,
        state=state.split()[0] if state else "",
        reason=_status(status) + (" by its user" if state.startswith("CANCELLED by") else ""),
        nodes=nodes,
    )


def _from_controller(job: str) -> QueuedJob | None:
    try:
        answer = _ask(["scontrol", "--oneliner", "show", "job", job])
    except SlurmError:
        return None  # forgotten
    fields = dict(word.split("=", 1) for word in answer.split() if "=" in word)
    return QueuedJob(
        job=job,
        state=fields.get("JobState", ""),
        reason=_status(fields.get("ExitCode", "")),
        nodes=fields.get("NodeList", ""),
    )


def script_of(job: str) -> Path | None:
    """Return the script that a job was submitted with; None when the controller has forgotten the job."""
    try:
        answer = _ask(["scontrol", "--oneliner", "show", "job", job])
    except SlurmUnreachableError:
        raise
    except SlurmError:
        return None
    match = re.search(r" Command=(.*?) WorkDir=", answer)
    return Path(match[1]) if match else None


def _status(text: str) -> str:
    status, _, number = text.partition(":")
    if number == UNOPENED:
        return f"signal {number}: Slurm could not open the job's log, whose folder was gone or could not be written"
    if number not in ("", "0"):
        return f"signal {number}"
    return f"status {status}" if status not in ("", "0") else ""


def _ask(command: Sequence[str]) -> str:
    return _run(command).stdout


def _run(
    command: Sequence[str], text: str | None = None, timeout_s: float = TIMEOUT_S
) -> "subprocess.CompletedProcess[str]":
    if not has(command[0]):
        raise SlurmError(f"{command[0]} is not on the PATH: this machine has no Slurm, or its module is not loaded.")
    try:
        done = subprocess.run(
            command,
            input=text,
            stdin=subprocess.DEVNULL if text is None else None,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
            env=environment(),
        )
    except subprocess.TimeoutExpired:
        raise SlurmUnreachableError(f"{command[0]} has not answered for {timeout_s:g} s. Try again later.") from None
    if done.returncode:
        message = " ".join(done.stderr.split()) or f"status {done.returncode}"
        if any(part.lower() in message.lower() for part in UNREACHABLE):
            raise SlurmUnreachableError(f"{command[0]} reached no controller: {message}")
        raise SlurmError(f"{command[0]} refused: {message}")
    return done
