"""Runs and checkpoints that tests of checkpoints read, made once a session."""

from pathlib import Path

import pytest

from mcore_rl.config.mesh import MeshConfig
from tests.parallel.checkpointing import SMALL, config_of, run


@pytest.fixture(scope="session")
def saved_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, float]]:
    """A run on TP2 x EP2 with checkpoints of steps 1 and 2, which is not to be written to, and its losses."""
    folder = tmp_path_factory.mktemp("saved")
    losses = run(config_of(folder, SMALL, MeshConfig(tp=2, ep=2)), until=2, save_at=[1, 2]).losses
    return folder, losses


@pytest.fixture(scope="session")
def saved(saved_run: tuple[Path, dict[int, float]]) -> Path:
    return saved_run[0]
