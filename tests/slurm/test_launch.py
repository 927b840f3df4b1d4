"""`mcore-rl launch`, `jobs` and `attach` as a user types them, and a node that fails again and again meanwhile."""

import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.slurm.cluster import ENDED, Cluster
from tests.slurm.training import ends, job, losses, submit

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
HELD = "held"
"""File that keeps the jobs of `folder` in the checks of their nodes while it is there."""
PIPELINE = """
name = "both"
[pretrain]
config = "data/pretrain.toml"
fields = ["run_dir=launched", "train.steps=6", "checkpoint.interval=3", "mesh.tp=2", "mesh.ep=2"]
nodes = 2
[sft]
config = "data/sft.toml"
fields = ["run_dir=tuned", "train.steps=3", "checkpoint.load=launched", "checkpoint.load_optimizer=false",
  "data.train=['answers.jsonl']"]
nodes = 1
[convert]
arguments = ["export", "tuned", "exported"]
"""
ON_N2 = """
import os, pathlib, signal, sys, time

run = pathlib.Path(next(word for word in sys.argv if word.startswith("run_dir=")).partition("=")[2])
node, attempt = os.environ["SLURMD_NODENAME"], run / f"ranks/{os.environ.get('SLURM_RESTART_COUNT', 0)}"
attempt.mkdir(parents=True, exist_ok=True)
(attempt / node).touch()
while len(list(attempt.iterdir())) < 2:
    time.sleep(0.1)
if node == "n2":
    os.kill(os.getpid(), signal.SIGKILL)
if (attempt / "n2").exists():
    time.sleep(60)
(run / "DONE").touch()
"""


def mcore_rl(cluster: Cluster, *words: object, within_s: float = 300) -> "subprocess.CompletedProcess[str]":
    path = f"PYTHONPATH={cluster.code}"
    return cluster.attempt("env", path, cluster.python, "-m", "mcore_rl.cli.cli", *words, within_s=within_s)


@pytest.fixture
def folder(cluster: Cluster) -> Path:
    """The working folder, with the config of the cluster and of a pipeline."""
    wait = f'[checks]\npre_node = ["while [ -e {cluster.shared / HELD} ]; do sleep 0.2; done"]'
    settings = CLUSTER.format(python=cluster.python).replace("[checks]", wait)
    for name, text in (("cluster.toml", settings), ("pipeline.toml", PIPELINE)):
        (cluster.shared / name).write_text(text)
    return cluster.shared


@dataclass(frozen=True)
class Failing:
    """A job on two nodes whose rank is killed whenever it runs on n2."""

    id: str
    run_dir: Path


@pytest.fixture(scope="module", autouse=True)
def failing(cluster: Cluster) -> Failing:
    """Submitted before all tests: it mostly waits to be requeued."""
    (cluster.shared / "fails_on_n2.py").write_text(ON_N2)
    script = job(cluster, "failing", module="fails_on_n2", starter="srun", max_attempts=4)
    return Failing(submit(cluster, script), Path(script.run_dir))


def test_a_pipeline_is_shown_submitted_attached_to_and_goes_on_when_its_failed_stage_is_mended(
    cluster: Cluster, folder: Path
) -> None:
    good = (cluster.shared / "data/chat.jsonl").read_text()
    (folder / "answers.jsonl").write_text(good.replace('"line 6"', '"line 6', 1))
    words = ("launch", "pipeline.toml", "--cluster", "cluster.toml", "--allow-dirty", "--allow-tp-across-nodes")
    shown = mcore_rl(cluster, *words, "--dry-run")
    assert shown.returncode == 0 and "to start at" in shown.stderr, shown.stderr
    assert not (folder / "launched").exists()

    (folder / HELD).touch()
    launched = mcore_rl(cluster, *words)
    assert launched.returncode == 0, launched.stderr
    pretrain, sft, convert = launched.stdout.split()
    assert cluster.job(sft)["Dependency"].startswith(f"afterok:{pretrain}")
    again = mcore_rl(cluster, *words)
    assert again.returncode == 2 and f'launched" is in use by job {pretrain}' in again.stderr
    assert {"PENDING", "RUNNING"} & set(mcore_rl(cluster, "jobs", "tuned").stdout.split())
    cluster.until_state(pretrain, ["RUNNING"], 60)
    last = cluster.hosts(pretrain)[-1]
    attached = mcore_rl(
        cluster, "attach", "launched", "--node", last, "--", "sh", "-c", "echo $SLURM_JOB_ID on $(hostname)"
    )
    assert attached.stdout == f"{pretrain} on {last}\n", attached.stderr
    (folder / HELD).unlink()

    # The seventh line of the data of the middle stage is broken: that stage fails, and the last one never starts.
    assert cluster.until_state(sft, ENDED, 600) == "FAILED"
    assert cluster.until_state(convert, ENDED, 60) == "CANCELLED"
    assert cluster.state(pretrain) == "COMPLETED"
    cause = "DataError: answers.jsonl:7: not JSON"
    log = (folder / f"tuned/logs/{sft}.log").read_text().splitlines()
    assert "first cause: rank " in log[1] and cause in log[1], log
    lines = mcore_rl(cluster, "jobs", "tuned", "runs/pipeline/convert").stdout.splitlines()
    assert cause in lines[1] and f"not started: both-sft (job {sft}, " in lines[2] and cause in lines[2], lines
    (folder / "answers.jsonl").write_text(good)
    trained = (folder / "launched/metrics.jsonl").read_bytes()
    mended = mcore_rl(cluster, *words)
    assert mended.returncode == 0 and "pretrain: finished and skipped" in mended.stderr, mended.stderr
    sft, convert = mended.stdout.split()
    assert cluster.until_state(convert, ENDED, 600) == "COMPLETED"
    assert (folder / "launched/metrics.jsonl").read_bytes() == trained
    assert (folder / "exported/model.safetensors").exists()

    assert list(losses(folder / "launched")) == list(range(1, 7)) and len(losses(folder / "tuned")) == 3
    assert (folder / "launched/launch/0/code/mcore_rl/programs/pretrain.py").exists()
    script = (folder / "launched/launch/0/job.sbatch").read_text()
    assert script == shown.stdout.partition("\n#!/")[0]

    lines = mcore_rl(cluster, "jobs", "launched", "tuned").stdout.splitlines()
    assert [line.split()[:5] for line in lines[1:]] == [
        ["launched", pretrain, "DONE", "1", "6"],
        ["tuned", sft, "DONE", "1", "3"],
    ]


@pytest.mark.full
def test_a_check_runs_doctor_on_every_node_and_names_what_differs(cluster: Cluster, folder: Path) -> None:
    """Nodes of one machine are alike: a variable that the cluster's own commands set tells them apart."""
    differs = 'setup = ["export OMP_NUM_THREADS=$((SLURM_NODEID + 1))"]'
    text = CLUSTER.format(python=cluster.python).replace("[checks]", f"{differs}\n[checks]")
    (folder / "differing.toml").write_text(text)
    words = ("launch", "data/pretrain.toml", "--nodes", "2", "--nodelist", "n4,n5", "--allow-dirty", "--check")
    done = mcore_rl(cluster, *words, "--cluster", "differing.toml", "run_dir=checked", within_s=600)
    assert done.returncode == 1, done.stdout + done.stderr
    job, *lines = done.stdout.splitlines()
    assert cluster.hosts(job) == ["n4", "n5"]
    assert [line for line in lines if line in ("n4:", "n5:")] == ["n4:", "n5:"] and lines[0] == "n4:"
    assert [line for line in lines if line.startswith(("DIFFERS", "FAULT"))] == [
        "DIFFERS    limits variables OMP_NUM_THREADS: 1 on n4; 2 on n5"
    ]
    assert lines[-1] == "faulty"
    assert not (folder / "checked/metrics.jsonl").exists()


def test_a_node_that_fails_three_times_is_left_out_and_is_the_first_cause_each_time(
    cluster: Cluster, failing: Failing
) -> None:
    assert cluster.until_state(failing.id, ENDED, 200) == "COMPLETED"
    assert ends(failing.run_dir) == [("crash", "requeue")] * 3 + [("finished", "0")]
    ended = cluster.job(failing.id)
    assert (ended["ExcNodeList"], ended["Restarts"]) == ("n2", "3")
    assert "n2" not in cluster.hosts(failing.id)
    lines = (failing.run_dir / f"logs/{failing.id}.log").read_text().splitlines()
    for attempt in range(3):
        said = [line.partition(f"[{failing.id}.{attempt}] ")[2] for line in lines]
        first, second = [line for line in said if line][:2]
        assert (
            first.startswith("on n[1-2], from step 0") and second == "first cause: rank 1 on n2 was killed by SIGKILL"
        )
    assert any("n2 crashed in 3 of the last 10 attempts: it is excluded" in line for line in lines)
