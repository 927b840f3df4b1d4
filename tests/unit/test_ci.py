"""Continuous integration runs the same jobs everywhere; one that hangs shows where, and leaves nothing running."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import yaml

from tests.conftest import SHARES, _chosen
from tests.documented import ROOT

JOB = ROOT / ".ci/job"
# make gives the variables of its command line to all that it starts: to these tests too.
ENVIRONMENT = {
    name: value
    for name, value in os.environ.items()
    if name not in ("MATRIX", "CELLS", "CI_LIMIT_S", "MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "MAKELEVEL")
    and not name.startswith("PYTEST_")
}


def jobs_of_run():
    lanes = re.search(r"^lanes=\((.*)\)$", (ROOT / ".ci/run").read_text(), re.MULTILINE)
    return lanes[1].replace('"', "").split()


def test_the_workflow_runs_the_jobs_of_the_script():
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    assert sorted(workflow["jobs"]["ci"]["strategy"]["matrix"]["job"]) == sorted(jobs_of_run())


@pytest.fixture
def job(tmp_path):
    """A job of which make is the script that is given."""

    def start(script, name="lint", **variables):
        make = tmp_path / "make"
        make.write_text(f"#!/bin/sh\n{script}\n")
        make.chmod(0o755)
        path = f"{tmp_path}:{os.environ['PATH']}"
        return subprocess.Popen(
            [JOB, name],
            env={**ENVIRONMENT, "PATH": path, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    return start


def is_running(pid):
    """A process that has ended may still be listed, until its parent asks for its status."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and " Z " not in stat.read_text()


def left_by(folder):
    """The process that the script has started in a session of its own."""
    until_s = time.monotonic() + 60
    while not (folder / "pid").exists() or not (folder / "pid").read_text():
        assert time.monotonic() < until_s
        time.sleep(0.05)
    return int((folder / "pid").read_text())


ESCAPES = "setsid sh -c 'echo $$ > {0}/pid; exec sleep 1000' &\n"


@pytest.mark.parametrize("name", jobs_of_run())
def test_a_job_gives_make_a_target_that_there_is(name, job):
    process = job('echo "target $1 $2 $3"', name)
    output, _ = process.communicate(timeout=60)
    target = re.search(r"^target (\S+)", output, re.MULTILINE)
    targets = re.findall(r"^([a-z0-9 -]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert process.returncode == 0, output
    assert target[1] in " ".join(targets).split()


def test_a_job_at_its_limit_fails_and_leaves_nothing_running(job, tmp_path):
    process = job(ESCAPES.format(tmp_path) + "exec sleep 1000", CI_LIMIT_S="1")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 124
    assert "lint: ended after its limit of 1 s" in output
    assert not is_running(left_by(tmp_path))


def test_a_job_that_is_ended_leaves_nothing_running(job, tmp_path):
    process = job(ESCAPES.format(tmp_path) + "exec sleep 1000")
    left = left_by(tmp_path)
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 143
    assert not is_running(left)


def test_a_job_that_is_done_leaves_nothing_running_and_keeps_its_status(job, tmp_path):
    process = job(ESCAPES.format(tmp_path) + "exit 3")
    process.communicate(timeout=60)
    assert process.returncode == 3
    assert not is_running(left_by(tmp_path))


def test_variables_choose_the_share_and_the_line_says_so(job):
    process = job('echo "target $*"', "parallel", MATRIX="all")
    output, _ = process.communicate(timeout=60)
    assert "MATRIX=all" in output
    assert "MATRIX and CELLS are set" in output
    assert "target test-parallel MATRIX=all\n" in output


def test_the_share_follows_from_the_files_changed_since_the_last_tag(tmp_path):
    """Without a tag, or without git, the tree decides; where no file that a test depends on has changed, the first."""
    for name in (".ci", "mcore_rl", "launch", "tests", "bin"):
        (tmp_path / name).mkdir()
    shutil.copy(JOB, tmp_path / ".ci/job")
    (tmp_path / "tests/conftest.py").write_text("SHARES = 4\n")
    (tmp_path / "bin/make").write_text("#!/bin/sh\n")
    (tmp_path / "bin/make").chmod(0o755)
    own = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CEILING_DIRECTORIES": str(tmp_path.parent)}
    for role in ("AUTHOR", "COMMITTER"):
        own |= {f"GIT_{role}_NAME": "nobody", f"GIT_{role}_EMAIL": "nobody@example.com"}
    environment = ENVIRONMENT | own | {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}

    def run(*words):
        return subprocess.run(
            words, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True
        ).stdout

    def commit(name, text):
        (tmp_path / name).write_text(text)
        run("git", "add", "-A")
        run("git", "commit", "-q", "-m", "a change")

    assert "MATRIX=0 CELLS=0 " in run(".ci/job", "parallel")
    run("git", "init", "-q")
    commit("mcore_rl/a.py", "1")
    assert "no tag in this checkout" in run(".ci/job", "parallel")
    run("git", "tag", "v1")
    commit("launch/a.toml", "2")
    line = run(".ci/job", "parallel")
    assert "MATRIX=0 CELLS=0 " in line and "no file that a test depends on has changed since v1" in line
    commit("mcore_rl/a.py", "3")
    line = run(".ci/job", "parallel")
    found = re.search(r"MATRIX=([0123]) CELLS=\1 \(a share of 4 is 0 to 3; every test is all\): (.*)", line)
    assert found and found[2] == "by the 1 files that have changed since v1"
    assert run(".ci/job", "parallel").splitlines()[0] == line.splitlines()[0]


class Item:
    """A test, as the choice sees it."""

    def __init__(self, nodeid, *named, **marks):
        self.nodeid, self.marks = nodeid, marks
        if named:
            self.marks["matrix"] = named

    def get_closest_marker(self, name):
        return getattr(pytest.mark, name)(*self.marks[name]).mark if name in self.marks else None


@pytest.fixture
def items():
    """A matrix, tests of many cells and of two, and one of its own, in a folder of each kind."""
    return [
        Item(f"tests/{folder}/test_{file}.py::{name}", *named)
        for folder in ("unit", "unit/fake_world", "parallel")
        for file in "abcdefgh"
        for name, named in [
            *((f"test_matrix[{cell}]", ("b", "c")) for cell in "abcdefghij"),
            *((f"test_many[{cell}]", ()) for cell in range(20)),
            *((f"test_two[{cell}]", ()) for cell in range(2)),
            ("test_alone", ()),
        ]
    ]


def test_all_and_representative_are_whole_but_for_cells_of_a_matrix(items):
    assert _chosen(items, "all") == set(items)
    left_out = {item.nodeid.partition("::")[2] for item in set(items) - _chosen(items, "representative")}
    assert left_out == {f"test_matrix[{cell}]" for cell in "adefghij"}


def test_the_shares_are_together_all_and_each_has_something_of_every_test_or_file(items):
    shares = [_chosen(items, str(share)) for share in range(SHARES)]
    assert set.union(*shares) == set(items)
    for share in shares:
        assert sum(item.nodeid.endswith("test_matrix[b]") for item in share) == 24
        functions = Counter(item.nodeid.partition("[")[0] for item in share if "/unit/test" in item.nodeid)
        assert len(functions) == 8 * 4
        assert {functions[f"tests/unit/test_{file}.py::test_two"] for file in "abcdefgh"} == {1}
        # Of 33 tests of a file its one named cell, and a share of 32.
        files = Counter(item.nodeid.partition("::")[0] for item in share if "/unit/test" not in item.nodeid)
        assert len(files) == 2 * 8 and set(files.values()) <= {1 + 32 // SHARES, 2 + 32 // SHARES}


def test_of_costly_tests_of_one_kind_a_share_has_at_least_one(items):
    kind = [Item(f"tests/{folder}/test_{folder}.py::test_one", dealt=("cold",)) for folder in ("unit", "e2e")]
    shares = [_chosen(items + kind, str(share)) for share in range(SHARES)]
    assert {len(share & set(kind)) for share in shares} == {1}
    assert set.union(*shares) >= set(kind)


def test_tests_that_hang_are_named_with_their_stacks(tmp_path):
    """In processes of pytest-xdist, where no test's output is seen before its end."""
    file = tmp_path / "test_hangs.py"
    file.write_text(
        "import pathlib, threading\n"
        "def test_waits():\n"
        f"    pathlib.Path('{tmp_path}/began').touch()\n"
        "    threading.Event().wait()\n"
    )
    words = ["-n", "1", "-p", "tests.conftest", "-c", str(ROOT / "pyproject.toml"), str(file)]
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", *words],
        cwd=ROOT,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    until_s = time.monotonic() + 120
    while not (tmp_path / "began").exists() and process.poll() is None and time.monotonic() < until_s:
        time.sleep(0.05)
    time.sleep(
        4
    )  # the process that leads hears of a test's beginning a moment later, on a busy machine seconds
    os.killpg(process.pid, signal.SIGUSR2)
    output, _ = process.communicate(timeout=60)
    assert re.search(r"Tests that were running:\n +\d+ s  .*::test_waits\n", output), output
    assert re.search(r'test_hangs.py", line 4 in test_waits', output), output
