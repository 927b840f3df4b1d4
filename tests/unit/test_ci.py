"""Continuous integration runs the same jobs everywhere; one that hangs shows where, and leaves nothing running."""

import os
import re
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
    if name not in ("CI_LIMIT_S", "MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "MAKELEVEL")
    and not name.startswith("PYTEST_")
}


def jobs_of_run():
    return re.search(r"^jobs=\((.*)\)$", (ROOT / ".ci/run").read_text(), re.MULTILINE)[1].split()


def test_the_workflow_runs_the_jobs_of_the_script():
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    assert sorted(workflow["jobs"]["ci"]["strategy"]["matrix"]["job"]) == sorted(jobs_of_run())


def test_real_servers_are_tested_once_a_week_and_all_else_each_night():
    workflow = yaml.safe_load((ROOT / ".github/workflows/nightly.yml").read_text())
    night, week = (entry["cron"] for entry in workflow[True]["schedule"])  # "on" is true in YAML 1.1
    assert night.endswith("* * *") and week.endswith("* * 0")
    servers, others = workflow["jobs"]["servers"], workflow["jobs"]["all"]
    assert servers["steps"][-1]["run"] == "make test-servers"
    assert (
        servers["if"] == f"github.event.schedule != '{night}'" and others["if"] == f"github.event.schedule != '{week}'"
    )


OUTPUT = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
PYTEST = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-c", str(ROOT / "pyproject.toml")]


@pytest.fixture
def job(tmp_path):
    """A job of which make is the script that is given."""

    def start(script, name="lint", **variables):
        make = tmp_path / "make"
        make.write_text(f"#!/bin/sh\n{script}\n")
        make.chmod(0o755)
        path = f"{tmp_path}:{os.environ['PATH']}"
        return subprocess.Popen([JOB, name], env={**ENVIRONMENT, "PATH": path, **variables}, **OUTPUT)

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


@pytest.mark.full
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


MATRIX = """
import pytest

@pytest.mark.matrix("b", "d")
@pytest.mark.parametrize("cell", "abcd")
def test_cell(cell): pass

@pytest.mark.full
def test_costly(): pass

def test_plain(): pass
"""


@pytest.mark.matrix("arguments1-3-3")
@pytest.mark.parametrize(
    ("arguments", "run", "left_out"),
    [
        (["-n", "1"], 3, 3),
        ([], 3, 3),
        (["--all"], 6, 0),
        (["{file}::test_costly"], 1, 0),
        (["{file}::test_cell[a]"], 1, 0),
    ],
)
def test_only_the_cells_that_a_mark_names_run_by_default_and_the_others_are_counted(arguments, run, left_out, tmp_path):
    file = tmp_path / "test_matrix.py"
    file.write_text(MATRIX)
    words = [word.format(file=os.path.relpath(file, ROOT)) for word in arguments]
    words += [] if any("::" in word for word in words) else [str(file)]
    done = subprocess.run([*PYTEST, "-v", *words], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)
    assert f"{run} passed" in done.stdout, done.stdout
    counted = f"{left_out} more tests and cells of matrices run with --all (make test-all)"
    assert (counted in done.stdout) == bool(left_out)


@pytest.mark.full
def test_a_mark_cannot_name_a_cell_that_is_not_there(tmp_path):
    file = tmp_path / "test_matrix.py"
    file.write_text(MATRIX.replace('"d")', '"e")'))
    done = subprocess.run([*PYTEST, str(file)], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)
    assert "test_cell has no cell e, which its mark names" in done.stdout + done.stderr


@pytest.mark.full
def test_tests_that_hang_are_named_with_their_stacks(tmp_path):
    """In processes of pytest-xdist, where no test's output is seen before its end."""
    file = tmp_path / "test_hangs.py"
    file.write_text(
        "import pathlib, threading\n"
        "def test_waits():\n"
        f"    pathlib.Path('{tmp_path}/began').touch()\n"
        "    threading.Event().wait()\n"
    )
    command = [*PYTEST, "-n", "1", str(file)]
    process = subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, start_new_session=True, **OUTPUT)
    until_s = time.monotonic() + 120
    while not (tmp_path / "began").exists() and process.poll() is None and time.monotonic() < until_s:
        time.sleep(0.05)
    time.sleep(4)  # the process that leads hears of a test's beginning a moment later, on a busy machine seconds
    os.killpg(process.pid, signal.SIGUSR2)
    output, _ = process.communicate(timeout=60)
    assert re.search(r"Tests that were running:\n +\d+ s  .*::test_waits\n", output), output
    assert re.search(r'test_hangs.py", line 4 in test_waits', output), output
