"""Summary of a run: its most important number, where it came from, and a table of numbers."""

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import fmean, median_low
from typing import Any

from mcore_rl.config.sft import evaluation_conditions
from mcore_rl.config.toml import toml_value
from mcore_rl.metrics.attempts_file import RunAttempt
from mcore_rl.metrics.verdict import OverOptimization, verdict, wilson
from mcore_rl.planning.estimate import plan_of_run
from mcore_rl.report.runs import RunRecord, Series

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

    @property
    def start(self) -> str:
        """Value before the first step, with an arrow to the value; empty where it was not measured."""
        return "" if self.before is None else f"{percent(self.before)} → "


def accuracies(run: RunRecord) -> Iterator[Accuracy]:
    """Yield the known accuracies of a run: evaluation.json first, then the run's own evaluations."""
    kept: Mapping[str, Any] = run.evaluation
    if ACCURACY in kept:
        num_prompts = kept.get(NUM_PROMPTS, kept.get("prompts"))
        yield Accuracy(
            value=float(kept[ACCURACY]),
            num_prompts=None if num_prompts is None else int(num_prompts),
            conditions=conditions_text(kept.get("conditions", {})) or "evaluation.json without its conditions",
            before=None,
        )
    series = run.series(ACCURACY)
    if len(series):
        numbers = run.series(NUM_PROMPTS).values
        has_start = len(series) > 1 and series.steps[0] == 0
        yield Accuracy(
            value=series.values[-1],
            num_prompts=int(numbers[-1]) if numbers else run.config.get("rl", {}).get("eval", {}).get("num_prompts"),
            conditions=own_conditions(run),
            before=series.values[0] if has_start else None,
        )


def own_conditions(run: RunRecord) -> str:
    """Return the conditions of the evaluations that a run makes itself."""
    return conditions_text(evaluation_conditions(run.config)) if run.stage == "rl" else ""


def by_conditions(runs: Sequence[RunRecord]) -> dict[str, dict[int, Accuracy]]:
    """Return the accuracies of the runs, by index, for each of the conditions, in the order of their first run."""
    found: dict[str, dict[int, Accuracy]] = {}
    for run_index, run in enumerate(runs):
        for accuracy in accuracies(run):
            found.setdefault(accuracy.conditions, {}).setdefault(run_index, accuracy)
    return found


def conditions_text(conditions: Mapping[str, Any]) -> str:
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


@dataclass(frozen=True, slots=True)
class Headline:
    """The most important number of a run."""

    value: str
    meaning: str


def headline(run: RunRecord) -> Headline:
    """Return the accuracy on held-out prompts if any, else the reward or the loss."""
    for accuracy in accuracies(run):
        value, _, interval = accuracy.text.partition(" (")
        meaning = f"accuracy on held-out prompts ({interval.rstrip(')')}): {accuracy.conditions}"
        return Headline(accuracy.start + value, meaning)
    for name, meaning, show in (
        ("reward/mean", "reward", plain),
        ("eval/pairs/accuracy", "accuracy on held-out pairs", percent),
        ("pairs/accuracy", "accuracy on training pairs", percent),
        ("eval/loss_nats", "held-out loss, nats a token", plain),
        ("train/loss_nats", "training loss, nats a token", plain),
    ):
        series = run.series(name)
        if len(series) > 1 and series.values[0] != series.values[-1]:
            return Headline(f"{show(series.values[0])} → {show(series.values[-1])}", meaning)
        if len(series):
            return Headline(show(series.values[-1]), meaning)
    return Headline("", "no numbers yet")


def tagline(run: RunRecord) -> str:
    """Return steps, time and ranks as text."""
    ranks = f", {ranks_text(run.attempts[-1])}" if run.attempts else ""
    return f"{run.last_step} steps in {duration(run.seconds)}{ranks}"


def provenance(run: RunRecord) -> dict[str, str]:
    """Return folder and state of a run, and command, code and machine of its last start."""
    details = {"folder": str(run.path), "state": run.done or f"not done, at step {run.last_step}"}
    if not run.attempts:
        described = next((event.text for event in run.events if "megatron-core" in event.text), "not recorded")
        return details | {"machine and versions": described, "mesh": mesh_text(run.config.get("mesh", {}))}
    last = run.attempts[-1]
    host = f"{last.machine.cores} cores, {size(last.machine.memory_bytes)} of memory"
    return details | {
        "command": command_text(last),
        "commit": last.commit or "not known: the code is not in a git repository",
        "machine": f"{ranks_text(last)} on {last.machine.device}; host: {host}",
        "mesh": mesh_text(last.mesh),
        "versions": ", ".join(f"{name} {version}" for name, version in last.versions.items()),
        "starts": "; ".join(f"{attempt.started} from step {attempt.step}" for attempt in run.attempts),
    }


def command_text(attempt: RunAttempt) -> str:
    """Return the command as a shell would read it; a rank's module becomes the command that starts such ranks."""
    words = attempt.command
    if words[1:2] == ["-m"] and len(words) > 2 and words[2].startswith("mcore_rl.programs."):
        words = ["mcore-rl", words[2].rpartition(".")[2], *words[3:]]
    return shlex.join(words)


def ranks_text(attempt: RunAttempt) -> str:
    """Return the number of ranks as text."""
    ranks = attempt.machine.ranks
    return "1 rank" if ranks == 1 else f"{ranks} ranks"


def mesh_text(mesh: Mapping[str, Any]) -> str:
    """Return the dimensions that are not 1 as text."""
    sizes = {name: mesh[name] for name in ("tp", "pp", "vpp", "cp", "ep", "etp", "world") if name in mesh}
    sizes_text = [f"{name} {number}" for name, number in sizes.items() if number != 1 or name == "world"]
    return ", ".join(sizes_text) or "one rank"


def _verdict(run: RunRecord) -> str:
    if run.stage != "rl" or (found := verdict(run.records)) is None:
        return ""
    reward = run.config["rl"].get("reward", {})
    watch = OverOptimization(reward.get("parts", ()), reward.get("weights"))
    alarms = filter(None, map(watch.of_record, run.records))
    return ". ".join([found.text, *(alarm.removeprefix("warning: ") for alarm in islice(alarms, 1))])


NUMBERS: dict[str, Callable[[RunRecord], str]] = {
    "verdict": _verdict,
    "steps": lambda run: str(run.last_step),
    "time": lambda run: duration(run.seconds),
    "tokens trained on": lambda run: count(next(reversed(run.series("train/consumed_tokens").values), None)),
    "loss": lambda run: _first_to_last(run, "train/loss_nats", plain),
    "held-out loss": lambda run: _first_to_last(run, "eval/loss_nats", plain),
    "loss of a pair": lambda run: _first_to_last(run, "pairs/loss", plain),
    "accuracy on held-out pairs": lambda run: _first_to_last(run, "eval/pairs/accuracy", percent),
    "reward": lambda run: _first_to_last(run, "reward/mean", plain),
    "entropy, nats": lambda run: _first_to_last(run, "policy/entropy_nats", plain),
    "KL to the old policy, largest": lambda run: _of(run.series("policy/kl_old_nats"), max, plain),
    "routes that differ, mean": lambda run: _of(run.series("routes/changed_fraction"), fmean, percent),
    "busiest expert over mean": lambda run: _first_to_last(run, "moe/load_max_over_mean", plain),
    "tokens / s / rank, median": lambda run: _of(run.series("train/tokens_per_s_per_rank"), median_low, count),
    "MFU, median": lambda run: _of(run.series("train/mfu"), median_low, percent),
    "peak main memory, rank 0": lambda run: _of(run.series("memory/peak_resident_bytes"), max, size),
    "peak device memory, rank 0": lambda run: _of(run.series("memory/peak_device_bytes"), max, size),
}


def numbers(runs: Sequence[RunRecord]) -> list[tuple[str, list[str]]]:
    """Return rows of a table with one column per run; a row that no run has is left out."""
    rows: list[tuple[str, list[str]]] = []
    # Each of the conditions of evaluation has a row, so that neighbouring cells can be compared.
    for conditions, found in by_conditions(runs).items():
        ours = [found.get(index) for index in range(len(runs))]
        rows.append((f"accuracy, {conditions}", [f"{one.start}{one.text}" if one else "" for one in ours]))
    rows.append(("pass@k by mcore-rl eval", [_pass_at_k(run) for run in runs]))
    rows += ((name, [show(run) for run in runs]) for name, show in NUMBERS.items())
    rows += _planned_rows(runs)
    return [(name, cells) for name, cells in rows if any(cells)]


def _planned_rows(runs: Sequence[RunRecord]) -> Iterator[tuple[str, list[str]]]:
    steps, memories = [], []
    for run in runs:
        machine = run.attempts[-1].machine if run.attempts else None
        plan = plan_of_run(run.path, run.stage, machine.device, machine.ranks) if machine else None
        step = memory = ""
        if plan is not None:
            measured = _of(run.series("memory/peak_device_bytes"), max, size) or "?"
            memory = f"{measured}; {size(float(plan.memory_bytes))}"
        if plan is not None and run.stage != "rl":  # a rollout batch has several steps, of lengths that no plan knows
            passes, updates = run.series("time/forward_backward_s"), run.series("time/optimizer_s")
            measured = f"{median_low(passes.values) + median_low(updates.values):.3g} s" if len(passes) else "?"
            step = f"{measured}; {plan.step.likely:.3g} s ({plan.step.low:.3g}-{plan.step.high:.3g})"
        steps.append(step)
        memories.append(memory)
    yield "a step, measured; planned", steps
    yield "device memory, measured; planned", memories


def differences(runs: Sequence[RunRecord]) -> list[tuple[str, list[str]]]:
    """Return the fields of the configs that differ between runs, with the value of each run."""
    flat = [dict(_flat(run.config)) for run in runs]
    keys = sorted({key for fields in flat for key in fields} - {"run_dir"})
    rows = [(key, [fields.get(key, "") for fields in flat]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, toml_value(value)


def _pass_at_k(run: RunRecord) -> str:
    kept = run.evaluation
    chances = {int(key.rpartition("_")[2]): kept[key] for key in kept if key.startswith("eval/pass_at_")}
    return ", ".join(f"pass@{k} {percent(float(chances[k]))}" for k in sorted(chances)[-1:])


def _first_to_last(run: RunRecord, name: str, show: Callable[[float], str]) -> str:
    values = run.series(name).values
    ends = [values[0], values[-1]] if len(values) > 1 else values
    return " → ".join(show(value) for value in ends)


def _of(series: Series, reduce: Callable[[list[float]], float], show: Callable[[float], str]) -> str:
    return show(reduce(series.values)) if len(series) else ""


def plain(value: float) -> str:
    """Format a number with four significant digits, without an exponent below 1e5."""
    return f"{value:.4g}" if abs(value) < 1e5 else f"{value:.3e}"


def percent(value: float) -> str:
    """Format a fraction: 0.1234 -> 12.3 %."""
    return f"{100 * value:.1f} %"


def count(value: float | None) -> str:
    """Format a count: 1234567 -> 1.23 M, None -> an empty text."""
    if value is None:
        return ""
    for unit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= unit:
            return f"{value / unit:.3g} {letter}"
    return f"{value:.3g}"


def size(num_bytes: float) -> str:
    """Format a number of bytes in binary units."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if num_bytes >= 1024**power:
            return f"{num_bytes / 1024**power:.3g} {unit}"
    return f"{num_bytes:.0f} B"


def duration(seconds: float) -> str:
    """Format a duration: 3 h 20 min, 2 min 5 s, 12 s."""
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 60} min {whole % 60} s" if whole >= 60 else f"{whole} s"
