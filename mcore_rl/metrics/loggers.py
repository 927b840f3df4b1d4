"""Sinks of log.sinks: TensorBoard, Weights & Biases, MLflow, SwanLab and Trackio, each through its own library.

A resumed run continues the same run in the service, by an id in `run_dir`. None of the services can delete records, so
steps that run again appear twice; TensorBoard hides the first.
"""

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from mcore_rl.config.extension import optional_package
from mcore_rl.metrics.metric_table import Reported
from mcore_rl.metrics.sinks import LoggedRun

COLUMNS = ("prompt", "completion", "answer", "reward")
"""Fields of a sample that are columns of a table."""


class TensorBoardSink:
    """Sink of scalars and events as TensorBoard files; matrices go to metrics.jsonl only."""

    def __init__(self, run: LoggedRun) -> None:
        module = optional_package("torch.utils.tensorboard", 'log.sinks="tensorboard"', "tensorboard")
        # purge_step hides records that an earlier process wrote for steps which run again.
        self._writer = module.SummaryWriter(str(run.run_dir / "tensorboard"), purge_step=run.resume_step + 1)

    def write(self, step: int, values: Mapping[str, Reported]) -> None:
        for name, value in _scalars(values).items():
            self._writer.add_scalar(name, value, step)

    def message(self, step: int, text: str, fields: Mapping[str, object]) -> None:
        """Write the text and the fields on the text page."""
        self._writer.add_text("event", _event(text, fields), step)

    def close(self) -> None:
        """Return when everything is on disk."""
        self._writer.close()


class _RunSink:
    """Sink on a service whose library has a run with `log` and `finish`; matrices go to metrics.jsonl only."""

    _library: Any
    _run: Any

    def write(self, step: int, values: Mapping[str, Reported]) -> None:
        self._log(step, _scalars(values))

    def message(self, step: int, text: str, fields: Mapping[str, object]) -> None:
        self._log(step, {"event": _event(text, fields)})

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        self._log(step, {"samples": self._library.Table(columns=list(COLUMNS), data=_cells(rows))})

    def close(self) -> None:
        self._run.finish()

    def _log(self, step: int, values: Mapping[str, object]) -> None:
        self._run.log(dict(values), step=step)


class WandbSink(_RunSink):
    """Sink on Weights & Biases. The x axis is our step, not W&B's counter."""

    def __init__(self, run: LoggedRun) -> None:
        self._library = _library("wandb")
        self._run = self._library.init(
            project=run.project,
            entity=run.entity,
            group=run.group,
            tags=run.tags or None,
            id=_id_of(run, "wandb"),
            name=run.name,
            dir=str(run.run_dir),
            config=dict(run.settings),
            resume="allow",
        )
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def _log(self, step: int, values: Mapping[str, object]) -> None:
        self._run.log({"step": step, **values})


class MlflowSink:
    """Sink on MLflow, at MLFLOW_TRACKING_URI; the newest event is a tag, samples are tables among the artifacts."""

    def __init__(self, run: LoggedRun) -> None:
        self._mlflow = _library("mlflow")
        self._mlflow.set_experiment(run.project)
        tags = dict.fromkeys(run.tags, "true") | ({"group": run.group} if run.group else {})
        known = _known_id(run, "mlflow")
        started = self._mlflow.start_run(run_id=known, run_name=run.name, tags=tags, log_system_metrics=False)
        if known is None:
            _keep_id(run, "mlflow", started.info.run_id)
            self._mlflow.log_dict(dict(run.settings), "config.json")

    def write(self, step: int, values: Mapping[str, Reported]) -> None:
        self._mlflow.log_metrics(_scalars(values), step=step)

    def message(self, step: int, text: str, fields: Mapping[str, object]) -> None:
        """Set the tag `event`."""
        self._mlflow.set_tag("event", f"step {step}: {_event(text, fields)}"[:MOST_OF_TAG])

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write a table as an artifact."""
        self._mlflow.log_dict({"columns": list(COLUMNS), "data": _cells(rows)}, f"samples/step_{step:07d}.json")

    def close(self) -> None:
        """End the run in MLflow."""
        self._mlflow.end_run()


class SwanlabSink(_RunSink):
    """Sink on SwanLab; SWANLAB_MODE=offline keeps a run in `<run_dir>/swanlab`."""

    def __init__(self, run: LoggedRun) -> None:
        self._library = _library("swanlab")
        self._run = self._library.init(
            project=run.project,
            workspace=run.entity,
            name=run.name,
            group=run.group,
            tags=list(run.tags) or None,
            id=_id_of(run, "swanlab"),
            resume="allow",
            log_dir=str(run.run_dir / "swanlab"),
            config=dict(run.settings),
        )

    def message(self, step: int, text: str, fields: Mapping[str, object]) -> None:
        """Write the text and the fields as a text of the step."""
        self._log(step, {"event": self._library.Text(_event(text, fields))})

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write a text for each sample, with its reward as caption, because there are no tables."""
        texts = [
            self._library.Text(f"{row['prompt']}\n{row['completion']}", caption=f"reward {row['reward']}")
            for row in rows
        ]
        self._log(step, {"samples": texts})


class TrackioSink(_RunSink):
    """Sink on Trackio; its files are on this machine, in TRACKIO_DIR."""

    def __init__(self, run: LoggedRun) -> None:
        self._library = _library("trackio")
        known = _known_id(run, "trackio")
        self._run = self._library.init(
            project=run.project,
            name=known or f"{run.name}-{uuid.uuid4().hex[:6]}",  # the run's id in Trackio
            group=run.group,
            config=dict(run.settings),
            resume="allow" if known else "never",
            embed=False,
        )
        if known is None:
            _keep_id(run, "trackio", self._run.name)


MOST_OF_TAG = 5000


def _library(sink: str) -> Any:
    return optional_package(sink, f'log.sinks="{sink}"', f"'mcore-rl[{sink}]'")


def _scalars(values: Mapping[str, Reported]) -> dict[str, float]:
    return {name: value for name, value in values.items() if isinstance(value, float | int)}


def _event(text: str, fields: Mapping[str, object]) -> str:
    return f"{text} {dict(fields)}" if fields else text


def _cells(rows: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    return [[row.get(name) for name in COLUMNS] for row in rows]


def _id_of(run: LoggedRun, sink: str) -> str:
    """Return the run's id in the service, from `run_dir`; if there is none, make it and write it there."""
    if (known := _known_id(run, sink)) is None:
        known = uuid.uuid4().hex[:12]
        _keep_id(run, sink, known)
    return known


def _known_id(run: LoggedRun, sink: str) -> str | None:
    path = run.run_dir / f"{sink}_id"
    return path.read_text(encoding="utf-8") if path.exists() else None


def _keep_id(run: LoggedRun, sink: str, known: str) -> None:
    (run.run_dir / f"{sink}_id").write_text(known, encoding="utf-8")
