"""A run that loses a daemon or a rank, or is requeued by hand, computes what it would have anyway."""

from pathlib import Path

import pytest

from tests.slurm.cluster import ENDED, Cluster
from tests.slurm.training import (
    BEGIN_S,
    PROGRAM,
    STEPS,
    ends,
    interrupt,
    kill_rank,
    losses,
    saved_step,
    submit,
    uninterrupted,
)


@pytest.fixture(scope="module")
def reference(cluster: Cluster) -> tuple[str, Path]:
    """Id and folder of the run that nothing interrupts, on n4 and n5."""
    script = uninterrupted(cluster, "reference", nodelist="n4,n5")
    return submit(cluster, script), Path(script.run_dir)


def assert_alike(cluster: Cluster, run_dir: Path, reference: tuple[str, Path]) -> None:
    """The losses of all steps are those of the reference, once that has ended."""
    assert cluster.until_state(reference[0], ENDED, 400) == "COMPLETED"
    assert losses(run_dir) == losses(reference[1]) and len(losses(run_dir)) == STEPS


def test_a_run_that_loses_a_daemon_and_is_requeued_by_hand_ends_bit_equal(
    cluster: Cluster, reference: tuple[str, Path]
) -> None:
    script = uninterrupted(cluster, "interrupted", exclude="n4,n5")
    run_dir = Path(script.run_dir)
    id_ = submit(cluster, script)
    nodes: list[str] = []

    def lose_daemon() -> None:
        """Of the node with rank 0 and the batch script, while the run stands still."""
        nodes.extend(cluster.hosts(id_))
        cluster.kill_slurmd(nodes[0])
        for node in nodes:
            cluster.run("pkill", "-STOP", "-f", PROGRAM, node=node, as_root=True)

    interrupt(cluster, id_, run_dir, lose_daemon, 120)
    cluster.until_state(id_, ["RUNNING"], 120)
    cluster.run("pkill", "-CONT", "-f", PROGRAM, node=nodes[0], as_root=True)  # the orphans go on
    interrupt(cluster, id_, run_dir, lambda: cluster.run("scontrol", "requeue", id_), 60)

    assert cluster.until_state(id_, ENDED, 400) == "COMPLETED"
    assert_alike(cluster, run_dir, reference)
    assert [" ".join(end) for end in ends(run_dir)] == ["lost orphan", "term 143", "finished 0"]
    cluster.start_slurmd(nodes[0])
    cluster.until_idle(cluster.nodes)


def test_a_spare_replaces_the_node_of_a_killed_rank_within_the_allocation(
    cluster: Cluster, reference: tuple[str, Path]
) -> None:
    """The job is not requeued."""
    script = uninterrupted(cluster, "spared", starter="srun", spares=1, exclude="n4,n5")
    run_dir = Path(script.run_dir)
    id_ = submit(cluster, script)
    cluster.until(lambda: saved_step(run_dir) >= 5, "step 5 is saved", BEGIN_S)
    first, second, spare = cluster.hosts(id_)
    kill_rank(cluster, second)
    assert cluster.until_state(id_, ENDED, 200) == "COMPLETED" and cluster.job(id_)["Restarts"] == "0"
    assert_alike(cluster, run_dir, reference)
    assert ends(run_dir) == [("crash", "restart"), ("finished", "0")]
    log = (run_dir / f"logs/{id_}.log").read_text()
    assert f"crash: begins anew on {first},{spare}, within the allocation and without {second}\n" in log
    assert (run_dir / f"logs/{id_}.1/node-{spare}.log").exists()
