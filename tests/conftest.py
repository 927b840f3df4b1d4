"""Which cells of the matrices run, and how tests are dealt to the processes of pytest-xdist, when there are several."""

import faulthandler
import gc
import os
import random
import signal
import sys
import time
import zlib
from collections import Counter
from typing import Any

import pytest

# Before anything imports torch: two processes of tests and their ranks share the cores, and threads of OpenMP that wait
# for each other's share of a small product spin. What it costs shows on a busy machine: four minutes for one.
os.environ.setdefault("OMP_NUM_THREADS", "1")
WITH_RANKS = ("tests/parallel/", "tests/e2e/")
"""Folders whose tests start ranks; the tests of each keep to one process of pytest-xdist."""
WITH_CLUSTERS = "tests/slurm/"
"""The folder of which each process of pytest-xdist has a cluster, and each file is for one process."""
SHARDS = 3
RUNNING: dict[str, float] = {}
"""When each test began that runs now, here or in the processes of pytest-xdist, by time.monotonic()."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--matrix",
        choices=["representative", "all", *map(str, range(SHARDS))],
        default="representative",
        help="cells of tests marked as a matrix: those that the mark names, all, or these and a third of the others",
    )
    parser.addoption(
        "--cells",
        choices=["all", *map(str, range(SHARDS))],
        default="all",
        help="cells of every parametrised test: all, or the first and a third of the others",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "matrix(*ids): of its parametrisation these always run, the others with --matrix"
    )
    _show_what_hangs(hasattr(config, "workerinput"))


def _show_what_hangs(is_worker: bool) -> None:
    """At SIGUSR2, by which .ci/job ends a job, the process shows its stacks and the tests that run, and ends."""
    stderr = os.dup(2)  # what pytest captures while a test runs is lost when it ends like this

    def end(*_: object) -> None:
        lines = [f"{time.monotonic() - began:6.0f} s  {test}" for test, began in RUNNING.items()] or ["none"]
        os.write(stderr, "\n".join(["Tests that were running:", *lines, ""]).encode())
        os._exit(1)

    if not is_worker:
        signal.signal(signal.SIGUSR2, end)
    faulthandler.register(signal.SIGUSR2, file=stderr, chain=True)


def pytest_runtest_logstart(nodeid: str) -> None:
    RUNNING[nodeid] = time.monotonic()


def pytest_runtest_logfinish(nodeid: str) -> None:
    RUNNING.pop(nodeid, None)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the cells that are not asked for. Those whose name or function is an argument always run."""
    which, third = config.getoption("matrix"), config.getoption("cells")
    _assert_cells_exist(items)
    named = {argument for argument in config.args if "::" in argument}
    left_out = [item for item in items if not (_is_wanted(item, which) or item.nodeid in named)]
    if third != "all":
        left_out += _beyond_a_third([item for item in items if item not in set(left_out)], int(third), named)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]


def pytest_collection_finish() -> None:
    """Leave the hundred thousands of objects of the imported modules and tests out of every later collection."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _draws_of_its_own() -> None:
    """Seed each test alike: its draws do not depend on the tests before it, which differ with the third of a matrix."""
    random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


def _assert_cells_exist(items: list[pytest.Item]) -> None:
    """A cell that always runs would be lost with its name, silently. Functions of which one cell was asked for pass."""
    cells: dict[str, set[str]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("matrix"):
            cells.setdefault(item.nodeid.partition("[")[0], set()).add(item.callspec.id)
    marks = {item.nodeid.partition("[")[0]: item.get_closest_marker("matrix") for item in items}
    for function, found in cells.items():
        mark = marks[function]
        assert mark is not None
        missing = set(mark.args) - found
        if missing and len(found) > len(mark.args):
            raise pytest.UsageError(
                f"{function} has no cell {', '.join(sorted(missing))}, which its mark names"
            )


def _is_wanted(item: pytest.Item, which: str) -> bool:
    mark = item.get_closest_marker("matrix")
    if mark is None or which == "all":
        return True
    assert isinstance(item, pytest.Function)
    cell = item.callspec.id
    shard = None if which == "representative" else int(which)
    return cell in mark.args or zlib.crc32(item.nodeid.encode()) % SHARDS == shard


def _beyond_a_third(items: list[pytest.Item], third: int, named: set[str]) -> list[pytest.Item]:
    """Return the cells of each function that are neither its first nor of this third."""
    left_out, cells = [], Counter[str]()
    for item in items:
        function = item.nodeid.partition("[")[0]
        cell = cells[function]
        cells[function] += 1
        if cell and cell % SHARDS != third and not {function, item.nodeid} & named:
            left_out.append(item)
    return left_out


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Run tests of a folder that start ranks one after another: two ranks of a test have two cores between them, and
    wait for each other half of their time, so that a second such test, of the other folder, is a gain beside them. The
    other tests, one by one, fill what they leave idle.
    """
    from xdist.scheduler import LoadScopeScheduling

    class FolderInOneProcess(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            if nodeid.startswith(WITH_CLUSTERS):
                return nodeid.partition("::")[0]
            return next((folder for folder in WITH_RANKS if nodeid.startswith(folder)), nodeid)

    return FolderInOneProcess(config, log)
