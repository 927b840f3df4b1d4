"""The pipelines of tools/: what they run ends before they do."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from tests.documented import ROOT
from tools.quickstart import Stage, run_to_status

PIPELINE = """
from pathlib import Path
import sys
from rich.console import Console
from tools.quickstart import Stage, run_to_status
folder = Path(sys.argv[1])
stage = Stage(name="a", title="a", arguments=("-c", sys.argv[2], folder), result=folder / "DONE", seconds=1)
sys.exit(run_to_status([stage], Console(), 1.0))
"""
STAGE = """
import signal, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
def save(signum, _):
    time.sleep(1)
    (folder / "saved").write_text(str(signum))
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
signal.signal(signal.SIGINT, save)
(folder / "began").touch()
time.sleep(600)
"""
"""A training: it saves at either signal, which takes longer than a moment."""


@pytest.mark.parametrize(
    ("number", "goes_to_group", "status"),
    [(signal.SIGTERM, False, -signal.SIGTERM), (signal.SIGINT, True, 130)],  # a terminal's Ctrl-C is the group's
)
def test_a_pipeline_that_is_ended_waits_for_its_stage_to_save(
    tmp_path: Path, number: signal.Signals, goes_to_group: bool, status: int
) -> None:
    process = subprocess.Popen([sys.executable, "-c", PIPELINE, tmp_path, STAGE], cwd=ROOT, start_new_session=True)
    until_s = time.monotonic() + 60
    while not (tmp_path / "began").exists():
        assert time.monotonic() < until_s and process.poll() is None
        time.sleep(0.05)
    if goes_to_group:
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    assert process.wait(timeout=60) == status
    assert (tmp_path / "saved").read_text() == str(int(number))


def test_a_stage_is_done_again_after_the_stage_that_it_reads(tmp_path: Path) -> None:
    source, page = tmp_path / "evaluation", tmp_path / "page"
    page.write_text("old")
    os.utime(page, (1, 1))
    write = "import sys; open(sys.argv[1], 'w').write(sys.argv[2])"
    chosen = [
        Stage(name="a", title="a", arguments=("-c", write, source, "new"), result=source, seconds=1),
        Stage(name="b", title="b", arguments=("-c", write, page, "new"), result=page, seconds=1, sources=(source,)),
    ]
    assert run_to_status(chosen, Console(), 1.0) == 0
    assert page.read_text() == "new"
