"""The notebook of the examples runs from its first cell to its last, and its reward rises."""

import json
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from mcore_rl.api import read_metrics

NOTEBOOK = Path(__file__).parents[2] / "examples/first_run.ipynb"
RUN_CELLS = """
import json, sys
names = {"__name__": "__main__"}
for cell in json.load(sys.stdin)["cells"]:
    if cell["cell_type"] == "code":
        exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
"""


@pytest.mark.full
def test_the_notebook_runs_and_its_reward_rises(tmp_path: Path) -> None:
    text = NOTEBOOK.read_text(encoding="utf-8")
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1)), "its outputs are stored"
    assert "<polyline" in str(cells[-1]["outputs"]) and "'replay.kind': 'r2'" in str(cells[-3]).replace('"', "'")
    assert max(len(cell["source"]) for cell in cells) <= 25
    done = subprocess.run(
        [sys.executable, "-c", RUN_CELLS],
        input=text,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(NOTEBOOK.parents[1]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rewards = list(read_metrics(tmp_path / "first_run/rl")["reward/mean"].values())
    assert len(rewards) == 24
    assert statistics.fmean(rewards[-3:]) > statistics.fmean(rewards[:3]) + 0.1, rewards
    shown = re.findall(r"^ *(\d+) 0\.\d+ #*$", done.stdout, re.MULTILINE)
    assert shown[0] == "1" and len(shown) >= 3
