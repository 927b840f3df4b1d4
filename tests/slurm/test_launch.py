"""`mcore-rl launch` and `mcore-rl jobs` as a user types them."""

import subprocess
from pathlib import Path

import pytest

from tests.slurm.cluster import ENDED, Cluster
from tests.slurm.training import losses

CLUSTER = """
name = "throw-away"
environment = {{ GLOO_SOCKET_IFNAME = "eth0", OMP_NUM_THREADS = "1" }}
[slurm]
partition = "batch"
time = "30"
exclusive = false
gpus_by = "none"
[node]
gpus = 0
ranks = 1
memory_gib = 1
[python]
command = "{python}"
[checks]
node = false
[survival]
signal_s = 60
"""
PIPELINE = """
name = "both"
[pretrain]
config = "data/pretrain.toml"
fields = ["run_dir=launched", "train.steps=6", "checkpoint.interval=3", "mesh.tp=2", "mesh.pp=2", "mesh.ep=2"]
nodes = 4
[sft]
config = "data/sft.toml"
fields = ["run_dir=tuned", "train.steps=3", "checkpoint.load=launched", "checkpoint.load_optimizer=false",
  "mesh.dp=auto"]
nodes = 2
"""


def mcore_rl(cluster: Cluster, *words: object) -> "subprocess.CompletedProcess[str]":
    """The command on the login node."""
    path = f"PYTHONPATH={cluster.code}"
    return cluster.attempt("env", path, cluster.python, "-m", "mcore_rl.run.cli", *words)


@pytest.fixture
def folder(cluster: Cluster) -> Path:
    """The working folder, with the config of the cluster and of a pipeline."""
    for name, text in (("cluster.toml", CLUSTER.format(python=cluster.python)), ("pipeline.toml", PIPELINE)):
        (cluster.shared / name).write_text(text)
    return cluster.shared


def test_a_pipeline_is_shown_submitted_runs_to_its_end_and_is_told_of(cluster: Cluster, folder: Path) -> None:
    words = (
        "launch",
        "pipeline.toml",
        "--cluster",
        "cluster.toml",
        "--allow-dirty",
        "--allow-tp-across-nodes",
    )
    shown = mcore_rl(cluster, *words, "--dry-run")
    assert shown.returncode == 0 and "to start at" in shown.stderr, shown.stderr
    assert not (folder / "launched").exists()

    launched = mcore_rl(cluster, *words)
    assert launched.returncode == 0, launched.stderr
    pretrain, sft = launched.stdout.split()
    assert cluster.job(sft)["Dependency"].startswith(f"afterok:{pretrain}")
    again = mcore_rl(cluster, *words)
    assert again.returncode == 2 and f'launched" is in use by job {pretrain}' in again.stderr
    assert {"PENDING", "RUNNING"} & set(mcore_rl(cluster, "jobs", "tuned").stdout.split())

    assert cluster.until_state(sft, ENDED, 600) == "COMPLETED"
    assert cluster.state(pretrain) == "COMPLETED"
    assert list(losses(folder / "launched")) == list(range(1, 7)) and len(losses(folder / "tuned")) == 3
    assert (folder / "launched/launch/0/code/mcore_rl/run/pretrain.py").exists()
    script = (folder / "launched/launch/0/job.sbatch").read_text()
    assert script == shown.stdout.partition("\n#!/")[0]

    told = mcore_rl(cluster, "jobs", "launched", "tuned").stdout.splitlines()
    assert [line.split()[:5] for line in told[1:]] == [
        ["launched", pretrain, "DONE", "1", "6"],
        ["tuned", sft, "DONE", "1", "3"],
    ]
