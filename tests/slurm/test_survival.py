"""A run that is ended from outside, or whose folder is locked, says so, and computes what it would have anyway."""

from pathlib import Path

import pytest

from mcore_rl.launch.records import Submission, record
from tests.slurm.cluster import ENDED, Cluster
from tests.slurm.training import BEGIN_S, STEPS, ends, interrupt, job, losses, saved_step, submit, uninterrupted


@pytest.fixture(scope="module")
def reference(cluster: Cluster) -> tuple[str, Path]:
    """Id and folder of the run that nothing interrupts, on n4 and n5."""
    script = uninterrupted(cluster, "reference", nodelist="n4,n5")
    return submit(cluster, script), Path(script.run_dir)


def assert_alike(cluster: Cluster, run_dir: Path, reference: tuple[str, Path]) -> None:
    """The losses of all steps are those of the reference, once that has ended."""
    assert cluster.until_state(reference[0], ENDED, 400) == "COMPLETED"
    assert losses(run_dir) == losses(reference[1]) and len(losses(run_dir)) == STEPS


@pytest.mark.full
def test_term_to_the_whole_job_ends_it_with_the_reason_and_says_what_is_lost(cluster: Cluster) -> None:
    """This Slurm's srun kills its tasks within a second, so that no save is possible."""
    steps = ("train.steps=40", "checkpoint.interval=5")
    script = job(cluster, "stopped", *steps, nodes=1, exclude="n4,n5")
    run_dir = Path(script.run_dir)
    id_ = submit(cluster, script)
    cluster.until(lambda: saved_step(run_dir) >= 5, "step 5 is saved", BEGIN_S)
    cluster.run("scancel", "--full", "--signal=TERM", id_)
    assert cluster.until_state(id_, ENDED, 120) == "FAILED"
    assert cluster.job(id_)["ExitCode"] == "143:0" and ends(run_dir) == [("term", "143")]
    log = (run_dir / f"logs/{id_}.log").read_text()
    assert "TERM was sent to the whole job, as scancel --full --signal=TERM does" in log
    assert f"the steps after {saved_step(run_dir)} are lost (exit status 143)" in log


@pytest.mark.full
def test_a_run_whose_folder_cannot_be_written_for_a_while_waits_and_ends_bit_equal(
    cluster: Cluster, reference: tuple[str, Path]
) -> None:
    script = uninterrupted(cluster, "unwritable", exclude="n4,n5")
    run_dir = Path(script.run_dir)
    id_ = submit(cluster, script)
    log = run_dir / f"logs/{id_}.log"

    def lock_for_a_while() -> None:
        modes = {path: path.stat().st_mode for path in (run_dir, *run_dir.rglob("*")) if not path.is_symlink()}
        for path, mode in modes.items():
            path.chmod(mode & ~0o222)
        cluster.until(lambda: "cannot be written: waiting up to 900 s" in log.read_text(), "the job waits", 120)
        for path, mode in modes.items():
            path.chmod(mode)

    interrupt(cluster, id_, run_dir, lock_for_a_while, 60)
    assert cluster.until_state(id_, ENDED, 400) == "COMPLETED"
    assert_alike(cluster, run_dir, reference)
    assert ends(run_dir) == [("disk", "requeue"), ("finished", "0")]
    assert f"first cause: {run_dir} could not be written for " in log.read_text()


@pytest.mark.full
def test_a_job_that_slurm_cannot_start_because_its_log_is_locked_says_so(cluster: Cluster) -> None:
    script = uninterrupted(cluster, "locked")
    id_ = submit(cluster, script, "--hold")
    folder = Path(script.run_dir) / "launch/0"
    folder.mkdir(parents=True)
    submission = Submission(
        job=id_, program="pretrain", name="locked", cluster="a", nodes=2, ranks_per_node=1, time="", code=""
    )
    record(folder, submission)
    (Path(script.run_dir) / "logs").chmod(0o555)
    cluster.run("scontrol", "release", id_)
    assert cluster.until_state(id_, ENDED, 60) == "FAILED"
    words = ("env", f"PYTHONPATH={cluster.code}", cluster.python, "-m", "mcore_rl.cli.cli", "jobs", "locked")
    assert "Slurm could not open the job's log, whose folder was gone or could not be written" in cluster.run(*words)
