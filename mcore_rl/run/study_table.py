"""Results of the runs of a study as one table, with a row for each arm."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from mcore_rl.obs.jsonl import FILE_NAME, read_records

Records = Sequence[Mapping[str, Any]]


def mean_of(*names: str) -> Callable[[Records], float]:
    """Return a column: the mean, over records that have these metrics, of their sum; nan when no record has them."""

    def column(records: Records) -> float:
        sums = [sum(record[name] for name in names) for record in records if all(n in record for n in names)]
        return fmean(sums) if sums else math.nan

    return column


def last_of(name: str) -> Callable[[Records], float]:
    """Return a column: the last value of a metric, nan when no record has it."""

    def column(records: Records) -> float:
        return next((record[name] for record in reversed(records) if name in record), math.nan)

    return column


COLUMNS: dict[str, Callable[[Records], float]] = {
    "eval accuracy": last_of("eval/accuracy"),
    "reward": mean_of("reward/mean"),
    "KL old -> new": mean_of("policy/kl_old_nats"),
    "ratio variance": mean_of("policy/ratio_variance"),
    "clipped tokens": mean_of("policy/clip_ratio_low", "policy/clip_ratio_high"),
    "clipped sequences": mean_of("policy/clip_ratio_low_sequences", "policy/clip_ratio_high_sequences"),
    "routes changed": mean_of("routes/changed_fraction"),
    "tokens changed": mean_of("routes/changed_tokens_fraction"),
    "grad norm": mean_of("train/grad_norm"),
    "routes s": mean_of("time/routes_s"),
    "rollout s": mean_of("rl/step_s"),
    "routes MiB": lambda records: mean_of("routes/cached_bytes")(records) / 2**20,
}
"""Column -> its value from a run's metrics.jsonl: last evaluation, means over updates or rollout batches, costs."""


@dataclass(frozen=True, slots=True)
class StudyRow:
    """One arm with the numbers of each of its seeds."""

    arm: str
    seeds: Mapping[int, Mapping[str, float]]

    def cell(self, column: str) -> str:
        """Return the mean over the seeds as text, with the standard deviation when there are several."""
        values = [numbers[column] for numbers in self.seeds.values() if not math.isnan(numbers[column])]
        if not values:
            return "-"
        spread = f" ± {stdev(values):.2g}" if len(values) > 1 else ""
        return f"{fmean(values):.4g}{spread}"


def row_of(arm: str, folders: Mapping[int, Path]) -> StudyRow:
    """Return the row of an arm from the run folder of each seed."""
    return StudyRow(arm, {seed: numbers_of(folder) for seed, folder in folders.items()})


def numbers_of(folder: Path) -> dict[str, float]:
    """Return every column of one run."""
    records = list(read_records(folder / FILE_NAME))
    return {name: column(records) for name, column in COLUMNS.items()}


def as_markdown(rows: Sequence[StudyRow]) -> str:
    """Return the table in Markdown."""
    lines = ["| arm | " + " | ".join(COLUMNS) + " |", "|---|" + "--:|" * len(COLUMNS)]
    lines += ["| " + " | ".join([row.arm, *map(row.cell, COLUMNS)]) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def as_json(rows: Sequence[StudyRow]) -> str:
    """Return the numbers of every seed in JSON, for further use."""
    return json.dumps({row.arm: row.seeds for row in rows}, indent=1) + "\n"
