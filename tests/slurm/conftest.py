"""One cluster for all tests: five nodes, the data, and a pipeline that has run on it."""

import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.slurm.cluster import ENDED, Cluster
from tests.slurm.training import TWO_RANKS, job, make_data, rl_words, submit

STEPS = 60
FILLED = "/dev/shm/filled"


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Five idle nodes."""
    folder = Path(tempfile.mkdtemp(prefix="throwaway-slurm-"))
    folder.chmod(0o755)
    cluster = Cluster(folder, 5)
    try:
        cluster.start()
        make_data(cluster.shared / "data")
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(folder)


@dataclass(frozen=True)
class Pipeline:
    """Ids of jobs that have ended, each depending on the one before, and where the first one ran."""

    pretrain: str
    convert: str
    rl: str
    run_dir: Path
    rl_dir: Path


@pytest.fixture(scope="session")
def pipeline(cluster: Cluster) -> Pipeline:
    """Pretraining on two nodes, on the first try with n2, whose shared memory is full; conversion; RL."""
    cluster.attempt("fallocate", "-l", "60M", FILLED, node="n2")
    pretraining = job(
        cluster, "pretrain", f"train.steps={STEPS}", "checkpoint.interval=5", *TWO_RANKS, node_check=True
    )
    first = submit(cluster, pretraining)
    last_checkpoint = f"{pretraining.run_dir}/checkpoints/iter_{STEPS:07d}"
    converted = cluster.shared / "converted"
    conversion = job(
        cluster,
        "convert",
        program="convert",
        module="mcore_rl.run.cli",
        arguments=("convert", "relayout", last_checkpoint, str(converted), "--keys", "te"),
        is_training=False,
        starter="once",
        nodes=1,
        dependency=f"afterok:{first}",
    )
    second = submit(cluster, conversion)
    tuning = job(
        cluster,
        "rl",
        program="rl",
        module="mcore_rl.run.rl",
        arguments=rl_words(cluster, converted),
        starter="srun",
        nodes=2,
        dependency=f"afterok:{second}",
    )
    third = submit(cluster, tuning)
    cluster.until_state(third, ENDED, 600)
    cluster.attempt("rm", FILLED, node="n2")
    return Pipeline(first, second, third, Path(pretraining.run_dir), Path(tuning.run_dir))
