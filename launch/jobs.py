"""`mcore-rl jobs`: how runs are doing, from Slurm and from what they leave in their folders."""

import argparse
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from launch import slurm
from launch.job import MEANING, STATUS
from launch.records import FOLDER, Submission, done, last_step, submissions, tail
from mcore_rl.errors import ConfigError

TAIL_BYTES = 1_000_000
"""Of metrics.jsonl: tables of the experts' load make long lines."""
LEVELS = 3
"""Folders of runs are looked for so deep."""
COLUMNS = ("run", "job", "state", "attempts", "step", "tokens/s/rank", "checkpoint", "age", "nodes", "why")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStatus:
    """What is known of a run."""

    run: str
    job: str
    state: str
    attempts: int
    """How often it was started."""
    step: float | None
    tokens_per_s_per_rank: float | None
    checkpoint: int | None
    """Step of the newest complete one."""
    age_s: float | None
    """Since the run last said something."""
    nodes: str
    why: str
    """Why it waits, or why its last attempt ended."""


def main(args: argparse.Namespace) -> int:
    """A line for each run."""
    runs = list(dict.fromkeys(run for path in args.runs for run in found_runs(path)))
    if not runs:
        told = ", ".join(map(str, args.runs))
        raise ConfigError(f"{told}: no run in it was launched. Name the run_dir of one, or a folder of them.")
    latest = {run: entry for run in runs if (entry := _latest(run)) is not None}
    queued = {}
    if slurm.has("squeue"):
        queued = slurm.in_queue(list(dict.fromkeys(entry.job for entry in latest.values())))
    else:
        sys.stderr.write("squeue is not on the PATH: states are as the runs' folders tell\n")
    rows = [_row(status_of(run, entry, queued)) for run, entry in latest.items()]
    sys.stdout.write("\n".join(table([COLUMNS, *rows])) + "\n")
    return 0


def found_runs(path: Path) -> Iterator[Path]:
    """The run at `path`, or those below it; of an array its elements."""
    for level in range(LEVELS + 1):
        pattern = "/".join(["*"] * level + [FOLDER, "*", "submission.json"])
        for file in sorted(path.glob(pattern)):
            run = file.parents[2]
            submitted = submissions(run)
            is_array = bool(submitted and submitted[-1].array)
            elements = [folder for folder in run.iterdir() if (folder / "attempts.jsonl").exists()]
            yield from (sorted(elements) if is_array else ()) or [run]


def status_of(run: Path, submission: Submission, queued: Mapping[str, slurm.QueuedJob]) -> RunStatus:
    """What Slurm (`queued`: what waits or runs) and the folder say of a run."""
    attempts = list(tail(run / "attempts.jsonl", TAIL_BYTES))
    if not submission.array:
        attempts = [entry for entry in attempts if str(entry.get("job")) == submission.job]
    newest_attempt = max((_number(entry, "attempt") or 0 for entry in attempts), default=0)
    # An orphan is heard of after the attempt that goes on without it.
    orphans = [entry for entry in attempts if entry.get("then") == "orphan"]
    attempts = [entry for entry in attempts if entry not in orphans or entry.get("attempt") == newest_attempt]
    metrics = list(tail(run / "metrics.jsonl", TAIL_BYTES))
    is_element = submission.array and run.name.isdecimal()
    name = f"{submission.job}_{run.name}" if is_element else submission.job
    job = queued.get(name) or (slurm.ended(name) if slurm.has("scontrol") else None)
    newest = max((_number(entry, "time") or 0 for entry in metrics[:1] + attempts[:1]), default=0)
    return RunStatus(
        run=str(run),
        job=name,
        state="DONE" if done(run) else (job.state if job else "ended"),
        attempts=sum(entry.get("event") == "start" for entry in attempts),
        step=_first(metrics, "step"),
        tokens_per_s_per_rank=_first(metrics, "train/tokens_per_s_per_rank"),
        checkpoint=last_step(run),
        age_s=datetime.now(UTC).timestamp() - newest if newest else None,
        nodes=(job.nodes if job else "") or str(attempts[0].get("nodes", "") if attempts else ""),
        why=_why(run, job, attempts),
    )


def _why(run: Path, job: slurm.QueuedJob | None, attempts: Sequence[dict[str, object]]) -> str:
    """Why it waits or has ended; how the attempt before ended, of a job that was requeued."""
    if said := done(run):
        return said
    told = [job.reason] if job and job.reason else []
    last = attempts[0] if attempts else {}
    if job and job.state == "RUNNING" and last.get("event") == "start":
        last = next((entry for entry in attempts if entry.get("event") == "end"), {})
        return f"before: {last['why']} at step {last.get('step')}" if last else ""
    if last.get("event") == "end":
        told.append(f"{last.get('why')}: {_consequence(str(last.get('then')))}")
    elif last.get("event") == "start" and not (job and job.is_alive):
        told.append("its last attempt said nothing more: see logs/latest")
    return "; ".join(told)


def _consequence(then: str) -> str:
    """What became of the job after an attempt, in words."""
    if then.isdecimal():
        return MEANING.get(int(then), f"status {then}")
    return {"requeue": "requeued", "orphan": MEANING[STATUS["cancelled"]]}.get(then, then)


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines with aligned columns, of which the last is as long as it is."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    return [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]).rstrip()
        for row in rows
    ]


def _row(status: RunStatus) -> tuple[str, ...]:
    speed = status.tokens_per_s_per_rank
    return (
        status.run,
        status.job,
        status.state,
        str(status.attempts),
        _shown(status.step),
        "-" if speed is None else f"{speed:,.0f}",
        _shown(status.checkpoint),
        "-" if status.age_s is None else _duration(status.age_s),
        status.nodes or "-",
        status.why,
    )


def _duration(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def _shown(number: float | None) -> str:
    return "-" if number is None else f"{number:g}"


def _latest(run: Path) -> Submission | None:
    """The last submission of a run; of an array's element that of the array."""
    found = submissions(run) or submissions(run.parent)
    return found[-1] if found else None


def _first(records: Iterable[dict[str, object]], key: str) -> float | None:
    return next((number for entry in records if (number := _number(entry, key)) is not None), None)


def _number(entry: dict[str, object], key: str) -> float | None:
    value = entry.get(key)
    return float(value) if isinstance(value, int | float) else None
