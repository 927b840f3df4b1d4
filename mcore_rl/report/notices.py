"""What a run warned of: its own warnings, failures, counters that should be zero, and Python's warnings in its logs."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mcore_rl.report.runs import RunRecord

PYTHON_WARNING = re.compile(r"^(?P<place>\S+:\d+): (?P<kind>\w*Warning): (?P<text>.*)$")
MAX_LOG_BYTES = 20 << 20
"""Of each log: what comes later is not searched."""
COUNTERS = {
    "train/skipped_steps": "steps were skipped: their gradient was not finite",
    "reward/errors": "scores failed (rl.reward.error_value was given)",
    "routes/unknown_tokens": "tokens were routed live: no routes came for them",
    "rollout_routes/unknown_tokens": "tokens came without the engine's routes",
}
"""Metrics that should stay 0. The first is a total, the others are of each record."""


@dataclass(frozen=True, slots=True)
class Notice:
    """One thing that a run warned of."""

    level: str
    """error, warning or note."""
    text: str
    detail: str = ""


def notices(run: RunRecord) -> list[Notice]:
    """The gravest first."""
    order = ("error", "warning", "note")
    found = [*_failures(run), *_state(run), *_events(run), *_counters(run), *_python_warnings(run)]
    return sorted(found, key=lambda notice: order.index(notice.level))


def _failures(run: RunRecord) -> Iterator[Notice]:
    """Attempts that ended with an error, as the launcher noted it."""
    for path in sorted((run.path / "logs").glob("*/failure.json")):
        try:
            rank, status, text = json.loads(path.read_text(encoding="utf-8", errors="replace"))
        except ValueError:
            continue  # The launcher was ended while it wrote: there is nothing to tell.
        yield Notice(
            "error", f"attempt {path.parent.name}: rank {rank} failed with status {status}", str(text)
        )


def _state(run: RunRecord) -> Iterator[Notice]:
    steps = run.config.get("train", {}).get("steps")
    if not run.done:
        yield Notice("warning", f"not done: the last step told of is {run.last_step} of {steps}")
    for name in run.names():
        if name == "train/loss_nats" or name.startswith("policy/"):
            odd = sum(isinstance(record.get(name), str) for record in run.records)
            if odd:
                yield Notice("warning", f"{name} was not finite in {odd} records")


def _events(run: RunRecord) -> Iterator[Notice]:
    """What the run called a warning; the same words are told once."""
    told = Counter(event.text for event in run.events if event.text.startswith("warning: "))
    for text, times in told.items():
        yield Notice("warning", text.removeprefix("warning: ") + (f" ({times} times)" if times > 1 else ""))


def _counters(run: RunRecord) -> Iterator[Notice]:
    for name, meaning in COUNTERS.items():
        values = run.series(name).values
        total = max(values, default=0.0) if name == "train/skipped_steps" else sum(values)
        if total:
            yield Notice("warning", f"{total:g} {meaning} ({name})")


def _python_warnings(run: RunRecord) -> Iterator[Notice]:
    told: Counter[tuple[str, str]] = Counter()
    for path in sorted((run.path / "logs").glob("*/*.log")):
        told.update(_warnings_in(path))
    for (kind, text), times in told.items():
        yield Notice("note", f"{kind}: {text}" + (f" ({times} times, in all logs)" if times > 1 else ""))


def _warnings_in(path: Path) -> Iterator[tuple[str, str]]:
    with path.open("rb") as file:
        text = file.read(MAX_LOG_BYTES).decode("utf-8", errors="replace")
    for line in text.splitlines():
        if match := PYTHON_WARNING.match(line):
            yield match["kind"], match["text"]
