"""Limits, preemption, cancelling, arrays and heterogeneous jobs, on one rank."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.launch.job import STATUS, JobOptions, JobScript, Servers
from tests.slurm.cluster import ENDED, Cluster
from tests.slurm.training import BEGIN_S, ends, job, losses, saved_step, signal_rank, submit

ONE_RANK: dict[str, Any] = {"nodes": 1, "starter": "srun"}


def test_the_time_limit_preemption_and_people_end_attempts_each_in_its_own_way(cluster: Cluster) -> None:
    words = ("train.steps=20000", "log.interval=10")
    script = job(cluster, "limited", *words, **ONE_RANK, time="30", signal_s=90)
    run_dir = Path(script.run_dir)
    id_ = submit(cluster, script)
    cluster.until(lambda: losses(run_dir), "a step is reported", BEGIN_S)
    # One to two minutes are left: Slurm, which looks every 30 s, sends the signal when it looks next. The run stands
    # still until then, as its steps would only take the other tests' time.
    hours, minutes, _ = map(int, cluster.job(id_)["RunTime"].split(":"))
    cluster.run("scontrol", "update", f"JobId={id_}", f"TimeLimit={60 * hours + minutes + 2}")
    (node,), log = cluster.hosts(id_), run_dir / f"logs/{id_}.log"
    signal_rank(cluster, node, "STOP")
    cluster.until(lambda: "signal: limit" in log.read_text(), "the limit is near", 120)
    signal_rank(cluster, node, "CONT")
    cluster.until(lambda: cluster.job(id_)["Restarts"] == "1", "it is requeued", 60)
    assert ends(run_dir) == [("limit", "requeue")]
    assert 0 < saved_step(run_dir) < 20000
    cluster.run("scontrol", "update", f"JobId={id_}", "TimeLimit=30", as_root=True)

    gets_on(cluster, run_dir)
    second = submit(cluster, script)
    assert cluster.until_state(second, ENDED, 60) == "FAILED"
    assert cluster.job(second)["ExitCode"] == f"{STATUS['in_use']}:0"

    urgent = ["--partition=urgent", "--nodes=5", "--exclusive", "--output=/dev/null", "--wrap=true"]
    cluster.run("sbatch", "--wait", *urgent)
    assert cluster.job(id_)["Restarts"] == "2"
    assert ends(run_dir, id_)[1] == ("preempted", str(STATUS["cancelled"]))
    gets_on(cluster, run_dir)
    cluster.run("scancel", id_)
    cluster.until(lambda: ends(run_dir, id_)[-1] == ("term", str(STATUS["cancelled"])), "it has left", 60)
    # Not pending again: in that state nothing of the job is left that could requeue it.
    assert cluster.until_state(id_, ENDED, 60) == "CANCELLED" and not (run_dir / "DONE").exists()

    again = submit(cluster, dataclasses.replace(script, options=JobOptions(time="30")))
    gets_on(cluster, run_dir)
    saved = saved_step(run_dir)
    (run_dir / "STOP").touch()
    assert cluster.until_state(again, ENDED, 60) == "FAILED" and saved_step(run_dir) > saved
    assert cluster.job(again)["ExitCode"] == f"{STATUS['stopped']}:0"


@pytest.mark.full
def test_a_job_whose_python_would_import_other_code_than_its_copy_ends_at_once(cluster: Cluster) -> None:
    """A line of the set-up, as a module's, puts another checkout first; a file that changed after launch does not."""
    other = cluster.shared / "checkout"
    (other / "mcore_rl").mkdir(parents=True)
    (other / "mcore_rl/__init__.py").touch()
    (cluster.shared / "keys.env").write_text(f"PYTHONPATH={other}\n")
    keys = {"environment_file": str(cluster.shared / "keys.env")}
    right = job(cluster, "own_code", "train.steps=2", **ONE_RANK, **keys)
    wrong = job(cluster, "other_code", **ONE_RANK, setup=(f"export PYTHONPATH={other}:$PYTHONPATH",))
    first, second = submit(cluster, right), submit(cluster, wrong)
    assert cluster.until_state(second, ENDED, 120) == "FAILED"
    assert cluster.job(second)["ExitCode"] == f"{STATUS['refused']}:0"
    assert ends(Path(wrong.run_dir)) == [("refused", "2")] and not losses(Path(wrong.run_dir))
    log = Path(wrong.run_dir, f"logs/{second}.log").read_text()
    assert f"imported from {other}, and not from the copy of the code of this job, {cluster.code}" in log
    assert cluster.until_state(first, ENDED, 240) == "COMPLETED" and len(losses(Path(right.run_dir))) == 2


def gets_on(cluster: Cluster, run_dir: Path) -> None:
    """A step is reported that was not reported before."""
    reached = max(losses(run_dir))
    cluster.until(lambda: max(losses(run_dir)) > reached, f"a step after {reached}", BEGIN_S)


@pytest.mark.full
def test_an_array_trains_one_run_for_each_seed(cluster: Cluster) -> None:
    script = job(cluster, "seeds", "train.steps=4", **ONE_RANK, array="3-4")
    id_ = submit(cluster, script)
    states = [cluster.until_state(f"{id_}_{seed}", ENDED, BEGIN_S) for seed in (3, 4)]
    assert states == ["COMPLETED"] * 2
    runs = [losses(Path(script.run_dir, str(seed))) for seed in (3, 4)]
    assert [len(run) for run in runs] == [4, 4] and runs[0] != runs[1]


@pytest.mark.full
def test_a_heterogeneous_job_tells_the_program_its_servers_and_ends_them_with_it(cluster: Cluster) -> None:
    servers = Servers(
        nodes=2,
        command=f"exec {cluster.python} -m http.server 8123",
        sbatch=("--time=30",),
        program_arguments=(f"data.cache_dir={cluster.shared}/cache_of_{{hosts}}",),
    )
    script: JobScript = job(cluster, "servers", "train.steps=4", **ONE_RANK, servers=servers)
    id_ = submit(cluster, script)
    cluster.until_state(id_, ["RUNNING"], 60)
    hosts = cluster.hosts(f"{id_}+1")
    for host in hosts:
        look = f"import urllib.request; print(urllib.request.urlopen('http://{host}:8123').status)"
        cluster.until(
            lambda look=look: cluster.attempt(cluster.python, "-c", look).stdout == "200\n", f"{host} serves", 30
        )
    assert cluster.until_state(id_, ENDED, BEGIN_S) == "COMPLETED"
    assert cluster.until_state(f"{id_}+1", ENDED, 60) == "COMPLETED"
    assert (cluster.shared / f"cache_of_{','.join(hosts)}").is_dir()
    assert len(losses(Path(script.run_dir))) == 4
