"""Which cells of the matrices run, and how tests are dealt to the processes of pytest-xdist, when there are several."""

import faulthandler
import gc
import os
import random
import signal
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import pytest

# Before anything imports torch: two processes of tests and their ranks share the cores, and threads of OpenMP that wait
# for each other's share of a small product spin. What it costs shows on a busy machine: four minutes for one.
os.environ.setdefault("OMP_NUM_THREADS", "1")
WITH_RANKS = ("tests/parallel/", "tests/e2e/")
"""Folders whose tests start ranks; the tests of each keep to one process of pytest-xdist."""
WITH_CLUSTERS = "tests/slurm/"
"""The folder of which each process of pytest-xdist has a cluster, and each file is for one process."""
TAKE_SECONDS = (
    *WITH_RANKS,
    *(
        f"tests/unit/{folder}/"
        for folder in ("backend", "bench", "convert", "folders", "launch", "planner", "run", "train")
    ),
    *Path(__file__).with_name("core.txt").read_text().split(),  # what enters Megatron
)
"""Folders, files and single tests that are dealt by the file: many compute for seconds, or start programs."""
SHARES = 10
"""Shares into which tests are dealt, of which a run of CI takes one; .ci/job reads the number here."""
RUNNING: dict[str, float] = {}
"""When each test began that runs now, here or in the processes of pytest-xdist, by time.monotonic()."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--matrix",
        choices=["representative", "all", *map(str, range(SHARES))],
        default="representative",
        help="what runs: of a matrix the cells that its mark names, and every other test; all; or a share, with the "
        "first cell that a mark names, and at least one cell of every test, and of those that take seconds one test "
        "of every file",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "matrix(*ids): of its parametrisation these run by default, the others with --matrix"
    )
    config.addinivalue_line(
        "markers",
        "dealt(name): costly tests of one kind, wherever they are, of which a share has at least one",
    )
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        # So a shell starts what it runs in the background, and programs in which tests press Ctrl-C would inherit it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
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
    """Leave out the tests that are not asked for. Those whose name or function is an argument run, unless it is for a
    share, into which those of tests/core.txt are dealt too.
    """
    _assert_cells_exist(items)
    which = config.getoption("matrix")
    wanted = _chosen(items, which)
    if not which.isdecimal():
        wanted |= {item for item in items if {_function(item), item.nodeid} & set(config.args)}
    if left_out := [item for item in items if item not in wanted]:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item in wanted]


def pytest_collection_finish() -> None:
    """Leave the hundred thousands of objects of the imported modules and tests out of every later collection."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each test in its empty folder: relative paths of recipes, such as runs/quickstart, must not find what the
    README's first command has left in the checkout.
    """
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def _draws_of_its_own() -> None:
    """Seed each test alike: its draws do not depend on the tests before it, which differ with the share that runs."""
    random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


def _assert_cells_exist(items: list[pytest.Item]) -> None:
    """A cell of a mark would be lost with its name, silently. Functions of which one cell was asked for pass."""
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


def _function(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


def _chosen(items: list[pytest.Item], which: str) -> set[pytest.Item]:
    """Return the tests that `which` of --matrix asks for; of a share, at least one of those that are dealt together."""
    if which == "all":
        return set(items)
    marks = {item: item.get_closest_marker("matrix") for item in items}
    cells = {item: item.nodeid.partition("[")[2].removesuffix("]") for item in items}
    if which == "representative":
        return {item for item, mark in marks.items() if mark is None or cells[item] in mark.args}
    chosen = {item for item, mark in marks.items() if mark is not None and cells[item] in mark.args[:1]}
    dealt: dict[str, list[pytest.Item]] = {}
    for item in items:
        if mark := item.get_closest_marker("dealt"):
            together = str(mark.args[0])
        elif item.nodeid.startswith(TAKE_SECONDS):
            together = item.nodeid.partition("::")[0]
        else:
            together = _function(item)
        dealt.setdefault(together, []).append(item)
    for together, tests in dealt.items():
        others = [test for test in tests if test not in chosen]
        # Dealt alike, all pairs would have their second test in the same share.
        first = (int(which) + zlib.crc32(together.encode())) % SHARES
        chosen.update(others[first if len(others) < len(tests) else first % len(others) :: SHARES])
    return chosen


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
