"""`mcore-rl jobs`: state of launched runs, from Slurm and from the files in their folders."""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from mcore_rl.errors import ConfigError, DataError, escaped
from mcore_rl.launch import records, slurm
from mcore_rl.launch.job import MEANING, STATUS
from mcore_rl.storage.files import run_errors_explained

TAIL_BYTES = 1_000_000
"""Size of the end of metrics.jsonl that is read; tables of the experts' load are long lines."""
SLURM_S = 5.0
"""Time in which Slurm must answer; the folders are shown without it."""
LEVELS = 3
"""Depth to which folders are searched for runs."""
NOT_STARTED = "not started"
"""First words on a job that never ran because a stage before it failed."""
CONSEQUENCES = {
    "requeue": "requeued",
    "restart": "started again within its allocation",
    "orphan": MEANING[STATUS["cancelled"]],
}
"""Value of `then` at the end of an attempt -> its meaning for a user; exit statuses have theirs in MEANING."""
COLUMNS = ("run", "job", "state", "attempts", "step", "tokens/s/rank", "checkpoint", "age", "nodes", "why")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStatus:
    """State of one run."""

    run: str
    job: str
    state: str
    attempts: int
    step: float | None
    tokens_per_s_per_rank: float | None
    checkpoint: int | None
    """Step of the newest complete checkpoint."""
    age_s: float | None
    """Seconds since the run last wrote a record."""
    nodes: str
    why: str
    """Reason for which it waits, or for which its last attempt ended."""


def main(args: argparse.Namespace) -> int:
    """Print a line for each run."""
    runs: list[Path] = []
    for path in args.runs:
        with run_errors_explained(path):
            runs += [run for run in found_runs(path) if run not in runs]
    if not runs:
        folders = ", ".join(map(str, args.runs))
        raise ConfigError(f"{folders}: no run in it was launched. Name the run_dir of one, or a folder of them.")
    # An element of an array has the array's submissions.
    latest = {run: found[-1] for run in runs if (found := records.submissions(run) or records.submissions(run.parent))}
    for run in (run for run in runs if run not in latest):
        sys.stderr.write(
            f"{run} is left out: no submission.json below its {records.FOLDER}/ can be read. Its job goes on; squeue "
            "has it.\n"
        )
    queued = None
    try:
        queued = slurm.in_queue(list(dict.fromkeys(entry.job for entry in latest.values())), SLURM_S)
    except slurm.SlurmError as error:
        sys.stderr.write(f"{error} States come from the runs' folders alone.\n")
    statuses = []
    for run, entry in latest.items():
        try:
            with run_errors_explained(run):
                statuses.append(status_of(run, entry, queued))
        except DataError as error:  # the other runs may be readable
            sys.stderr.write(f"{error}. It is left out.\n")
    if args.json:
        sys.stdout.write(json.dumps([asdict(status) for status in statuses], indent=1) + "\n")
        return 0
    # A warning in a log may quote a completion.
    sys.stdout.write(escaped("\n".join(table([COLUMNS, *map(_row, statuses)])) + "\n"))
    return 0


def found_runs(path: Path) -> Iterator[Path]:
    """Yield the run at `path`, or those below it; for an array, its elements."""
    for folder in (path, path / records.FOLDER):
        list(folder.iterdir() if folder.is_dir() else ())  # glob passes over a folder that may not be read
    for level in range(LEVELS + 1):
        pattern = "/".join(["*"] * level + [records.FOLDER, "*", "submission.json"])
        for file in sorted(path.glob(pattern)):
            run = file.parents[2]
            submitted = records.submissions(run)
            is_array = bool(submitted and submitted[-1].array)
            elements = [folder for folder in run.iterdir() if (folder / "attempts.jsonl").exists()]
            yield from (sorted(elements) if is_array else ()) or [run]


def status_of(run: Path, submission: records.Submission, queued: Mapping[str, slurm.QueuedJob] | None) -> RunStatus:
    """Return the state of a run; `queued`: jobs that wait or run, None where Slurm does not answer."""
    attempts = list(records.tail(run / "attempts.jsonl", TAIL_BYTES))
    if not submission.array:
        attempts = [entry for entry in attempts if str(entry.get("job")) == submission.job]
    newest_attempt = max((_number(entry, "attempt") or 0 for entry in attempts), default=0)
    # The record of an orphan may come after the start of the attempt that replaced it.
    orphans = [entry for entry in attempts if entry.get("then") == "orphan"]
    attempts = [entry for entry in attempts if entry not in orphans or entry.get("attempt") == newest_attempt]
    metrics = list(records.tail(run / "metrics.jsonl", TAIL_BYTES))
    is_element = submission.array and run.name.isdecimal()
    name = f"{submission.job}_{run.name}" if is_element else submission.job
    job = None if queued is None else queued.get(name) or slurm.ended(name)
    # Records come newest first.
    newest = max((_number(entry, "time") or 0 for entry in metrics[:1] + attempts[:1]), default=0)
    done, is_asked = records.done(run), queued is not None
    reasons = [done]
    if not done:
        reasons = [_why(job, attempts, is_asked=is_asked) if attempts else _stage_before(submission, job, queued)]
    with suppress(OSError, ValueError, KeyError, TypeError):
        servers = json.loads((run / "servers" / "status.json").read_text(encoding="utf-8"))["servers"]
        living = [entry["url"] for entry in servers if entry["is_serving"]]
        silent = [entry["url"] for entry in servers if not entry["is_serving"]]
        reasons.append(f"servers {len(living)}/{len(servers)}{', without ' if silent else ''}{', '.join(silent)}")
    # Problems that the last start worked around (also in its log), such as a damaged checkpoint; and later warnings of
    # the log, such as that nothing is learned.
    warnings = [f"warning: {text}" for text in records.resume_warnings(run)]
    warnings += records.logged_warnings(record for record in metrics if record.get("event") not in warnings)
    return RunStatus(
        run=str(run),
        job=name,
        state="DONE" if done else _state(job, attempts, is_asked=is_asked),
        attempts=sum(entry.get("event") == "start" for entry in attempts),
        step=_first(metrics, "step"),
        tokens_per_s_per_rank=_first(metrics, "train/tokens_per_s_per_rank"),
        checkpoint=records.last_step(run),
        age_s=datetime.now(UTC).timestamp() - newest if newest else None,
        nodes=(job.nodes if job else "") or str(attempts[0].get("nodes", "") if attempts else ""),
        why="; ".join(part for part in (*reasons, *warnings) if part),
    )


def _state(job: slurm.QueuedJob | None, attempts: Sequence[dict[str, object]], *, is_asked: bool) -> str:
    # Slurm's word; where Slurm does not answer, the folder's.
    if job:
        return job.state
    last = attempts[0] if attempts else {}
    if is_asked or (last.get("event") == "end" and last.get("then") not in ("requeue", "restart")):
        return "ended"
    if last.get("event") == "start" or last.get("then") == "restart":
        return "started"
    return "requeued" if last.get("event") == "end" else "submitted"


def _stage_before(
    submission: records.Submission, job: slurm.QueuedJob | None, queued: Mapping[str, slurm.QueuedJob] | None
) -> str:
    """Return why a job that has not started waits, or why it never will: a stage of its pipeline has failed."""
    own = job.reason if job else ""
    run = Path(submission.after)
    before = [entry for entry in records.submissions(run) if f":{entry.job}" in submission.dependency]
    if not submission.after or not before:
        return own
    stage = status_of(run, before[-1], queued)
    if stage.state == "DONE":
        return own
    name = f"{before[-1].name} (job {stage.job}, {run})"
    if stage.state in slurm.ALIVE or stage.state in ("submitted", "started", "requeued"):
        return f"waits for {name}"
    if stage.why.startswith(NOT_STARTED):  # the stage that failed is further ahead
        return stage.why
    return (
        f"{NOT_STARTED}: {name} {stage.state}{stage.why and ', '}{stage.why}. Mend that and launch the pipeline again: "
        "finished stages are skipped"
    )


def _why(job: slurm.QueuedJob | None, attempts: Sequence[dict[str, object]], *, is_asked: bool) -> str:
    # A job that was requeued and runs shows how the attempt before ended.
    reasons = [job.reason] if job and job.reason else []
    last = attempts[0]
    may_run = job.state == "RUNNING" if job else not is_asked
    if may_run and last.get("event") == "start":
        last = next((entry for entry in attempts if entry.get("event") == "end"), {})
        cause = f": {last['cause']}," if last.get("cause") else ""
        return f"before: {last['why']}{cause} at step {last.get('step')}" if last else ""
    if last.get("event") == "end":
        cause = f"{last['cause']}; " if last.get("cause") else ""
        then = str(last.get("then"))
        consequence = CONSEQUENCES.get(then, then)
        if then.isdecimal():
            consequence = MEANING.get(int(then), f"status {then}")
        reasons.append(f"{last.get('why')}: {cause}{consequence}")
    elif last.get("event") == "start" and not (job and job.is_alive):
        status = next((reason.removeprefix("status ") for reason in reasons if reason.startswith("status ")), "")
        meaning = f" ({MEANING[int(status)]})" if status.isdecimal() and int(status) in MEANING else ""
        reasons.append(f"its last attempt ended without a record{meaning}: see logs/latest")
    return "; ".join(reasons)


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return lines with aligned columns; the last column is not padded."""
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


def _first(entries: Iterable[dict[str, object]], key: str) -> float | None:
    return next((number for entry in entries if (number := _number(entry, key)) is not None), None)


def _number(entry: dict[str, object], key: str) -> float | None:
    value = entry.get(key)
    try:
        return float(value) if isinstance(value, int | float) else None
    except OverflowError:  # a damaged record
        return None
