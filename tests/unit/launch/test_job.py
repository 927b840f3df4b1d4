"""What cannot be a job script is refused, all of it at once; times are read as sbatch reads them."""

import re

import pytest

from launch.job import MEANING, STATUS, TEMPLATE, TEMPLATES, Component, JobScript, render, seconds_of
from mcore_rl.backend.launcher import FAILURE_FILE
from mcore_rl.errors import HUNG_STATUS, ConfigError

JOB = {
    "name": "moe",
    "program": "pretrain",
    "module": "mcore_rl.run.pretrain",
    "arguments": ("config.toml", "data.train=['a b']"),
    "run_dir": "/runs/moe",
    "work_dir": "/home",
}


@pytest.mark.parametrize(
    ("time", "seconds"),
    [
        ("90", 5400),
        ("90:30", 5430),
        ("2:00:01", 7201),
        ("1-0", 86400),
        ("1-12:30", 131400),
        ("1-0:0:5", 86405),
    ],
)
def test_time_limits_are_read_as_sbatch_reads_them(time, seconds):
    assert seconds_of(time) == seconds


def test_all_that_is_wrong_is_told_at_once():
    server = Component(name="Rollout Server", nodes=1, command="serve")
    with pytest.raises(ConfigError) as error:
        JobScript(
            **JOB | {"run_dir": "runs/moe", "name": "my moe"},
            time="10",
            signal_s=600,
            scratch="/tmp/$(rm -r x)",
            array="0-3",
            components=(server,),
        )
    assert len(str(error.value).splitlines()) == 6


def test_the_script_knows_the_failure_file_and_the_status_of_a_hung_rank():
    script = render(JobScript(**JOB))
    assert f"{FAILURE_FILE}=$log/failure.json" in script
    assert re.search(rf"^  {HUNG_STATUS}\) back_or_give_up hang", script, re.MULTILINE)


def test_every_exit_status_has_a_meaning_and_is_used():
    assert set(STATUS.values()) == set(MEANING)
    template = (TEMPLATES / TEMPLATE).read_text()
    for name in set(STATUS) - {"finished"}:
        assert f"status.{name}" in template


def test_words_reach_the_program_as_they_are():
    script = render(JobScript(**JOB, environment={"NCCL_DEBUG": "a 'b' $c"}))
    assert "'data.train=['\"'\"'a b'\"'\"']'\n" in script
    assert "export NCCL_DEBUG='a '\"'\"'b'\"'\"' $c'\n" in script
