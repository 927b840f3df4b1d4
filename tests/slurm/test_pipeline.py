"""Jobs that depend on each other, on nodes of which one is unfit."""

import json
from pathlib import Path

from launch.job import STATUS
from tests.slurm.cluster import ENDED, Cluster
from tests.slurm.conftest import Pipeline
from tests.slurm.training import ends, job, submit


def test_each_job_of_a_pipeline_starts_when_the_one_before_has_succeeded(
    cluster: Cluster, pipeline: Pipeline
) -> None:
    jobs = [cluster.job(job) for job in (pipeline.pretrain, pipeline.convert, pipeline.rl)]
    assert [job["JobState"] for job in jobs] == ["COMPLETED"] * 3
    assert jobs[0]["EndTime"] <= jobs[1]["StartTime"] <= jobs[1]["EndTime"] <= jobs[2]["StartTime"]
    records = [json.loads(line) for line in (pipeline.rl_dir / "metrics.jsonl").read_text().splitlines()]
    assert len([record for record in records if "policy/loss" in record]) == 10


def test_an_unfit_node_is_named_and_excluded_and_the_job_runs_without_it(
    cluster: Cluster, pipeline: Pipeline
) -> None:
    assert ends(pipeline.run_dir) == [("unfit", "requeue"), ("finished", "0")]
    ended = cluster.job(pipeline.pretrain)
    assert (ended["ExcNodeList"], ended["Restarts"]) == ("n2", "1")
    assert len(cluster.hosts(pipeline.pretrain)) == 2 and "n2" not in cluster.hosts(pipeline.pretrain)
    logs = pipeline.run_dir / "logs" / f"{pipeline.pretrain}.0"
    unfit, fit = (logs / f"check-{node}.log" for node in ("n2", "n1"))
    assert "UNFIT: /dev/shm has 4 MiB free" in unfit.read_text()
    assert fit.read_text().endswith("fit\n") and "UNFIT" not in fit.read_text()


def test_a_job_that_always_crashes_gives_up_and_what_depends_on_it_is_cancelled(cluster: Cluster) -> None:
    crashing = job(cluster, "crashing", python="/bin/false", max_attempts=2, nodes=2)
    first = submit(cluster, crashing)
    second = submit(cluster, job(cluster, "waiting", dependency=f"afterok:{first}"))
    third = submit(cluster, job(cluster, "waiting_too", dependency=f"afterok:{second}"))
    assert cluster.until_state(first, ENDED, 120) == "FAILED"
    ended = cluster.job(first)
    assert (ended["ExitCode"], ended["Restarts"]) == (f"{STATUS['crash_loop']}:0", "1")
    assert ends(Path(crashing.run_dir)) == [("crash", "requeue"), ("crash", str(STATUS["crash_loop"]))]
    assert {cluster.until_state(job, ENDED, 60) for job in (second, third)} == {"CANCELLED"}
