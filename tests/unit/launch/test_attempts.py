"""Whole job scripts, run by bash with stand-ins for srun and scontrol: how attempts end, and what comes next."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from launch.job import STATUS, JobScript, render

SRUN = """#!/bin/bash
# Runs the command on each host, one after the other. `unfit` names hosts that are gone.
output=/dev/null
while [ "$1" != bash ]; do
  case $1 in --output=*) output=${1#*=} ;; esac
  shift
done
status=0 id=0
for host in $(<"$CLUSTER/hosts"); do
  SLURMD_NODENAME=$host SLURM_NODEID=$id SLURM_PROCID=$id "$@" >"${output//%N/$host}" 2>&1 || status=$?
  id=$((id + 1))
done
exit $status
"""
SCONTROL = """#!/bin/bash
case "$1 $2" in
  "show hostnames") tr ' ' '\\n' <"$CLUSTER/hosts" ;;
  "show job")
    excluded=$(cat "$CLUSTER/excluded" 2>/dev/null || echo '(null)')
    echo "JobId=7 JobState=RUNNING Restarts=$SLURM_RESTART_COUNT ExcNodeList=$excluded X=y"
    ;;
  "requeue 7") echo requeue >>"$CLUSTER/asked" ;;
  "update JobId=7") echo "${3#ExcNodeList=}" >"$CLUSTER/excluded" ;;
esac
"""
SLEEP = """#!/bin/bash
exec /bin/sleep 0.02
"""


class Machines:
    """Hosts n1, n2, ... on which `attempt` runs the script of a training; `program` is what its ranks run."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.run = folder / "run"
        (self.run / "logs").mkdir(parents=True)
        for name, text in {
            "srun": SRUN,
            "scontrol": SCONTROL,
            "sleep": SLEEP,
            "squeue": "#!/bin/sh\n",
        }.items():
            self._install(f"bin/{name}", text)
        monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
        monkeypatch.setenv("CLUSTER", str(folder))
        self.program("exit 0")

    def _install(self, name: str, text: str) -> None:
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def program(self, text: str) -> None:
        """Lines of bash that stand for the program on every rank; $RUN is the run's folder."""
        self._install("python", f"#!/bin/bash\nRUN={self.run}\n{text}\n")

    def attempt(
        self, number: int = 0, hosts: str = "n1 n2", **fields: object
    ) -> "subprocess.CompletedProcess[str]":
        """Run the script once, as Slurm would on these hosts."""
        (self.folder / "hosts").write_text(hosts + "\n")
        values = {
            "name": "a",
            "program": "pretrain",
            "module": "m",
            "arguments": ("config.toml",),
            "run_dir": str(self.run),
            "work_dir": str(self.folder),
            "python": str(self.folder / "python"),
            "starter": "srun",
            "node_check": False,
            "nodes": len(hosts.split()),
        }
        script = self.folder / "job.sbatch"
        script.write_text(render(JobScript(**values | fields)))
        environment = {
            "SLURM_JOB_ID": "7",
            "SLURM_RESTART_COUNT": str(number),
            "SLURM_JOB_NODELIST": "n[1-9]",
        }
        return subprocess.run(
            [shutil.which("bash"), str(script)],
            env=os.environ | environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=60,
        )

    def checkpoint(self, step: int) -> None:
        folder = self.run / "checkpoints"
        folder.mkdir(exist_ok=True)
        (folder / "latest_checkpointed_iteration.txt").write_text(str(step))

    @property
    def ends(self) -> list[tuple[str, str, str]]:
        """why, then and cause of each end that is recorded."""
        lines = [json.loads(line) for line in (self.run / "attempts.jsonl").read_text().splitlines()]
        return [(line["why"], line["then"], line["cause"]) for line in lines if line["event"] == "end"]

    @property
    def excluded(self) -> str:
        path = self.folder / "excluded"
        return path.read_text().strip() if path.exists() else ""


@pytest.fixture
def machines(tmp_path, monkeypatch):
    return Machines(tmp_path, monkeypatch)


def test_a_line_of_setup_that_fails_everywhere_ends_the_job_before_the_program(machines):
    machines.program("touch $RUN/started")
    setup = ("export A=1", 'if [ "$A" = 1 ]; then', "  module load missing", "fi", "export B=2")
    done = machines.attempt(setup=setup, hosts="n1")
    assert done.returncode == STATUS["refused"] and not (machines.run / "started").exists()
    cause = "every node is unfit in the same way: python.setup failed with status 127: module load missing"
    assert machines.ends == [("unfit", "2", cause)]
    assert f"{cause}. Correct the cluster's file" in done.stdout.splitlines()[-1]


def test_a_line_of_setup_that_fails_on_one_node_excludes_that_node(machines):
    done = machines.attempt(setup=('[ "$SLURMD_NODENAME" != n2 ]',))
    assert done.returncode == 0 and machines.excluded == "n2"
    cause = 'n2: python.setup failed with status 1: [ "$SLURMD_NODENAME" != n2 ]'
    assert machines.ends == [("unfit", "requeue", cause)]


def test_lines_of_setup_apply_to_the_program_and_their_status_is_not_its_own(machines):
    machines.program('[ "$A" = "1 2" ] && false; touch $RUN/DONE')
    assert machines.attempt(setup=('export A="1 2"',)).returncode == 0
    assert machines.ends == [("finished", "0", "")]


def test_a_check_that_fails_on_all_nodes_for_one_reason_ends_the_job(machines):
    done = machines.attempt(pre_node=('echo "$SLURMD_NODENAME has $RANDOM"', "test -e /gone # 'quoted'"))
    assert done.returncode == STATUS["refused"] and machines.excluded == ""
    reason = "checks.pre_node failed with status 1: test -e /gone # 'quoted'"
    assert machines.ends == [("unfit", "2", f"every node is unfit in the same way: {reason}")]


def test_nodes_that_fail_for_different_reasons_are_excluded(machines):
    line = 'if [ "$SLURMD_NODENAME" = n1 ]; then false; else exit 7; fi'
    done = machines.attempt(pre_node=(line,))
    assert done.returncode == 0 and machines.excluded == "n1,n2"
    assert [end[:2] for end in machines.ends] == [("unfit", "requeue")]


def test_one_node_proves_nothing_but_a_second_one_with_the_same_fault_does(machines):
    fields = {"pre_node": ("test -e /gone",)}
    assert machines.attempt(hosts="n1", **fields).returncode == 0 and machines.excluded == "n1"
    done = machines.attempt(1, hosts="n2", **fields)
    assert done.returncode == STATUS["refused"]
    assert [end[:2] for end in machines.ends] == [("unfit", "requeue"), ("unfit", "2")]


def test_two_nodes_whose_all_reduce_fails_are_both_excluded_as_either_may_be_the_cause(machines):
    fault = "no all-reduce was as it should be: Connection closed by peer [10.0.0.3]:4711"
    machines.program(f'echo "$SLURMD_NODENAME: UNFIT: {fault}"; exit 3')
    assert machines.attempt(node_check=True).returncode == 0
    assert machines.excluded == "n1,n2" and machines.ends == [("unfit", "requeue", f"n2: {fault}")]
    done = machines.attempt(1, hosts="n3 n4", node_check=True)
    assert done.returncode == STATUS["refused"]


def test_a_checks_own_limit_ends_it_and_is_its_reason(machines):
    machines.program("touch $RUN/DONE")
    line = 'if [ "$SLURMD_NODENAME" = n2 ]; then while :; do :; done; fi'
    machines.attempt(pre_node=(line,), check_timeout_s=1)
    assert machines.excluded == "n2" and machines.ends[0][2] == "n2: the checks did not end within 1 s"


def test_setting_up_a_containers_image_counts_against_no_checks_limit():
    script = render(
        JobScript(
            name="a",
            program="p",
            module="m",
            arguments=(),
            run_dir="/r",
            work_dir="/w",
            check_timeout_s=60,
            image_timeout_s=900,
        )
    )
    limits = re.findall(r"timeout --kill-after=10 (\d+) (\S+)", script)
    assert limits == [("60", "bash"), ("990", "srun")]


def test_an_attempt_that_was_lost_with_its_first_node_is_recorded_by_the_next_one(machines):
    machines.program("kill -KILL $(ps -o ppid= $PPID)")  # the job script; srun lies between
    assert machines.attempt().returncode == -9 and machines.ends == []
    machines.program("touch $RUN/DONE")
    done = machines.attempt(1)
    lost = "attempt 0 of job 7 ended without a word: its first node n1 was lost, or the script was killed"
    why, then, cause = machines.ends[0]
    assert (why, then) == ("lost", "requeue") and cause.startswith(lost) and lost in done.stdout
    assert [end[:2] for end in machines.ends[1:]] == [("finished", "0")]


def test_a_conversion_that_succeeds_leaves_its_command_in_done(machines):
    fields = {"is_training": False, "program": "convert", "arguments": ("convert", "export", "a b", "out")}
    machines.program("exit 3")
    assert machines.attempt(hosts="n1", **fields).returncode == 3 and not (machines.run / "DONE").exists()
    machines.program("exit 0")
    assert machines.attempt(hosts="n1", **fields).returncode == 0
    assert (machines.run / "DONE").read_text() == "mcore-rl convert export 'a b' out\n"
