"""Jobs that depend on each other, on nodes of which one is unfit; meanwhile a job whose ranks hang and die.

Their pretraining, which nothing interrupts, is also what runs are compared with that lose a daemon or a node.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from mcore_rl.launch.job import STATUS
from tests.slurm.cluster import ENDED, Cluster
from tests.slurm.training import (
    BEGIN_S,
    PROGRAM,
    STEPS,
    ends,
    interrupt,
    job,
    kill_rank,
    losses,
    rl_words,
    saved_step,
    submit,
    uninterrupted,
)

FILLED = "/dev/shm/filled"


@dataclass(frozen=True)
class Pipeline:
    """Ids of jobs, each depending on the one before."""

    pretrain: str
    convert: str
    rl: str
    run_dir: Path
    rl_dir: Path


@dataclass(frozen=True)
class Crashing:
    """Ids of a job that always crashes, and of two that wait for it, one after the other."""

    id: str
    waiting: tuple[str, str]
    run_dir: Path


@pytest.fixture(scope="module", autouse=True)
def pipeline(cluster: Cluster) -> Pipeline:
    """Pretraining on two nodes, on the first try with n2, whose shared memory is full; conversion; RL.

    They are submitted before all tests, and run on n1, n2 and n3.
    """
    cluster.run("fallocate", "-l", "60M", FILLED, node="n2")
    three = {"exclude": "n4,n5"}
    pretraining = uninterrupted(cluster, "pretrain", node_check=True, **three)
    first = submit(cluster, pretraining)
    last_checkpoint = f"{pretraining.run_dir}/checkpoints/iter_{STEPS:07d}"
    converted = cluster.shared / "converted"
    conversion = job(
        cluster,
        "convert",
        program="convert",
        module="mcore_rl.cli.cli",
        arguments=("convert", "relayout", last_checkpoint, str(converted), "--keys", "te"),
        is_training=False,
        starter="once",
        nodes=1,
        dependency=f"afterok:{first}",
        **three,
    )
    second = submit(cluster, conversion)
    tuning = job(
        cluster,
        "rl",
        program="rl",
        module="mcore_rl.programs.rl",
        arguments=rl_words(cluster, converted),
        starter="srun",
        nodes=2,
        dependency=f"afterok:{second}",
        **three,
    )
    third = submit(cluster, tuning)
    return Pipeline(first, second, third, Path(pretraining.run_dir), Path(tuning.run_dir))


@pytest.fixture(scope="module", autouse=True)
def crashing(cluster: Cluster, pipeline: Pipeline) -> Crashing:
    """Submitted before all tests too: it mostly waits to be requeued."""
    script = job(cluster, "crashing", python="/bin/false", max_attempts=2, nodes=2, exclude="n4,n5")
    first = submit(cluster, script)
    second = submit(cluster, job(cluster, "waiting", dependency=f"afterok:{first}"))
    third = submit(cluster, job(cluster, "waiting_too", dependency=f"afterok:{second}"))
    return Crashing(first, (second, third), Path(script.run_dir))


def test_a_run_that_hangs_is_killed_and_is_asked_to_save_ends_bit_equal(cluster: Cluster, pipeline: Pipeline) -> None:
    script = uninterrupted(cluster, "interrupted", nodelist="n4,n5")
    script = replace(script, arguments=(*script.arguments, "train.hang_s=20"))
    run_dir = Path(script.run_dir)
    id_ = submit(cluster, script)

    def second() -> str:
        return cluster.hosts(id_)[1]

    def ask_to_save() -> None:
        cluster.run("scancel", "--batch", "--signal=USR1", id_)

    interrupt(cluster, id_, run_dir, lambda: cluster.run("pkill", "-STOP", "-f", PROGRAM, node=second()), 180)
    interrupt(cluster, id_, run_dir, lambda: kill_rank(cluster, second()), 60)
    interrupt(cluster, id_, run_dir, ask_to_save, 60)

    assert cluster.until_state(id_, ENDED, 400) == "COMPLETED"
    assert cluster.until_state(pipeline.pretrain, ENDED, 600) == "COMPLETED"
    assert losses(run_dir) == losses(pipeline.run_dir) and len(losses(run_dir)) == STEPS
    ended = ["hang requeue", "crash requeue", "limit requeue", "finished 0"]
    assert [" ".join(end) for end in ends(run_dir)] == ended
    crash = json.loads((run_dir / f"logs/{id_}.1/failure.json").read_text())
    headline = "rank 1 on n5 was killed by SIGKILL"
    log = (run_dir / f"logs/{id_}.log").read_text()
    assert crash["headline"] == headline and f"[{id_}.1] first cause: {headline}\n" in log


def test_each_job_of_a_pipeline_starts_when_the_one_before_has_succeeded(cluster: Cluster, pipeline: Pipeline) -> None:
    cluster.until_state(pipeline.rl, ENDED, 600)
    jobs = [cluster.job(job) for job in (pipeline.pretrain, pipeline.convert, pipeline.rl)]
    assert [job["JobState"] for job in jobs] == ["COMPLETED"] * 3
    assert jobs[0]["EndTime"] <= jobs[1]["StartTime"] <= jobs[1]["EndTime"] <= jobs[2]["StartTime"]
    records = [json.loads(line) for line in (pipeline.rl_dir / "metrics.jsonl").read_text().splitlines()]
    assert len([record for record in records if "policy/loss" in record]) == 10


def test_an_unfit_node_is_named_and_excluded_and_the_job_runs_without_it(cluster: Cluster, pipeline: Pipeline) -> None:
    cluster.until_state(pipeline.pretrain, ENDED, 600)
    assert ends(pipeline.run_dir) == [("unfit", "requeue"), ("finished", "0")]
    ended = cluster.job(pipeline.pretrain)
    excluded = cluster.run("scontrol", "show", "hostnames", ended["ExcNodeList"]).split()
    assert (set(excluded), ended["Restarts"]) == ({"n2", "n4", "n5"}, "1")
    assert len(cluster.hosts(pipeline.pretrain)) == 2 and "n2" not in cluster.hosts(pipeline.pretrain)
    logs = pipeline.run_dir / "logs" / f"{pipeline.pretrain}.0"
    unfit, fit = (logs / f"check-{node}.log" for node in ("n2", "n1"))
    assert "UNFIT: /dev/shm has 4 MiB free" in unfit.read_text()
    assert fit.read_text().endswith("fit\n") and "UNFIT" not in fit.read_text()


def test_a_job_that_always_crashes_gives_up_and_what_depends_on_it_is_cancelled(
    cluster: Cluster, crashing: Crashing
) -> None:
    assert cluster.until_state(crashing.id, ENDED, 120) == "FAILED"
    ended = cluster.job(crashing.id)
    assert (ended["ExitCode"], ended["Restarts"]) == (f"{STATUS['crash_loop']}:0", "1")
    assert ends(crashing.run_dir) == [("crash", "requeue"), ("crash", str(STATUS["crash_loop"]))]
    assert {cluster.until_state(job, ENDED, 60) for job in crashing.waiting} == {"CANCELLED"}


@pytest.fixture
def alone(cluster: Cluster, pipeline: Pipeline) -> Path:
    """The folder of the pretraining, which nothing interrupted; n1, n2 and n3 are idle again, and all fit."""
    cluster.until_state(pipeline.rl, ENDED, 600)
    cluster.run("rm", "-f", FILLED, node="n2")
    return pipeline.run_dir


@pytest.mark.full
def test_a_run_that_loses_a_daemon_and_is_requeued_by_hand_ends_bit_equal(cluster: Cluster, alone: Path) -> None:
    script = uninterrupted(cluster, "deserted", exclude="n4,n5")
    run_dir = Path(script.run_dir)
    id_ = submit(cluster, script)
    nodes: list[str] = []

    def lose_daemon() -> None:
        """The node with rank 0 and the batch script is lost while the run stands still."""
        nodes.extend(cluster.hosts(id_))
        cluster.kill_slurmd(nodes[0])
        for node in nodes:
            cluster.run("pkill", "-STOP", "-f", PROGRAM, node=node, as_root=True)

    interrupt(cluster, id_, run_dir, lose_daemon, 120)
    cluster.until_state(id_, ["RUNNING"], 120)
    cluster.run("pkill", "-CONT", "-f", PROGRAM, node=nodes[0], as_root=True)  # the orphans go on
    interrupt(cluster, id_, run_dir, lambda: cluster.run("scontrol", "requeue", id_), 60)

    assert cluster.until_state(id_, ENDED, 400) == "COMPLETED"
    assert losses(run_dir) == losses(alone) and len(losses(run_dir)) == STEPS
    assert [" ".join(end) for end in ends(run_dir)] == ["lost orphan", "term 143", "finished 0"]
    cluster.start_slurmd(nodes[0])
    cluster.until_idle(cluster.nodes)


def test_a_spare_replaces_the_node_of_a_killed_rank_within_the_allocation(cluster: Cluster, alone: Path) -> None:
    """The job is not requeued."""
    script = uninterrupted(cluster, "spared", starter="srun", spares=1, exclude="n4,n5")
    run_dir = Path(script.run_dir)
    id_ = submit(cluster, script)
    cluster.until(lambda: saved_step(run_dir) >= 5, "step 5 is saved", BEGIN_S)
    first, second, spare = cluster.hosts(id_)
    kill_rank(cluster, second)
    assert cluster.until_state(id_, ENDED, 200) == "COMPLETED" and cluster.job(id_)["Restarts"] == "0"
    assert losses(run_dir) == losses(alone) and len(losses(run_dir)) == STEPS
    assert ends(run_dir) == [("crash", "restart"), ("finished", "0")]
    log = (run_dir / f"logs/{id_}.log").read_text()
    assert f"crash: begins anew on {first},{spare}, within the allocation and without {second}\n" in log
    assert (run_dir / f"logs/{id_}.1/node-{spare}.log").exists()
