"""Which cells of the matrices run, and how tests are dealt to the processes of pytest-xdist, when there are several."""

import faulthandler
import gc
import importlib
import itertools
import os
import random
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

# Before anything imports torch: two processes of tests and their ranks share the cores, and threads of OpenMP that wait
# for each other's share of a small product spin. What it costs shows on a busy machine: four minutes for one.
os.environ.setdefault("OMP_NUM_THREADS", "1")
WITH_RANKS = ("tests/parallel/", "tests/e2e/")
"""Folders whose tests start ranks; the tests of each keep to one process of pytest-xdist."""
LEFT_OUT = pytest.StashKey[int]()
FOLDERS = itertools.count()
RUNNING: dict[str, float] = {}
"""When each test began that runs now, here or in the processes of pytest-xdist, by time.monotonic()."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all",
        action="store_true",
        help="also run the cells that a matrix does not name, and the tests that are marked as full",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "matrix(*ids): only these cells of its parametrisation run without --all")
    config.addinivalue_line("markers", "full: runs with --all only, as a cheaper test proves nearly the same")
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        # So a shell starts what it runs in the background, and programs in which tests press Ctrl-C would inherit it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    is_worker = hasattr(config, "workerinput")
    runs_tests = is_worker or not config.getoption("numprocesses", None)
    if runs_tests:
        gc.disable()  # until pytest_collection_finish: to collect tests makes many objects and little garbage
    _show_what_hangs(is_worker, runs_tests)


def _show_what_hangs(is_worker: bool, runs_tests: bool) -> None:
    """At SIGUSR2, by which .ci/job ends a job, the process shows its stacks and the tests that run, and ends."""
    stderr = os.dup(2)  # what pytest captures while a test runs is lost when it ends like this

    def end(*_: object) -> None:
        lines = [f"{time.monotonic() - began:6.0f} s  {test}" for test, began in RUNNING.items()] or ["none"]
        os.write(stderr, "\n".join(["Tests that were running:", *lines, ""]).encode())
        os._exit(1)

    if not is_worker:
        signal.signal(signal.SIGUSR2, end)
    if runs_tests:  # the stacks of two processes that write at once cannot be read
        faulthandler.register(signal.SIGUSR2, file=stderr, chain=True)


def pytest_runtest_logstart(nodeid: str) -> None:
    RUNNING[nodeid] = time.monotonic()


def pytest_runtest_logfinish(nodeid: str) -> None:
    RUNNING.pop(nodeid, None)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what only --all runs, but for tests whose name or function is an argument."""
    _assert_cells_exist(items)
    if config.getoption("all"):
        return
    split = [argument.partition("::") for argument in config.args]
    named = {(Path(file).resolve(), name) for file, _, name in split}
    left_out = [item for item in items if _is_extra(item) and not _names(item) & named]
    if left_out:
        gone = set(left_out)
        config.stash[LEFT_OUT] = len(left_out)
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in gone]


def pytest_sessionfinish(session: pytest.Session) -> None:
    getattr(session.config, "workeroutput", {})["left_out"] = session.config.stash.get(LEFT_OUT, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take the count of a process of pytest-xdist, each of which collects all tests."""
    node.config.stash[LEFT_OUT] = getattr(node, "workeroutput", {}).get("left_out", 0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print one count of what only `make test-all` runs."""
    if left_out := config.stash.get(LEFT_OUT, 0):
        terminalreporter.write_line(f"{left_out} more tests and cells of matrices run with --all (make test-all)")


def _names(item: pytest.Item) -> set[tuple[Path, str]]:
    """The file of a test, with its own name and with its function's."""
    name = item.nodeid.partition("::")[2]
    return {(item.path, name), (item.path, name.partition("[")[0])}


def _is_extra(item: pytest.Item) -> bool:
    mark = item.get_closest_marker("matrix")
    is_cell = mark is not None and item.nodeid.partition("[")[2].removesuffix("]") not in mark.args
    return is_cell or item.get_closest_marker("full") is not None


def pytest_collection_finish() -> None:
    """Leave the hundred thousands of objects of the imported modules and tests out of every later collection."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty folder. Pytest's own reads, for each of thousands, the names of the folders of all tests before."""
    path = tmp_path_factory.getbasetemp() / f"{re.sub(r'[^a-zA-Z0-9]', '_', request.node.name)[:27]}{next(FOLDERS)}"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture(autouse=True)
def _folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each test in its empty folder: relative paths of recipes, such as runs/quickstart, must not find what the
    README's first command has left in the checkout.
    """
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session")
def peft() -> Any:
    """The library, whose import takes seconds: neither the ranks of its tests nor every process of tests need it."""
    return importlib.import_module("peft")


@pytest.fixture(autouse=True)
def _draws_of_its_own() -> None:
    """Seed each test alike: its draws do not depend on the tests before it."""
    random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.default_generator.manual_seed(0)  # torch.manual_seed notes a stack for each kind of device


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
            raise pytest.UsageError(f"{function} has no cell {', '.join(sorted(missing))}, which its mark names")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Run tests of a folder that start ranks one after another: two ranks of a test have two cores between them, and
    wait for each other half of their time, so that a second such test, of the other folder, is a gain beside them. The
    other tests fill what they leave idle, file by file: what a file makes once is then made in one process only.
    """
    from xdist.scheduler import LoadScopeScheduling

    class FolderInOneProcess(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return next((folder for folder in WITH_RANKS if nodeid.startswith(folder)), file)

    return FolderInOneProcess(config, log)
