"""What cannot be a job script is refused, all of it at once; times are read as sbatch reads them."""

import json
import re
import shlex
import subprocess

import pytest

from mcore_rl.checks.cluster import seconds_of, why_reserved
from mcore_rl.errors import HUNG_STATUS, ConfigError
from mcore_rl.launch.job import MEANING, STATUS, Servers, render
from mcore_rl.storage.files import UNWRITTEN
from mcore_rl.workers.failures import FAILURES, Order, note_failure, rank_death, rank_failure
from mcore_rl.workers.launcher import OF_RANKS
from tests.unit.launch.conftest import ROOT, job_script

JOB_SH = (ROOT / "launch/job.sh").read_text()

JOB = {
    "name": "moe",
    "program": "pretrain",
    "module": "mcore_rl.programs.pretrain",
    "arguments": ("config.toml", "data.train=['a b']"),
    "run_dir": "/runs/moe",
    "work_dir": "/home",
}


@pytest.mark.parametrize(
    ("time", "seconds"),
    [("90", 5400), ("90:30", 5430), ("2:00:01", 7201), ("1-0", 86400), ("1-12:30", 131400), ("1-0:0:5", 86405)],
)
def test_time_limits_are_read_as_sbatch_reads_them(time, seconds):
    assert seconds_of(time) == seconds


def test_all_that_is_wrong_is_told_at_once():
    servers = Servers(nodes=1, command="serve")
    wrong = {"run_dir": "runs/moe", "name": "my moe", "time": "10", "signal_s": 600, "array": "0-3", "spares": 1}
    with pytest.raises(ConfigError) as error:
        job_script(**JOB | wrong, scratch="/tmp/$(rm -r x)", servers=servers)
    assert len(str(error.value).splitlines()) == 6 and "survival.spares=1 with servers: " in str(error.value)


def test_the_script_knows_the_folder_of_causes_and_the_status_of_a_hung_rank():
    assert f"{FAILURES}=$log/failures" in JOB_SH
    assert '  "$hung_status") failed hang' in JOB_SH and f"hung_status={HUNG_STATUS}\n" in render(job_script(**JOB))


def test_every_exit_status_has_a_meaning_and_is_used():
    assert set(STATUS.values()) == set(MEANING)
    assert set(re.findall(r"status\[(\w+)\]", JOB_SH)) == set(STATUS) - {"finished"}


def test_words_reach_the_program_as_they_are():
    script = render(job_script(**JOB, environment={"NCCL_DEBUG": "a 'b' $c"}))
    shell = f'{script.partition("job_sh=")[0]}printf "%s\\n" "${{arguments[@]}}" "${{environment[@]}}"'
    shown = subprocess.run(["bash", "-uc", shell], capture_output=True, text=True)
    assert shown.stdout.splitlines() == [*JOB["arguments"], "NCCL_DEBUG=a 'b' $c"]


def test_a_cluster_may_set_no_variable_of_the_script_or_of_the_launcher_but_the_two_that_are_defaults():
    """All names that the two parts of a script assign, and those by which a rank knows its place."""
    script = render(job_script(**JOB)) + JOB_SH
    assigning = r"(?:^ *|then |printf .* \"|eval \")((?:export )?[A-Za-z_]+=.*|export .*)"
    assigned = re.findall(assigning, script, re.MULTILINE)
    names = {name for line in assigned for name in re.findall(r"(?:^|^export | )([A-Za-z_]+)=", line)} | OF_RANKS
    assert names > {"PYTHONPATH", "PYTHONSAFEPATH", "TMPDIR", "TRITON_CACHE_DIR", "SERVER_PORT", "run", "RANK"}
    of_checks = "TORCH_NCCL_BLOCKING_WAIT"  # set in the process of the checks alone
    assert {name for name in names if not why_reserved(name)} == {"OMP_NUM_THREADS", "PYTHONUNBUFFERED", of_checks}
    allowed = "NCCL_DEBUG CUDA_DEVICE_MAX_CONNECTIONS LD_LIBRARY_PATH WANDB_API_KEY https_proxy MCORE_RL_CACHE"
    assert not any(map(why_reserved, allowed.split()))


def test_the_script_reads_headline_and_status_of_the_first_cause_whatever_is_in_them(tmp_path):
    start = JOB_SH.index("failed_with= #")
    reader = JOB_SH[start : JOB_SH.index('message "the program exited', start)]
    assert f"unwritten={shlex.quote(UNWRITTEN)}\n" in render(job_script(**JOB))
    folder = tmp_path / "failures"
    note_failure(rank_failure(0, 1, "RuntimeError: Connection closed by peer", order=Order.LOST_PEER), folder)
    note_failure(rank_failure(3, 7, 'KeyError: "C:\\temp\\é"', "long\ntext", host="n2"), folder)
    note_failure(rank_death(2, 9), folder)
    given = f"log={tmp_path} run={tmp_path} rc=1 is_training=yes why=limit cause= hosts=(); free_mib() {{ echo 100; }};"
    given += ' message() { echo "$@"; }; wait_for_folder() { :; }'
    shell = f'{given}\n{reader}\nprintf "%s\\n" "$failed_with" "$cause"'
    printed = subprocess.run(["bash", "-uc", shell], capture_output=True, text=True, check=True).stdout
    headline = 'rank 3 on n2: KeyError: "C:\\temp\\é"'
    first, status, cause = printed.splitlines()
    assert (first, status, cause) == (f"first cause: {headline}", "7", headline)
    assert json.loads((tmp_path / "failure.json").read_text())["text"] == "long\ntext"
