"""Where metrics and events go: the console, metrics.jsonl, TensorBoard, Weights & Biases."""

import importlib
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.markup import escape
from torch import Tensor

from mcore_rl.config.run import LogConfig
from mcore_rl.errors import ConfigError
from mcore_rl.obs.jsonl import FILE_NAME, JsonlSink
from mcore_rl.obs.metric_table import Reported
from mcore_rl.obs.metrics import Metric, reduced


class Sink(Protocol):
    """One place that is told the numbers and the events of a run."""

    def write(self, step: int, values: Mapping[str, Reported]) -> None:
        """The numbers of a step."""

    def message(self, step: int, text: str, facts: Mapping[str, object]) -> None:
        """An event of a step, with facts about it."""

    def close(self) -> None:
        """Everything told so far is safe afterwards."""


class Log:
    """Tells every sink; without sinks (on all ranks but the writing one) it is silent."""

    def __init__(self, sinks: Iterable[Sink], config: LogConfig, step: int = 0) -> None:
        self._sinks = tuple(sinks)
        self._config = config
        self._step = step
        self._pending: list[Metric] = []
        self._pending_matrices: list[Metric] = []

    def write(self, step: int, metrics: Iterable[Metric]) -> None:
        """What a step measured; told every `log.interval` steps, reduced over the steps since the last time.

        Matrices are told every `log.matrix_interval` steps.
        """
        self._step = step
        if not self._sinks:
            return
        for metric in metrics:
            is_matrix = isinstance(metric.value, Tensor) and metric.value.dim() > 0
            (self._pending_matrices if is_matrix else self._pending).append(metric)
        told: list[Metric] = []
        if step % self._config.interval == 0:
            told, self._pending = self._pending, []
        if self._config.matrix_interval is None:
            self._pending_matrices = []
        elif step % self._config.matrix_interval == 0:
            told, self._pending_matrices = told + self._pending_matrices, []
        self._tell(step, told)

    def write_now(self, step: int, metrics: Iterable[Metric]) -> None:
        """What does not happen every step (an evaluation, a checkpoint); told at once."""
        self._tell(step, metrics)

    def message(self, text: str, **facts: object) -> None:
        """An event of the current step: a line on the console, and a record with `event` and the facts."""
        for sink in self._sinks:
            sink.message(self._step, text, facts)

    def close(self) -> None:
        """Tell what is pending, and end every sink."""
        self._tell(self._step, self._pending + self._pending_matrices)
        self._pending, self._pending_matrices = [], []
        for sink in self._sinks:
            sink.close()

    def _tell(self, step: int, metrics: Iterable[Metric]) -> None:
        if self._sinks and (values := reduced(metrics)):
            for sink in self._sinks:
                sink.write(step, values)


def open_log(
    run_dir: Path,
    config: LogConfig,
    resume_step: int,
    total_steps: int,
    settings: Mapping[str, object] | None = None,
) -> Log:
    """The log of the one writing rank; records after `resume_step` are dropped, since those steps run again.

    `settings` (the resolved config) is shown by Weights & Biases beside the curves.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    optional: list[Sink] = []
    if config.tensorboard:
        optional.append(TensorBoardSink(run_dir / "tensorboard", resume_step))
    if config.wandb_project:
        optional.append(WandbSink(config.wandb_project, run_dir, settings or {}))
    console = ConsoleSink(Console(), total_steps)
    return Log([console, JsonlSink(run_dir / FILE_NAME, resume_step), *optional], config, resume_step)


def silent_log() -> Log:
    """The log of every other rank."""
    return Log((), LogConfig())


class ConsoleSink:
    """A line a step that a person can follow; colours only on a terminal."""

    def __init__(self, console: Console, total_steps: int) -> None:
        self._console = console
        self._total_steps = total_steps
        self._first: tuple[int, float] | None = None

    def write(self, step: int, values: Mapping[str, Reported]) -> None:
        """One line of those COLUMNS that there is a value for."""
        cells = [
            f"[dim]{label}[/] {show(value)}"
            for name, (label, show) in COLUMNS.items()
            if isinstance(value := values.get(name), float | int)
        ]
        if "train/lr" in values and (left := self._time_left(step)) is not None:
            cells.append(f"{left} [dim]left[/]")
        if cells:
            width = len(str(self._total_steps))
            self._print(f"[bold]step {step:>{width}}[/]/{self._total_steps} | " + " | ".join(cells))

    def message(self, step: int, text: str, facts: Mapping[str, object]) -> None:
        """One line: the text, then the facts."""
        told = "".join(f" | {name} {value}" for name, value in facts.items())
        self._print(f"[yellow]{escape(text)}[/]{escape(told)}")

    def close(self) -> None:
        """Nothing is kept open."""

    def _time_left(self, step: int) -> timedelta | None:
        """By the mean pace since the first line, evaluations and checkpoints included; None on that line."""
        now_s = time.monotonic()
        if self._first is None:
            self._first = step, now_s
        first_step, first_s = self._first
        if step <= first_step:
            return None
        return timedelta(seconds=round((now_s - first_s) / (step - first_step) * (self._total_steps - step)))

    def _print(self, line: str) -> None:
        self._console.print(line, highlight=False, soft_wrap=True)


def _short(number: float) -> str:
    """1234567 -> 1.23M."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.3g}"


COLUMNS: dict[str, tuple[str, Callable[[float], str]]] = {
    "train/loss_nats": ("loss", "{:.4f}".format),
    "reward/mean": ("reward", "{:.3f}".format),
    "reward/accuracy": ("accuracy", "{:.3f}".format),
    "rollout/completion_tokens": ("length", "{:.1f}".format),
    "policy/entropy_nats": ("entropy", "{:.3f}".format),
    "policy/kl_old_nats": ("KL old", "{:.2e}".format),
    "mtp/loss_nats": ("mtp loss", "{:.4f}".format),
    "train/lr": ("lr", "{:.2e}".format),
    "train/grad_norm": ("grad norm", "{:.3f}".format),
    "train/tokens_per_s_per_rank": ("tokens/s/rank", _short),
    "train/mfu": ("MFU", "{:.1%}".format),
    "moe/load_max_over_mean": ("load max/mean", "{:.2f}".format),
    "eval/loss_nats": ("eval loss", "{:.4f}".format),
    "eval/perplexity": ("perplexity", "{:.2f}".format),
    "eval/accuracy": ("eval accuracy", "{:.3f}".format),
    "eval/reward": ("eval reward", "{:.3f}".format),
    "test/loss_nats": ("test loss", "{:.4f}".format),
    "test/perplexity": ("perplexity", "{:.2f}".format),
}
"""What the console shows of a record, in this order: metric -> label, format."""


class TensorBoardSink:
    """Scalars and events as TensorBoard files; matrices are left to metrics.jsonl."""

    def __init__(self, folder: Path, resume_step: int) -> None:
        module = optional_package("torch.utils.tensorboard", "log.tensorboard = true", "tensorboard")
        # purge_step hides what an earlier process wrote of steps that run again.
        self._writer = module.SummaryWriter(str(folder), purge_step=resume_step + 1)

    def write(self, step: int, values: Mapping[str, Reported]) -> None:
        """Every scalar of a step."""
        for name, value in values.items():
            if isinstance(value, float | int):
                self._writer.add_scalar(name, value, step)

    def message(self, step: int, text: str, facts: Mapping[str, object]) -> None:
        """The text and the facts, on the text page."""
        self._writer.add_text("event", f"{text} {dict(facts) or ''}", step)

    def close(self) -> None:
        """Everything is on disk afterwards."""
        self._writer.close()


class WandbSink:
    """Scalars and events on Weights & Biases; matrices are left to metrics.jsonl.

    A resumed run goes on in the same W&B run (its id is kept in `<run_dir>/wandb_id`). W&B cannot take back
    what it was told, so steps that run again appear twice there; the x axis is our step, not W&B's counter.
    """

    def __init__(self, project: str, run_dir: Path, settings: Mapping[str, object]) -> None:
        wandb = optional_package("wandb", f"log.wandb_project = {project!r}", "wandb")
        id_file = run_dir / "wandb_id"
        if not id_file.exists():
            id_file.write_text(uuid.uuid4().hex[:12])
        self._run = wandb.init(
            project=project,
            id=id_file.read_text(),
            name=run_dir.name,
            dir=str(run_dir),
            config=dict(settings),
            resume="allow",
        )
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, values: Mapping[str, Reported]) -> None:
        """Every scalar of a step."""
        scalars = {name: value for name, value in values.items() if isinstance(value, float | int)}
        self._run.log({"step": step, **scalars})

    def message(self, step: int, text: str, facts: Mapping[str, object]) -> None:
        """The text and the facts, as a string of the step."""
        self._run.log({"step": step, "event": f"{text} {dict(facts) or ''}"})

    def close(self) -> None:
        """Everything is sent afterwards."""
        self._run.finish()


def optional_package(module: str, setting: str, package: str) -> Any:
    """The module, imported because `setting` asks for it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"{setting} needs `pip install {package}`; install it or unset it") from error
