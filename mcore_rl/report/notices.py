"""Warnings of a run: its own, failures, counters that should be 0, and Python's warnings in its logs."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mcore_rl.report.runs import RunRecord
from mcore_rl.storage.files import NOT_WRITER

PYTHON_WARNING = re.compile(r"^(?P<place>\S+:\d+): (?P<kind>\w*Warning): (?P<text>.*)$")
MAX_LOG_BYTES = 20 << 20
"""Size of the part of each log that is searched, from its beginning."""
COUNTERS = {
    "train/skipped_steps": "steps were skipped because their gradient was not finite",
    "reward/errors": "scores failed; reward_failures.jsonl has the first of each kind",
    "reward/unscored_completions": "completions had no reward and were left out of their group and the loss",
    "routes/unknown_tokens": "tokens were routed live because the engine returned no routes for them",
    "rollout_routes/unknown_tokens": "tokens have no routes of the engine to compare with",
}
"""Metrics that should stay 0. The first counts since the run's start, every later record since the record before."""


@dataclass(frozen=True, slots=True)
class Notice:
    """One warning of a run."""

    level: str
    """Severity: error, warning or note."""
    text: str
    detail: str = ""


def notices(run: RunRecord) -> list[Notice]:
    """Return the warnings of a run, the most severe first."""
    order = ("error", "warning", "note")
    found = [*_failures(run), *_state(run), *_events(run), *_counters(run), *_python_warnings(run)]
    return sorted(found, key=lambda notice: order.index(notice.level))


def _failures(run: RunRecord) -> Iterator[Notice]:
    for path in _of_attempts(run, "failure.json"):
        with suppress(ValueError, LookupError, TypeError):  # the launcher was killed while it wrote
            found = json.loads(path.read_text(encoding="utf-8", errors="replace"))
            yield Notice("error", f"attempt {path.parent.name}: {found['headline']}", str(found["text"]))


def _of_attempts(run: RunRecord, pattern: str) -> Iterator[Path]:
    """Yield files of the attempts that wrote the run: no evaluation, and no start that was refused before."""
    for path in sorted((run.path / "logs").glob(f"*/{pattern}")):
        # `latest` is a link to one of the others.
        if not path.parent.is_symlink() and not (path.parent / NOT_WRITER).exists():
            yield path


def _state(run: RunRecord) -> Iterator[Notice]:
    steps = run.config.get("train", {}).get("steps")
    if not run.done:
        yield Notice("warning", f"not done: the last step recorded is {run.last_step} of {steps}")
    for name in run.names():
        if name == "train/loss_nats" or name.startswith("policy/"):
            num_odd = sum(isinstance(record.get(name), str) for record in run.records)
            if num_odd:
                yield Notice("warning", f"{name} was not finite in {num_odd} records")


def _events(run: RunRecord) -> Iterator[Notice]:
    counts = Counter(event.text for event in run.events if event.text.startswith("warning: "))
    for text, times in counts.items():
        yield Notice("warning", text.removeprefix("warning: ") + (f" ({times} times)" if times > 1 else ""))


def _counters(run: RunRecord) -> Iterator[Notice]:
    for name, meaning in COUNTERS.items():
        values = run.series(name).values
        total = max(values, default=0.0) if name == "train/skipped_steps" else sum(values)
        if total:
            yield Notice("warning", f"{total:g} {meaning} ({name})")


def _python_warnings(run: RunRecord) -> Iterator[Notice]:
    counts: Counter[tuple[str, str]] = Counter()
    for path in _of_attempts(run, "*.log"):
        with path.open("rb") as file:
            lines = file.read(MAX_LOG_BYTES).decode("utf-8", errors="replace").splitlines()
        counts.update((match["kind"], match["text"]) for match in map(PYTHON_WARNING.match, lines) if match)
    for (kind, text), times in counts.items():
        yield Notice("note", f"{kind}: {text}" + (f" ({times} times, in all logs)" if times > 1 else ""))
