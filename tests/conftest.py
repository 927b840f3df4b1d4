"""How the tests are dealt to the processes of pytest-xdist, when there are several."""

from typing import Any

import pytest

WITH_RANKS = ("tests/parallel/", "tests/e2e/")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests that start ranks keep to one process: they use all cores, and two of them at once take more than twice as
    long. The others, one by one, fill what they leave idle.
    """
    from xdist.scheduler import LoadScopeScheduling

    class RanksInOneProcess(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "ranks" if nodeid.startswith(WITH_RANKS) else nodeid

    return RanksInOneProcess(config, log)
