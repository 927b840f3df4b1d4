"""A cluster of five nodes, with the data, for the tests of each process of pytest-xdist."""

import fcntl
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster
from tests.slurm.training import make_corpus, make_data


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """The data that all clusters copy; the first process that needs it makes it."""
    base = tmp_path_factory.getbasetemp()
    if worker_id != "master":
        base = base.parent  # of all processes
    folder, is_made = base / "corpus", base / "corpus.made"
    with (base / "corpus.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not is_made.exists():
            make_corpus(folder)
            is_made.touch()
    return folder


@pytest.fixture(scope="session")
def cluster(corpus: Path) -> Iterator[Cluster]:
    folder = Path(tempfile.mkdtemp(prefix="throwaway-slurm-"))
    folder.chmod(0o755)
    cluster = Cluster(folder, 5)
    try:
        cluster.start()
        make_data(corpus, cluster.shared / "data")
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(folder)
