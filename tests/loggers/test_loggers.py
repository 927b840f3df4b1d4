"""Sinks of MLflow, SwanLab and Trackio with the packages themselves, without a network: `make test-loggers`."""

import json
import sqlite3
from pathlib import Path

import mlflow
import pytest

from mcore_rl.config.run import LogConfig
from mcore_rl.metrics.metrics import Metric
from mcore_rl.metrics.sinks import open_log

SAMPLE = {"problem": "p", "prompt": "12=", "completion": "21", "answer": "21", "reward": 1.0, "tokens": 2}


def logged_in_two_starts(run_dir: Path, sink: str) -> None:
    """Two starts of a run of four steps, with an event and samples."""
    config = LogConfig(sinks=("jsonl", sink), project="mine", group="arm", tags=("a",), name="first")  # type: ignore[arg-type]
    for resume_step in (0, 2):
        log = open_log(run_dir, config, resume_step, 4, {"optim": {"lr": 0.5}})
        for step in (resume_step + 1, resume_step + 2):
            log.write(step, [Metric("train/loss_nats", 10.0 * step)])
            log.message("checkpoint saved")
            log.samples([SAMPLE])
        log.close()


def test_mlflow_has_one_run_with_all_steps_a_table_and_the_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri(f"file://{tmp_path}/mlruns")
    logged_in_two_starts(tmp_path / "run", "mlflow")
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
    history = client.get_metric_history(run.info.run_id, "train/loss_nats")
    assert [(one.step, one.value) for one in history] == [(1, 10.0), (2, 20.0), (3, 30.0), (4, 40.0)]
    assert run.data.tags["group"] == "arm" and run.data.tags["a"] == "true" and run.info.run_name == "first"
    assert run.data.tags["event"].startswith("step 4: checkpoint saved")
    table = json.loads(Path(client.download_artifacts(run.info.run_id, "samples/step_0000003.json")).read_text())
    assert table == {"columns": ["prompt", "completion", "answer", "reward"], "data": [["12=", "21", "21", 1.0]]}
    config = Path(client.download_artifacts(run.info.run_id, "config.json"))
    assert json.loads(config.read_text()) == {"optim": {"lr": 0.5}}


def test_trackio_has_one_run_with_all_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trackio.utils.TRACKIO_DIR", tmp_path / "trackio")
    monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", tmp_path / "trackio")
    logged_in_two_starts(tmp_path / "run", "trackio")
    with sqlite3.connect(tmp_path / "trackio/mine.db") as database:
        rows = database.execute("select run_name, step, metrics from metrics order by id").fetchall()
    assert {name for name, _, _ in rows} == {(tmp_path / "run/trackio_id").read_text()}
    values = [(step, json.loads(text)) for _, step, text in rows]
    losses = [(step, found["train/loss_nats"]) for step, found in values if "train/loss_nats" in found]
    assert losses == [(1, 10.0), (2, 20.0), (3, 30.0), (4, 40.0)]
    assert [step for step, found in values if "samples" in found] == [1, 2, 3, 4]


def test_swanlab_keeps_a_run_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    logged_in_two_starts(tmp_path / "run", "swanlab")
    known = (tmp_path / "run/swanlab_id").read_text()
    files = list((tmp_path / "run/swanlab").rglob(f"run-{known}.swanlab"))
    assert files and all(b"train/loss_nats" in file.read_bytes() for file in files)
