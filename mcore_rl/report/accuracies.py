"""Accuracies on held-out prompts, each with its number of prompts, its conditions and an interval."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mcore_rl.config.sft import evaluation_conditions
from mcore_rl.metrics.intervals import wilson
from mcore_rl.report.runs import RunRecord

ACCURACY, NUM_PROMPTS = "eval/accuracy", "eval/prompts"


@dataclass(frozen=True, kw_only=True, slots=True)
class Accuracy:
    """An accuracy that was measured: a run's own last, or its evaluation.json's."""

    value: float
    num_prompts: int | None
    """Prompts that it is a mean over; None: not recorded."""
    conditions: str
    """Conditions in words; accuracies with other words are not to be compared."""
    before: float | None
    """Accuracy under the same conditions before the run's first step; None: not measured."""

    @property
    def interval(self) -> tuple[float, float] | None:
        """Interval of 95 %; None where the number of prompts is not recorded."""
        return wilson(self.value, self.num_prompts) if self.num_prompts else None

    @property
    def text(self) -> str:
        """Value with interval and number of prompts."""
        value = f"{100 * self.value:.1f} %"
        if self.interval is None:
            return f"{value} (n not recorded)"
        low, high = (100 * end for end in self.interval)
        return f"{value} (95 %: {low:.1f} to {high:.1f}, n = {self.num_prompts})"


def accuracies(run: RunRecord) -> Iterator[Accuracy]:
    """Yield the known accuracies of a run: evaluation.json first, then the run's own evaluations."""
    kept: Mapping[str, Any] = run.evaluation
    if ACCURACY in kept:
        num_prompts = kept.get(NUM_PROMPTS, kept.get("prompts"))
        yield Accuracy(
            value=float(kept[ACCURACY]),
            num_prompts=None if num_prompts is None else int(num_prompts),
            conditions=words_of(kept.get("conditions", {})) or "evaluation.json without its conditions",
            before=None,
        )
    series = run.series(ACCURACY)
    if len(series):
        numbers = run.series(NUM_PROMPTS).values
        has_start = len(series) > 1 and series.steps[0] == 0
        yield Accuracy(
            value=series.values[-1],
            num_prompts=int(numbers[-1])
            if numbers
            else run.config.get("rl", {}).get("eval", {}).get("num_prompts"),
            conditions=own_conditions(run),
            before=series.values[0] if has_start else None,
        )


def own_conditions(run: RunRecord) -> str:
    """Return the conditions of the evaluations that a run makes itself."""
    return words_of(evaluation_conditions(run.config)) if run.stage == "rl" else ""


def by_conditions(runs: Sequence[RunRecord]) -> dict[str, dict[int, Accuracy]]:
    """Return the accuracies of the runs, by index, for each of the conditions, in the order of their first run."""
    found: dict[str, dict[int, Accuracy]] = {}
    for run_index, run in enumerate(runs):
        for accuracy in accuracies(run):
            found.setdefault(accuracy.conditions, {}).setdefault(run_index, accuracy)
    return found


def words_of(conditions: Mapping[str, Any]) -> str:
    """Return conditions in words; empty without any."""
    if not conditions:
        return ""
    samples, temperature = conditions.get("samples"), conditions.get("temperature")
    heat = f"{temperature:g}" if isinstance(temperature, int | float) else "not recorded"
    return (
        f"{conditions.get('prompts') or 'prompts'} (first {conditions.get('first')}), temperature {heat}, {samples} "
        f"{'answer' if samples == 1 else 'answers'} each of at most {conditions.get('max_new_tokens')} tokens, "
        f"correct by {conditions.get('correct_by')}"
    )
