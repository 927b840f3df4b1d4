"""Sinks of metrics and events: the console, metrics.jsonl, and the entries of log.sinks."""

import time
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from rich.console import Console
from rich.markup import escape
from torch import Tensor

from mcore_rl.config.extension import load_extension
from mcore_rl.config.run import LogConfig
from mcore_rl.errors import escaped
from mcore_rl.metrics.jsonl import FILE_NAME, JsonlSink
from mcore_rl.metrics.metric_table import Reported
from mcore_rl.metrics.metrics import Metric, reduced
from mcore_rl.workers.launcher import is_shown_on_terminal

MOST_SAMPLES = 64
"""Maximum number of samples of a rollout batch that sinks with tables get."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggedRun:
    """Description of a run that its sinks get."""

    run_dir: Path
    resume_step: int
    """Last step before this start of the run; 0 if it is new."""
    settings: Mapping[str, object]
    """The resolved config as JSON values."""
    project: str
    entity: str | None
    name: str
    group: str | None
    tags: tuple[str, ...]


class Sink(Protocol):
    """Destination of the metrics and events of a run.

    A class of your own, `module:Class` in log.sinks, is called with a LoggedRun on rank 0.
    """

    def write(self, step: int, values: Mapping[str, Reported]) -> None:
        """Write the metrics of a step: numbers, and nested lists for a matrix."""

    def message(self, step: int, text: str, fields: Mapping[str, object]) -> None:
        """Write an event of a step: a text, and fields with more about it."""

    def close(self) -> None:
        """Return when everything written so far is safe."""


@runtime_checkable
class SampleSink(Protocol):
    """Sink that also shows samples."""

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Show samples of a rollout batch, each with `prompt`, `completion`, `answer` and `reward`."""


LOGGERS = {
    "tensorboard": "mcore_rl.metrics.loggers:TensorBoardSink",
    "wandb": "mcore_rl.metrics.loggers:WandbSink",
    "mlflow": "mcore_rl.metrics.loggers:MlflowSink",
    "swanlab": "mcore_rl.metrics.loggers:SwanlabSink",
    "trackio": "mcore_rl.metrics.loggers:TrackioSink",
}
"""Sink of log.sinks -> its class, which is imported for a run that names it."""


class Log:
    """Log of a run, which passes metrics and events on to its sinks; only rank 0 has sinks."""

    def __init__(self, sinks: Iterable[Sink], config: LogConfig, step: int = 0) -> None:
        self._sinks = tuple(sinks)
        self._config = config
        self._step = step
        self._pending: list[Metric] = []
        self._pending_matrices: list[Metric] = []

    def write(self, step: int, metrics: Iterable[Metric]) -> None:
        """Take the metrics of a step and write them every `log.interval` steps, reduced over the steps since then.

        Matrices are written every `log.matrix_interval` steps.
        """
        self._take(step, metrics)
        due: list[Metric] = []
        if step % self._config.interval == 0:
            due, self._pending = self._pending, []
        if self._config.matrix_interval is None:
            self._pending_matrices = []
        elif step % self._config.matrix_interval == 0:
            due, self._pending_matrices = due + self._pending_matrices, []
        self._write(step, due)

    def flush(self, step: int, metrics: Iterable[Metric] = ()) -> None:
        """Write pending values, with `metrics`, before a checkpoint, which does not hold it: a run that resumes there
        would lose it, and a sum over steps (moe/expert_load) would lack the steps before.
        """
        self._take(step, metrics)
        if self._config.matrix_interval is None:
            self._pending_matrices = []
        due, self._pending, self._pending_matrices = self._pending + self._pending_matrices, [], []
        self._write(step, due)

    def _take(self, step: int, metrics: Iterable[Metric]) -> None:
        self._step = step
        if not self._sinks:
            return
        for metric in metrics:
            is_matrix = isinstance(metric.value, Tensor) and metric.value.dim() > 0
            (self._pending_matrices if is_matrix else self._pending).append(metric)

    def write_now(self, step: int, metrics: Iterable[Metric]) -> None:
        """Write metrics that do not occur in every step, as of an evaluation or a checkpoint, at once."""
        self._write(step, metrics)

    def message(self, text: str, **fields: object) -> None:
        """Write an event of the current step: a line on the console, and a record with `event` and the fields."""
        for sink in self._sinks:
            sink.message(self._step, text, fields)

    def detail(self, text: str) -> None:
        """Write an event that the console shows only with log.console="verbose"."""
        for sink in self._sinks:
            if self._config.console == "verbose" or not isinstance(sink, ConsoleSink):
                sink.message(self._step, text, {})

    def samples(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Pass samples of a rollout batch, with prompt, completion, answer and reward, to the sinks with tables."""
        for sink in self._sinks:
            if isinstance(sink, SampleSink):
                sink.samples(self._step, rows[:MOST_SAMPLES])

    def close(self) -> None:
        """Write the metrics that are pending and close every sink."""
        self._write(self._step, self._pending + self._pending_matrices)
        self._pending, self._pending_matrices = [], []
        for sink in self._sinks:
            sink.close()

    def _write(self, step: int, metrics: Iterable[Metric]) -> None:
        if self._sinks and (values := reduced(metrics)):
            for sink in self._sinks:
                sink.write(step, values)


def open_log(
    run_dir: Path, config: LogConfig, resume_step: int, total_steps: int, settings: Mapping[str, object] | None = None
) -> Log:
    """Open the log of rank 0, the only rank that writes.

    Records after `resume_step` are dropped, because those steps run again. Loggers show `settings` (the resolved
    config) next to the curves.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    logged = LoggedRun(
        run_dir=run_dir,
        resume_step=resume_step,
        settings=settings or {},
        project=config.project,
        entity=config.entity,
        name=config.name or run_dir.name,
        group=config.group,
        tags=config.tags,
    )
    optional = [
        load_extension("log.sinks", LOGGERS.get(name, name))(logged) for name in config.sinks if name != "jsonl"
    ]
    console = ConsoleSink(
        Console(),
        total_steps,
        is_quiet=config.console == "quiet",
        has_columns=is_shown_on_terminal() and config.console != "verbose",
    )
    return Log([console, JsonlSink(run_dir / FILE_NAME, resume_step), *optional], config, resume_step)


def silent_log() -> Log:
    """Return the log of every rank but rank 0; it writes nothing."""
    return Log((), LogConfig())


class ConsoleSink:
    """Sink that prints one line per step; colours only on a terminal."""

    def __init__(
        self, console: Console, total_steps: int, *, is_quiet: bool = False, has_columns: bool = False
    ) -> None:
        """Prepare to print: warnings alone if `is_quiet`, steps as a table of the console's width if `has_columns`."""
        self._has_columns = has_columns
        self._widths: dict[str, int] = {}
        """Columns so far and their widths, in the order of COLUMNS."""
        self._num_rows = 0
        self._console = console
        self._total_steps = total_steps
        self._is_quiet = is_quiet
        self._first: tuple[int, float] | None = None

    def write(self, step: int, values: Mapping[str, Reported]) -> None:
        """Print one line with the COLUMNS that have a value.

        Where no group of the updates has a signal, the line says so, and has no norm of a gradient that would be 0.000.
        """
        cells: dict[str, str] = {}
        num_groups = values.get("policy/groups")
        has_signal = not num_groups or values.get("policy/groups_without_signal") != num_groups
        for name, (label, show) in COLUMNS.items():
            if not isinstance(value := values.get(name), float | int):
                continue
            if name == "train/grad_norm" and not has_signal:
                cells["no signal in"] = f"{num_groups:.0f} of {num_groups:.0f} groups"
                if value < LEAST_NORM:
                    continue
            cells[label] = show(value)
        if self._is_quiet:
            return
        left = None
        if "train/lr" in values:
            # At the mean pace since the first line, which has no time left.
            now_s = time.monotonic()
            self._first = self._first or (step, now_s)
            first_step, first_s = self._first
            if step > first_step:
                left = timedelta(seconds=round((now_s - first_s) / (step - first_step) * (self._total_steps - step)))
        if cells and self._has_columns and "train/lr" in values:
            # As wide as a time from the first row on, which has none: the columns below do not shift.
            self._print_row(
                f"{step}/{self._total_steps}", {"left": ("" if left is None else str(left)).rjust(7)} | cells
            )
        elif cells:
            shown = [f"[dim]{label}[/] {text}" for label, text in cells.items()]
            shown += [] if left is None else [f"{left} [dim]left[/]"]
            width = len(str(self._total_steps))
            self._print(f"[bold]step {step:>{width}}[/]/{self._total_steps} | " + " | ".join(shown))

    def _print_row(self, step: str, cells: Mapping[str, str]) -> None:
        """Print a row, below a header every 20 rows or with a new column; columns without room are left out."""
        widths = self._widths | {label: max(self._widths.get(label, len(label)), len(cells[label])) for label in cells}
        is_new = widths.keys() != self._widths.keys()
        order = ["left", "no signal in", *(label for label, _ in COLUMNS.values())]
        self._widths = {label: widths[label] for label in sorted(widths, key=order.index)}
        first = 2 * len(str(self._total_steps)) + 1
        shown, taken = [], max(first, len("step"))
        for label, width in self._widths.items():
            if (taken := taken + 2 + width) <= self._console.width:
                shown.append((label, width))
        if is_new or self._num_rows % HEADER_ROWS == 0:
            self._num_rows = 0
            self._print(f"[dim]{'step':>{first}}" + "".join(f"  {label:>{width}}" for label, width in shown) + "[/]")
        self._num_rows += 1
        self._print(
            f"[bold]{step:>{first}}[/]" + "".join(f"  {cells.get(label, ''):>{width}}" for label, width in shown)
        )

    def message(self, step: int, text: str, fields: Mapping[str, object]) -> None:
        """Print one line: the text, then the fields."""
        if self._is_quiet and not text.lower().startswith("warning"):
            return
        more = "".join(f" | {name} {value}" for name, value in fields.items())
        self._print(f"[yellow]{escape(escaped(text))}[/]{escape(escaped(more))}")

    def close(self) -> None:
        """Do nothing: the console stays open."""

    def _print(self, line: str) -> None:
        self._console.print(line, highlight=False, soft_wrap=True)


def _short(number: float) -> str:
    """Return three significant digits and a unit prefix: 1234567 -> 1.23M."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.3g}"


COLUMNS: dict[str, tuple[str, Callable[[float], str]]] = {
    name: (label, _short if spec == "short" else f"{{:{spec}}}".format)
    for name, (label, spec) in tomllib.loads(
        Path(__file__).with_name("console.toml").read_text(encoding="utf-8")
    ).items()
}
"""Metrics that the console shows, in this order: metric -> label, format."""
HEADER_ROWS = 20
LEAST_NORM = 5e-4
"""Norm of a gradient below which its column shows 0.000."""
