"""Continuous integration runs the same jobs everywhere; one that hangs shows where, and leaves nothing running."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

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


def test_variables_choose_the_cells_and_the_line_says_so(job):
    process = job('echo "target $*"', "parallel", MATRIX="all")
    output, _ = process.communicate(timeout=60)
    assert "MATRIX=all" in output
    assert "MATRIX and CELLS are set" in output
    assert "target test-parallel MATRIX=all\n" in output


def test_the_cells_follow_from_the_files_changed_since_the_last_tag(tmp_path):
    """Without a tag, or without git, the tree decides; where no file that a cell depends on has changed, few run."""
    for name in (".ci", "mcore_rl", "docs", "bin"):
        (tmp_path / name).mkdir()
    shutil.copy(JOB, tmp_path / ".ci/job")
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
    commit("docs/a.md", "2")
    line = run(".ci/job", "parallel")
    assert "MATRIX=representative CELLS=0 " in line and "has changed since v1" in line
    commit("mcore_rl/a.py", "3")
    line = run(".ci/job", "parallel")
    assert (
        re.search(r"MATRIX=([012]) CELLS=\1 ", line) and "by the 1 files that have changed since v1" in line
    )
    assert run(".ci/job", "parallel").splitlines()[0] == line.splitlines()[0]


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
    time.sleep(0.5)  # the process that leads hears of a test's beginning a moment later
    os.killpg(process.pid, signal.SIGUSR2)
    output, _ = process.communicate(timeout=60)
    assert re.search(r"Tests that were running:\n +\d+ s  .*::test_waits\n", output), output
    assert re.search(r'test_hangs.py", line 4 in test_waits', output), output
