"""The server of ranks, which has TransformerEngine; pytest itself and what it imports do not need it."""

from collections.abc import Iterator
from multiprocessing import forkserver as servers

import pytest

from tests.ranks import forkserver


@pytest.fixture(scope="session", autouse=True)
def ranks_with_transformer_engine() -> Iterator[None]:
    """Started before any other test of ranks could start one without it."""
    forkserver("tests.te.machine")
    servers.ensure_running()
    yield
