"""What a run writes down of its starts."""

import json
import subprocess
import sys

import pytest
import torch

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.errors import DataError
from mcore_rl.megatron.platform import Platform
from mcore_rl.metrics.attempts import add_attempt, code_commit, this_run_attempt
from mcore_rl.metrics.attempts_file import NUMERICS, read_attempts

PLATFORM = Platform(
    device=torch.device("cpu"),
    dtype=torch.float32,
    layers="torch",
    rank=0,
    local_rank=0,
    world_size=4,
    deterministic=False,
)


def test_every_start_is_added_and_read_back(tmp_path):
    first, second = (this_run_attempt(PLATFORM, MeshConfig(tp=2, dp=2), step) for step in (0, 7))
    add_attempt(tmp_path, first)
    add_attempt(tmp_path, second)
    assert read_attempts(tmp_path) == [first, second]
    assert (first.step, second.step) == (0, 7)
    assert first.mesh == {"tp": 2, "pp": 1, "vpp": 1, "cp": 1, "ep": 1, "etp": 1, "world": 4}
    assert torch.__version__.startswith(first.versions["torch"])
    assert first.machine.ranks == 4
    assert first.numerics == NUMERICS


def test_no_environment_variable_is_written(tmp_path, monkeypatch):
    monkeypatch.setenv("A_TOKEN_OF_SOMEBODY", "s3cret-value")
    add_attempt(tmp_path, this_run_attempt(PLATFORM, MeshConfig(), 0))
    text = (tmp_path / "run.json").read_text()
    assert "s3cret-value" not in text and "A_TOKEN_OF_SOMEBODY" not in text
    assert json.loads(text)[0]["command"][1:] == sys.orig_argv[1:]


def test_the_commit_is_that_of_the_code_or_of_the_job_that_copied_it(tmp_path):
    assert code_commit(tmp_path) == ""
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path)]
    (tmp_path / "a.py").write_text("1")
    for words in (["init", "-q"], ["add", "a.py"], ["commit", "-q", "-m", "a"]):
        subprocess.run([*git, *words], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout
    assert code_commit(tmp_path) == head.strip()
    (tmp_path / "a.py").write_text("2")
    assert code_commit(tmp_path) == f"{head.strip()} + changes"

    copy = tmp_path / "job" / "code"
    copy.mkdir(parents=True)
    (tmp_path / "job" / "commit.txt").write_text("abc and code.patch\n")
    assert code_commit(copy) == "abc and code.patch"


def test_a_damaged_file_is_named_with_its_remedy(tmp_path):
    (tmp_path / "run.json").write_text('[{"started": 1}]')
    with pytest.raises(DataError, match=r"run\.json is damaged.*Move it away"):
        read_attempts(tmp_path)
