"""The one door to Slurm's commands. Their plain text is read: what `--json` writes differs between versions."""

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from mcore_rl.errors import McoreRlError

TIMEOUT_S = 20
SEPARATOR = "|"
ALIVE = {
    "PENDING",
    "CONFIGURING",
    "RUNNING",
    "COMPLETING",
    "STAGE_OUT",
    "SUSPENDED",
    "STOPPED",
    "SIGNALING",
    "REQUEUED",
    "REQUEUE_HOLD",
    "REQUEUE_FED",
    "RESIZING",
    "SPECIAL_EXIT",
}
"""States of a job that has not ended, or will start again."""


class SlurmError(McoreRlError):
    """A command of Slurm that is missing, refused, or does not answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QueuedJob:
    """What Slurm tells of a job."""

    job: str
    state: str
    """As RUNNING, PENDING, COMPLETED, FAILED, CANCELLED, TIMEOUT, NODE_FAIL."""
    reason: str = ""
    """Why it waits, or which status it ended with."""
    nodes: str = ""

    @property
    def is_alive(self) -> bool:
        """Whether it waits or runs."""
        return self.state in ALIVE


def has(command: str) -> bool:
    """Whether the command can be found."""
    return shutil.which(command) is not None


def submit(words: Sequence[str]) -> str:
    """The id of the job that `sbatch *words` makes."""
    answer = _ask(["sbatch", "--parsable", *words])
    return answer.strip().splitlines()[-1].partition(";")[0]  # id[;cluster]


def would_start(script: str) -> str:
    """What the controller says to a job script, without taking it: when and where it would start."""
    command = ["sbatch", "--test-only"]
    return " ".join(_run(command, script).stderr.split())


def cancel(job: str) -> None:
    """End a job that waits or runs."""
    _ask(["scancel", job])


def in_queue(jobs: Sequence[str]) -> dict[str, QueuedJob]:
    """The jobs among `jobs` that wait or run, by id; of an array also its elements that Slurm lists, as 12_3."""
    if not jobs:
        return {}
    layout = SEPARATOR.join(("%F", "%K", "%T", "%r", "%N"))
    command = ["squeue", "--noheader", "--format", layout, "--jobs", ",".join(jobs)]
    try:
        answer = _ask(command)
    except SlurmError as error:
        if "Invalid job id" in str(error):  # none of them is known any more
            return {}
        raise
    found: dict[str, QueuedJob] = {}
    for line in answer.splitlines():
        job, element, state, reason, nodes = (line.split(SEPARATOR) + [""] * 5)[:5]
        for key in (job, f"{job}_{element}"):
            # Of an array or a heterogeneous job as a whole: it runs when a part of it does.
            if key not in found or state == "RUNNING":
                told = reason if state == "PENDING" else ""
                found[key] = QueuedJob(job=key, state=state, reason=told, nodes=nodes)
    return found


def ended(job: str) -> QueuedJob | None:
    """What is remembered of a job that is not in the queue: by accounting, else by the controller for some minutes."""
    return _of_accounting(job) or _of_controller(job)


def _of_accounting(job: str) -> QueuedJob | None:
    """The last of the job's starts; None without accounting."""
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


def _of_controller(job: str) -> QueuedJob | None:
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


def _status(text: str) -> str:
    """Slurm's `status:signal` in words; nothing for 0:0."""
    status, _, number = text.partition(":")
    if number not in ("", "0"):
        return f"signal {number}"
    return f"status {status}" if status not in ("", "0") else ""


def _ask(command: Sequence[str]) -> str:
    """What the command writes."""
    return _run(command).stdout


def _run(command: Sequence[str], text: str | None = None) -> "subprocess.CompletedProcess[str]":
    """The command has succeeded; SlurmError with its own words when not. `text` is its standard input."""
    if not has(command[0]):
        raise SlurmError(
            f"{command[0]} is not on the PATH: this machine has no Slurm, or its module is not loaded."
        )
    try:
        done = subprocess.run(
            command,
            input=text,
            stdin=subprocess.DEVNULL if text is None else None,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise SlurmError(f"{command[0]} has not answered for {TIMEOUT_S} s. Try again later.") from None
    if done.returncode:
        told = " ".join(done.stderr.split()) or f"status {done.returncode}"
        raise SlurmError(f"{command[0]} refused: {told}")
    return done
