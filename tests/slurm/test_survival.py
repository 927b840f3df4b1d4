"""A run that loses a daemon and a rank, is requeued by hand and asked to save, computes what it would have anyway."""

import json
from collections.abc import Callable
from pathlib import Path

from tests.slurm.cluster import ENDED, Cluster
from tests.slurm.conftest import STEPS, Pipeline
from tests.slurm.training import TWO_RANKS, ends, job, losses, saved_step, submit

PROGRAM = "^[^ ]*python .*mcore_rl.run.pretrain"
"""torchrun and its ranks; srun has that name among its words too."""
ABOVE_A_RANK = "^[^ ]*python (-u )?-m mcore_rl.backend.rank_process"
BEGIN_S = 180.0


def test_a_run_that_is_interrupted_in_every_way_ends_bit_equal(cluster: Cluster, pipeline: Pipeline) -> None:
    words = (f"train.steps={STEPS}", "checkpoint.interval=5", *TWO_RANKS)
    script = job(cluster, "interrupted", *words, hang_s=20)
    run_dir = Path(script.run_dir)
    id_ = submit(cluster, script)

    def interrupt(how: Callable[[], object], within_s: float) -> None:
        """Once the present attempt has saved; until the next one is about to start."""
        restarts, reached = int(cluster.job(id_)["Restarts"]) + 1, saved_step(run_dir) + 5
        cluster.until(lambda: saved_step(run_dir) >= reached, f"step {reached} is saved", BEGIN_S)
        how()
        cluster.until(lambda: cluster.job(id_)["Restarts"] == str(restarts), f"restart {restarts}", within_s)

    def lose_daemon() -> None:
        """Of the node with rank 0 and the batch script, while the run stands still."""
        nodes.extend(cluster.hosts(id_))
        cluster.kill_slurmd(nodes[0])
        for node in nodes:
            cluster.run("pkill", "-STOP", "-f", PROGRAM, node=node, as_root=True)

    def stop_second_rank() -> None:
        cluster.run("pkill", "-STOP", "-f", PROGRAM, node=cluster.hosts(id_)[1])

    def kill_second_rank() -> None:
        """Only the rank: the process above it records how it ended."""
        killed.append(cluster.hosts(id_)[1])
        above = cluster.run("pgrep", "-o", "-f", ABOVE_A_RANK, node=killed[0])
        cluster.run("pkill", "-KILL", "-P", above, node=killed[0])

    nodes: list[str] = []
    killed: list[str] = []
    interrupt(lose_daemon, 120)
    cluster.until_state(id_, ["RUNNING"], 120)
    cluster.run("pkill", "-CONT", "-f", PROGRAM, node=nodes[0], as_root=True)  # the orphans go on
    interrupt(lambda: cluster.run("scontrol", "requeue", id_), 60)
    interrupt(stop_second_rank, 180)
    interrupt(kill_second_rank, 60)
    interrupt(lambda: cluster.run("scancel", "--batch", "--signal=USR1", id_), 60)

    assert cluster.until_state(id_, ENDED, 400) == "COMPLETED"
    assert losses(run_dir) == losses(pipeline.run_dir) and len(losses(run_dir)) == STEPS
    ended = ["lost orphan", "term 143", "hang requeue", "crash requeue", "limit requeue", "finished 0"]
    assert [" ".join(end) for end in ends(run_dir)] == ended
    crash = json.loads((run_dir / f"logs/{id_}.3/failure.json").read_text())
    headline = f"rank 1 on {killed[0]} was killed by SIGKILL"
    log = (run_dir / f"logs/{id_}.log").read_text()
    assert crash["headline"] == headline and f"[{id_}.3] first cause: {headline}\n" in log
    cluster.start_slurmd(nodes[0])
    cluster.until_idle(cluster.nodes)


def test_a_spare_replaces_the_node_of_a_killed_rank_within_the_allocation(
    cluster: Cluster, pipeline: Pipeline
) -> None:
    """The job is not requeued, and computes what it would have anyway."""
    words = (f"train.steps={STEPS}", "checkpoint.interval=5", *TWO_RANKS)
    script = job(cluster, "spared", *words, starter="srun", spares=1)
    run_dir = Path(script.run_dir)
    id_ = submit(cluster, script)
    cluster.until(lambda: saved_step(run_dir) >= 5, "step 5 is saved", BEGIN_S)
    first, second, spare = cluster.hosts(id_)
    above = cluster.run("pgrep", "-o", "-f", ABOVE_A_RANK, node=second)
    cluster.run("pkill", "-KILL", "-P", above, node=second)
    assert cluster.until_state(id_, ENDED, 200) == "COMPLETED" and cluster.job(id_)["Restarts"] == "0"
    assert losses(run_dir) == losses(pipeline.run_dir)
    assert ends(run_dir) == [("crash", "restart"), ("finished", "0")]
    log = (run_dir / f"logs/{id_}.log").read_text()
    assert f"crash: begins anew on {first},{spare}, within the allocation and without {second}\n" in log
    assert (run_dir / f"logs/{id_}.1/node-{spare}.log").exists()
