"""`mcore-rl study`: runs from the same start that differ in a few fields, with a table of them."""

import argparse
import json
import math
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, stdev

from rich.console import Console

from mcore_rl.checks.programs import PROGRAMS
from mcore_rl.cli.start_ranks import next_log_dir
from mcore_rl.config.load import load_config
from mcore_rl.config.pipeline import StudyConfig
from mcore_rl.errors import ConfigError
from mcore_rl.metrics.attempts_file import read_attempts
from mcore_rl.metrics.jsonl import FILE_NAME, read_records
from mcore_rl.metrics.metric_table import row_name
from mcore_rl.metrics.verdict import student_t
from mcore_rl.programs.finished_run import changes_since_done, refuse_other_run
from mcore_rl.storage.files import disk_errors_explained, has_mark, make_folder, refuse_replacing, write_atomically
from mcore_rl.workers.launcher import launch_local

SERIES = (
    *("reward/mean", "reward/accuracy", "reward/groups_without_signal_fraction", "rollout/completion_tokens"),
    *("rollout/truncated_fraction", "rollout/mismatch_kl_nats", "policy/entropy_nats", "policy/kl_old_nats"),
    *("policy/kl_old_live_routes_nats", "policy/kl_old_same_routes_nats", "policy/ratio_variance"),
    *("policy/ratio_variance_live_routes", "policy/ratio_variance_same_routes", "policy/clip_ratio_low"),
    *("policy/clip_ratio_high", "policy/clip_ratio_low_sequences", "policy/clip_ratio_high_sequences"),
    *("routes/changed_fraction", "routes/changed_tokens_fraction", "routes/cached_bytes", "train/grad_norm"),
    *("time/routes_s", "rl/step_s"),
)
"""Metrics with a value for each rollout batch in study.json."""
LAYER_SERIES = ("routes/layer_NN/changed_fraction", "policy/layer_NN/kl_old_routing_nats")
"""Metrics with a mean over the run for each layer in study.json."""
LAYER = re.compile(r"/layer_(\d+)/")
DIGITS = 5
TAIL = 0.2
"""Fraction of rollout batches, at the end of a run, that the columns "at the end" average over."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyRun:
    """A run of a study, as recorded in its folder so far."""

    arm: str
    seed: int
    is_done: bool
    rollouts: int = 0
    commit: str = ""
    """Commit of the code at the run's first start."""
    starts: int = 0
    versions: Mapping[str, str] = field(default_factory=dict)
    machine: Mapping[str, str | int] = field(default_factory=dict)
    series: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    """Metric in SERIES -> mean over the updates with this metric, for each rollout batch; None without such updates."""
    layers: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Metric in LAYER_SERIES -> layer -> mean over the records with this metric."""
    evaluations: Sequence[Mapping[str, float]] = ()
    """`step` and the metrics `eval/...` of each evaluation, in order."""

    def values(self, name: str) -> list[float]:
        """Return the values of a metric in order, without missing values."""
        return [value for value in self.series.get(name, ()) if value is not None]

    def evaluated(self) -> list[float]:
        """Return the accuracy of all evaluations that have it, in order."""
        name = "eval/accuracy"
        return [evaluation[name] for evaluation in self.evaluations if name in evaluation]


def read_run(arm: str, seed: int, folder: Path) -> StudyRun:
    """Return the content of a run's folder; a run without rows if it has not begun."""
    path = folder / FILE_NAME
    if not path.is_file():
        return StudyRun(arm=arm, seed=seed, is_done=False)
    rows: list[dict[str, float]] = []
    evaluations: dict[int, Mapping[str, float]] = {}
    of_updates: dict[str, list[float]] = {}
    of_layers: dict[str, dict[str, list[float]]] = {}
    for record in read_records(path):
        # Numbers that are not finite have no mean, and JSON cannot represent them.
        numbers = {
            name: float(value)
            for name, value in record.items()
            if isinstance(value, int | float) and math.isfinite(value)
        }
        for name, value in numbers.items():
            if name in SERIES:
                of_updates.setdefault(name, []).append(value)
            if (match := LAYER.search(name)) and (metric := row_name(name)) in LAYER_SERIES:
                of_layers.setdefault(metric, {}).setdefault(str(int(match[1])), []).append(value)
        if "eval/accuracy" in numbers:
            # A run that ended between an evaluation and its checkpoint evaluates again: the last evaluation counts.
            found = {name: _short(value) for name, value in numbers.items() if name.startswith("eval/")}
            evaluations[int(numbers["step"])] = {"step": int(numbers["step"]), **found}
        if "rl/rollouts" in numbers:
            rows.append({name: fmean(values) for name, values in of_updates.items()})
            of_updates = {}
    attempts = read_attempts(folder)
    return StudyRun(
        arm=arm,
        seed=seed,
        is_done=(folder / "DONE").exists(),
        rollouts=len(rows),
        commit=attempts[0].commit if attempts else "",
        starts=len(attempts),
        versions=attempts[0].versions if attempts else {},
        machine=asdict(attempts[0].machine) if attempts else {},
        series={
            name: [_short(row[name]) if name in row else None for row in rows]
            for name in SERIES
            if any(name in row for row in rows)
        },
        layers={
            metric: {layer: _short(fmean(values)) for layer, values in by_layer.items()}
            for metric, by_layer in of_layers.items()
        },
        evaluations=[evaluations[step] for step in sorted(evaluations)],
    )


def _short(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def interval(values: Sequence[float]) -> tuple[float, float | None]:
    """Return a sample's mean and the half width of its 95 % interval (Student's t), None for a single value."""
    if len(values) < 2:
        return fmean(values), None
    return fmean(values), student_t(len(values) - 1) * stdev(values) / math.sqrt(len(values))


def mean_of(*names: str) -> Callable[[StudyRun], float | None]:
    """Return a column: the mean over rollout batches of the sum of these metrics; None if a value is missing."""

    def column(run: StudyRun) -> float | None:
        values = [run.values(name) for name in names]
        return sum(map(fmean, values)) if all(values) else None

    return column


def reward_at_end(run: StudyRun) -> float | None:
    """Return the mean reward of the last fifth of the rollout batches."""
    rewards = run.values("reward/mean")
    return fmean(rewards[-_window(rewards) :]) if rewards else None


def best_reward(run: StudyRun) -> float | None:
    """Return the highest mean reward over a window of consecutive rollout batches, a fifth of the run long."""
    rewards = run.values("reward/mean")
    size = _window(rewards)
    windows = [fmean(rewards[start : start + size]) for start in range(len(rewards) - size + 1)]
    return max(windows) if rewards else None


def share_of_routing(before: str, after: str) -> Callable[[StudyRun], float | None]:
    """Return a column: 1 - same routes / live routes, for the mean of a metric that was split by routes."""

    def column(run: StudyRun) -> float | None:
        live, same = (run.values(f"{before}_{routes}_routes{after}") for routes in ("live", "same"))
        return 1 - fmean(same) / fmean(live) if live and same and fmean(live) > 0 else None

    return column


def _window(values: Sequence[float]) -> int:
    return max(1, round(TAIL * len(values)))


COLUMNS: dict[str, Callable[[StudyRun], float | None]] = {
    "eval accuracy": lambda run: next(reversed(run.evaluated()), None),
    "reward": mean_of("reward/mean"),
    "reward at the end": reward_at_end,
    "best reward": best_reward,
    "entropy": mean_of("policy/entropy_nats"),
    "KL old -> new": mean_of("policy/kl_old_nats"),
    "of it routing": share_of_routing("policy/kl_old", "_nats"),
    "ratio variance": mean_of("policy/ratio_variance"),
    "of it routing (variance)": share_of_routing("policy/ratio_variance", ""),
    "clipped tokens": mean_of("policy/clip_ratio_low", "policy/clip_ratio_high"),
    "clipped sequences": mean_of("policy/clip_ratio_low_sequences", "policy/clip_ratio_high_sequences"),
    "routes changed": mean_of("routes/changed_fraction"),
    "tokens changed": mean_of("routes/changed_tokens_fraction"),
    "grad norm": mean_of("train/grad_norm"),
    "routes s": mean_of("time/routes_s"),
    "rollout s": mean_of("rl/step_s"),
    "routes MiB": lambda run: None if (held := mean_of("routes/cached_bytes")(run)) is None else held / 2**20,
}
"""Column -> function for its value in a run: last evaluation, means over rollout batches, costs."""


def collapsed(run: StudyRun, below: float) -> bool:
    """Return whether the reward at the end is less than `below` times the best reward."""
    end, best = reward_at_end(run), best_reward(run)
    return end is not None and best is not None and best > 0 and end < below * best


@dataclass(frozen=True, slots=True)
class StudyRow:
    """An arm with the finished runs of its seeds."""

    arm: str
    runs: Sequence[StudyRun]
    collapse_below: float = 0.5

    def cell(self, column: str) -> str:
        """Return the mean over the seeds as text, with its 95 % interval if there are several; "-" without a value."""
        values = [value for run in self.runs if (value := COLUMNS[column](run)) is not None]
        if not values:
            return "-"
        mean, half = interval(values)
        return f"{mean:.4g}" if half is None else f"{mean:.4g} ± {half:.2g}"

    @property
    def collapses(self) -> str:
        """Return how many runs collapsed, in the form 1/3."""
        return f"{sum(collapsed(run, self.collapse_below) for run in self.runs)}/{len(self.runs)}"


def rows_of(runs: Sequence[StudyRun], collapse_below: float) -> list[StudyRow]:
    """Return a row of finished runs for each arm, in the order of the runs."""
    arms = dict.fromkeys(run.arm for run in runs)
    return [StudyRow(arm, [run for run in runs if run.arm == arm and run.is_done], collapse_below) for arm in arms]


def as_markdown(rows: Sequence[StudyRow]) -> str:
    """Return the table in Markdown; an arm without a finished run has no row."""
    lines = ["| arm | seeds | collapsed | " + " | ".join(COLUMNS) + " |", "|---|--:|--:|" + "--:|" * len(COLUMNS)]
    for row in rows:
        if row.runs:
            cells = [row.arm, str(len(row.runs)), row.collapses, *map(row.cell, COLUMNS)]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def as_json(settings: Mapping[str, object], runs: Sequence[StudyRun]) -> str:
    """Return the settings and the raw rows of all runs that have begun, with a line for each part of a run."""
    written = [{**asdict(run), "series": dict(run.series), "layers": dict(run.layers)} for run in runs if run.starts]
    lines = [
        "{\n  " + ",\n  ".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in run.items()) + "}"
        for run in written
    ]
    head = json.dumps(dict(settings), indent=1)[1:-1].rstrip()
    return "{" + head + ',\n "runs": [\n' + ",\n".join(lines) + "]}\n"


RESULTS = ("study.md", "study.json")
STUDY_MARK = "written by mcore-rl study"
"""Marks each output file, so that an earlier file is recognised."""


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """A run of a study: its arguments for `mcore-rl rl` and its number of ranks."""

    arm: str
    seed: int
    folder: Path
    arguments: list[str]
    ranks: int

    @property
    def is_done(self) -> bool:
        """Whether all its steps are done."""
        return (self.folder / "DONE").exists()


def main(args: argparse.Namespace) -> int:
    """Do the unfinished runs, and write the results after each; return 0 or the first failed run's status."""
    study = load_config(StudyConfig, Path(args.config), args.overrides)
    for name in RESULTS:
        refuse_replacing(
            Path(study.run_dir) / name,
            [("STUDY", Path(args.config))],
            overwrite=True,
            foreign=lambda path: None if has_mark(path, STUDY_MARK) else "was not written by `mcore-rl study`",
        )
    console = Console()
    planned = list(plan(study))
    status, stopped, module = 0, False, PROGRAMS["rl"].module
    with _asked_to_stop(study.budget_minutes) as is_asked:
        for index, run in enumerate(planned, start=1):
            title = f"{index}/{len(planned)} {run.arm}, seed {run.seed}"
            if run.is_done:
                console.print(f"{title}: done before ({run.folder})", soft_wrap=True)
                continue
            if stopped := is_asked.is_set():
                break
            console.print(f"[bold]{title}[/]\n$ mcore-rl rl {' '.join(run.arguments)}", soft_wrap=True)
            status = launch_local(module, run.arguments, run.ranks, next_log_dir(run.folder), [module])
            if is_asked.is_set():
                status = 0  # a run that was still starting ends with the status of the signal
            stopped = not status and not run.is_done
            write_results(study, planned)
            if status or stopped:
                break
    sys.stdout.write(write_results(study, planned))
    if stopped:
        console.print("stopped as asked; the same command resumes the study")
    return status


def plan(study: StudyConfig) -> Iterator[PlannedRun]:
    """Yield all runs, checked, seed by seed. Raises ConfigError if a run cannot start."""
    if study.base is None or not study.arms or not study.seeds:
        raise ConfigError("A study needs `base`, at least one of `seeds`, and `arms`: name = [fields]. Set them.")
    for seed in study.seeds:
        for arm, fields in study.arms.items():
            folder = Path(study.run_dir) / f"{arm.lower().replace(' ', '_').replace('+', 'with')}-{seed}"
            arguments = [study.base, *study.overrides, *fields, f"run_dir={folder}", f"train.seed={seed}"]
            try:
                config, ranks = PROGRAMS["rl"].checked_config(Path(study.base), arguments[1:], None)
                if (folder / "DONE").exists():
                    refuse_other_run(config.run_dir, changes_since_done(config), config.checkpoint.allow_changes)
            except ConfigError as error:
                raise ConfigError(f"arm {arm!r}: {error}") from None
            yield PlannedRun(arm, seed, folder, arguments, ranks)


def write_results(study: StudyConfig, planned: Sequence[PlannedRun]) -> str:
    """Write study.json and study.md for all runs so far, and return the text of study.md."""
    runs = [read_run(run.arm, run.seed, run.folder) for run in planned]
    text = as_markdown(rows_of(runs, study.collapse_below))
    unfinished = [
        f"{run.arm}, seed {run.seed} ({run.rollouts} rollout batches)" for run in runs if run.starts and not run.is_done
    ]
    if waiting := sum(not run.starts for run in runs):
        unfinished.append(f"{waiting} of {len(runs)} runs, which have not begun")
    if unfinished:
        text += f"\nNot in the table, because not done: {'; '.join(unfinished)}.\n"
    settings = {"comment": STUDY_MARK} | study.model_dump(mode="json", exclude={"run_dir", "budget_minutes"})
    out = Path(study.run_dir)
    make_folder(out, "Choose another run_dir.")
    with disk_errors_explained(out, "Make room (or give write access) there, and run the same command again."):
        contents = (f"<!-- {STUDY_MARK} -->\n{text}", as_json(settings, runs))
        for name, content in zip(RESULTS, contents, strict=True):
            write_atomically(out / name, content.encode())
    return text


@contextmanager
def _asked_to_stop(minutes: float | None) -> Iterator[threading.Event]:
    """Yield an event set on SIGTERM or after `minutes`; a running run gets the signal, and saves."""
    asked = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: asked.set())

    def time_is_up() -> None:
        asked.set()
        os.kill(os.getpid(), signal.SIGTERM)

    timer = None if minutes is None else threading.Timer(60 * minutes, time_is_up)
    if timer is not None:
        timer.daemon = True
        timer.start()
    try:
        yield asked
    finally:
        if timer is not None:
            timer.cancel()
        signal.signal(signal.SIGTERM, before)
