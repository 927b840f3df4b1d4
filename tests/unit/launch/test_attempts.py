"""Whole job scripts, run by bash with stand-ins for srun and scontrol: how attempts end, and what comes next."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mcore_rl.config.cluster import ContainerConfig
from mcore_rl.launch import job
from mcore_rl.launch.job import STATUS, render
from tests.unit.launch.conftest import ROOT, job_script

SRUN = """#!/bin/bash
# Runs the command on each host, one after the other. `unfit` names hosts that are gone.
output=/dev/null without=none
while [ "$1" != bash ]; do
  case $1 in
    --output=*) output=${1#*=} ;;
    --exclude=*) without=${1#*=} ;;
    --nodelist=*) # a task that watches, for as long as the job runs: only where a test needs it
      [ -e "$CLUSTER/watched" ] || exit 0
      without="n1,n2" ;;
  esac
  shift
done
status=0 id=0
for host in $(grep -vxF -f <(tr , '\n' <<<"$without") <(tr ' ' '\n' <"$CLUSTER/hosts")); do
  SLURMD_NODENAME=$host SLURM_NODEID=$id SLURM_PROCID=$id "$@" >"${output//%N/$host}" 2>&1 || status=$?
  id=$((id + 1))
done
exit $status
"""
SCONTROL = """#!/bin/bash
case "$1 $2" in
  "show hostnames") if [ "$3" = left ]; then echo n2; else tr ' ' '\\n' <"$CLUSTER/hosts"; fi ;;
  "show job")
    excluded=$(cat "$CLUSTER/excluded" 2>/dev/null || echo '(null)')
    restarts=$(cat "$CLUSTER/restarts" 2>/dev/null || echo "$SLURM_RESTART_COUNT")
    allocated=$(cat "$CLUSTER/allocated" 2>/dev/null || echo all)
    limit=$(cat "$CLUSTER/limit" 2>/dev/null || echo 1-00:00:00)
    state=$(cat "$CLUSTER/state" 2>/dev/null || echo "RUNNING Reason=None")
    echo "JobId=7 JobState=$state Restarts=$restarts TimeLimit=$limit ExcNodeList=$excluded NodeList=$allocated X=y"
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
        self.work = folder
        """Folder of the launch."""
        self.wrap: list[str] = []
        """Command that runs the script, if any."""
        (self.run / "logs").mkdir(parents=True)
        for name, text in {
            "srun": SRUN,
            "scontrol": SCONTROL,
            "sleep": SLEEP,
            "squeue": "#!/bin/sh\n",
            "sinfo": '#!/bin/sh\ncat "$CLUSTER/states" 2>/dev/null\n',
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

    def attempt(self, number: int = 0, hosts: str = "n1 n2", **fields: object) -> "subprocess.CompletedProcess[str]":
        """Run the script once, as Slurm would on these hosts."""
        (self.folder / "hosts").write_text(hosts + "\n")
        values = {
            "name": "a",
            "program": "pretrain",
            "module": "m",
            "arguments": ("config.toml",),
            "run_dir": str(self.run),
            "work_dir": str(self.work),
            "python": str(self.folder / "python"),
            "starter": "srun",
            "node_check": False,
            "nodes": len(hosts.split()),
        }
        self._install("job.sbatch", render(job_script(**values | fields)))
        environment = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": str(number), "SLURM_JOB_NODELIST": "n[1-9]"}
        return subprocess.run(
            [*self.wrap, str(self.folder / "job.sbatch")],
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


@pytest.mark.full
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


@pytest.mark.full
def test_nodes_that_fail_for_different_reasons_are_excluded(machines):
    line = 'if [ "$SLURMD_NODENAME" = n1 ]; then false; else exit 7; fi'
    done = machines.attempt(pre_node=(line,))
    assert done.returncode == 0 and machines.excluded == "n1,n2"
    assert [end[:2] for end in machines.ends] == [("unfit", "requeue")]


@pytest.mark.full
def test_one_node_proves_nothing_but_a_second_one_with_the_same_fault_does(machines):
    fields = {"pre_node": ("test -e /gone",)}
    assert machines.attempt(hosts="n1", **fields).returncode == 0 and machines.excluded == "n1"
    done = machines.attempt(1, hosts="n2", **fields)
    assert done.returncode == STATUS["refused"]
    assert [end[:2] for end in machines.ends] == [("unfit", "requeue"), ("unfit", "2")]


@pytest.mark.full
def test_two_nodes_whose_all_reduce_fails_are_both_excluded_as_either_may_be_the_cause(machines):
    fault = "no all-reduce was as it should be: Connection closed by peer [10.0.0.3]:4711"
    machines.program(f'echo "$SLURMD_NODENAME: UNFIT: {fault}"; exit 3')
    assert machines.attempt(node_check=True).returncode == 0
    assert machines.excluded == "n1,n2" and machines.ends == [("unfit", "requeue", f"n2: {fault}")]
    done = machines.attempt(1, hosts="n3 n4", node_check=True)
    assert done.returncode == STATUS["refused"]


@pytest.mark.full
def test_a_checks_own_limit_ends_it_and_is_its_reason(machines):
    machines.program("touch $RUN/DONE")
    line = 'if [ "$SLURMD_NODENAME" = n2 ]; then /bin/sleep 600; fi'
    machines.attempt(pre_node=(line,), check_timeout_s=3)  # as long as the other node has on a busy machine
    assert machines.excluded == "n2" and machines.ends[0][2] == "n2: the checks did not end within 3 s"


def test_setting_up_a_containers_image_counts_against_no_checks_limit(machines):
    machines._install("bin/timeout", '#!/bin/bash\necho "$2 $3" >>"$CLUSTER/limits"\nexec /usr/bin/timeout "$@"\n')
    machines._install("bin/apptainer", "#!/bin/bash\n[[ $* = *\\ true ]] || touch $CLUSTER/run/DONE\n")
    container = ContainerConfig(kind="apptainer", image="a.sif", timeout_s=900)
    fields = {"container": container, "node_check": True, "check_timeout_s": 60}
    assert machines.attempt(hosts="n1", **fields).returncode == 0
    assert machines.ends == [("finished", "0", "")]
    assert (machines.folder / "limits").read_text() == "990 srun\n60 bash\n"


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


def fails_on(host: str, headline: str = "ended", status: int = 139, prefix: str = "") -> str:
    """A program whose rank on `host` writes a cause, as mcore_rl/workers/failures.py does, and ends."""
    cause = {"headline": headline, "rank": 1, "host": f"{host}.cluster", "status": status, "order": 0, "text": ""}
    text = json.dumps(cause, indent=1)
    file = "$MCORE_RL_FAILURES/0-1700000000.000-1.json"
    return f"{prefix}\n[ $SLURMD_NODENAME != {host} ] || cat >{file} <<'EOF'\n{text}\nEOF\nexit 1"


@pytest.mark.full
@pytest.mark.parametrize(
    ("crashing", "last_attempts", "excluded"), [("n2 n1 n2 n1 n2", 10, "n2"), ("n2 n2 n1 n2", 3, "")]
)
def test_a_node_that_crashed_3_of_the_last_attempts_is_excluded_although_there_is_progress(
    machines, crashing, last_attempts, excluded
):
    for number, host in enumerate(crashing.split()):
        assert machines.excluded == ""
        machines.program(fails_on(host))
        machines.checkpoint(10 * number + 10)
        assert machines.attempt(number, "n1 n2 n3", bad_node_attempts=last_attempts).returncode == 0
    assert machines.excluded == excluded and {end[:2] for end in machines.ends} == {("crash", "requeue")}


def test_the_first_cause_is_the_first_line_after_the_start_and_sruns_words_are_in_a_log_of_their_own(machines):
    """srun speaks of the innocent rank first, which it ends itself."""
    machines.program(fails_on("n2"))
    srun = machines.folder / "bin/srun"
    words = (
        "srun: error: n1: task 0: Exited with exit code 75",
        "srun: launch/slurm: _step_signal: Terminating StepId=7.0",
    )
    said = "\n".join(f"echo '{line}' >&2" for line in (*words, "srun: warning: a switch is slow"))
    srun.write_text(srun.read_text().replace("exit $status", f"{said}\nexit $status"))
    done = machines.attempt()
    lines = done.stdout.splitlines()
    assert lines[1].endswith("first cause: ended") and "the program exited with 1" in lines[2]
    of_srun = [line for line in done.stderr.splitlines() if line.startswith("srun")]
    assert of_srun == ["srun: warning: a switch is slow"]
    assert (machines.run / "logs/7.0/srun.log").read_text().startswith("\n".join(words))


def test_without_its_bad_node_a_job_has_one_more_attempt(machines):
    machines.program(fails_on("n2"))
    for number in range(3):
        assert machines.attempt(number).returncode == 0
    assert machines.excluded == "n2"
    machines.program(fails_on("n1"))
    assert machines.attempt(3, "n1 n3").returncode == STATUS["crash_loop"] and machines.excluded == "n2"


@pytest.mark.full
def test_crashes_with_progress_between_them_have_a_limit_too(machines):
    codes = []
    for number in range(3):
        machines.program(fails_on(f"n{1 + number % 2}"))
        machines.checkpoint(10 * number + 10)
        codes.append(machines.attempt(number, max_crashes=3).returncode)
    assert codes == [0, 0, STATUS["crash_limit"]]


SPARE = {"hosts": "n1 n2 n3", "nodes": 2, "spares": 1}


@pytest.mark.full
def test_when_too_few_nodes_are_left_the_job_is_requeued_and_attempts_stay_apart(machines):
    machines.program(f"if [ -e $RUN/logs/7.1 ]; then\n{fails_on('n1')}\nelse\n{fails_on('n2')}\nfi")
    done = machines.attempt(**SPARE)
    assert done.returncode == 0
    assert [end[:2] for end in machines.ends] == [("crash", "restart"), ("crash", "requeue")]
    assert "fewer than 2 nodes of the allocation are left: n2,n1 failed" in done.stdout
    machines.program("touch $RUN/DONE")
    assert machines.attempt(1, **SPARE).returncode == 0
    lines = [json.loads(line) for line in (machines.run / "attempts.jsonl").read_text().splitlines()]
    assert [line["attempt"] for line in lines if line["event"] == "start"] == [0, 1, 2]


@pytest.mark.full
def test_an_unfit_node_and_one_that_slurm_calls_down_are_replaced_by_spares(machines):
    (machines.folder / "states").write_text("n1=allocated\nn2=down*\nn3=allocated\nn4=mixed\n")
    machines.program("touch $RUN/DONE")
    line = '[ "$SLURMD_NODENAME" != n3 ]'
    done = machines.attempt(hosts="n1 n2 n3 n4", nodes=2, spares=2, pre_node=(line,))
    assert done.returncode == 0, done.stdout
    assert [end[:2] for end in machines.ends] == [("unfit", "restart"), ("finished", "0")]
    assert "begins anew on n1,n4, within the allocation and without n2,n3" in done.stdout and machines.excluded == ""


@pytest.mark.full
def test_a_crash_of_nobody_knows_whom_begins_anew_only_where_nodes_are_checked_and_gives_up(machines):
    machines.program("exit 1")
    assert machines.attempt(**SPARE).returncode == 0
    assert [end[:2] for end in machines.ends] == [("crash", "requeue")]
    (machines.run / "attempts.jsonl").unlink()
    (machines.run / "logs/7.tries").unlink()
    done = machines.attempt(pre_node=("true",), **SPARE)
    assert done.returncode == STATUS["crash_loop"]
    assert [end[:2] for end in machines.ends] == [("crash", "restart")] * 2 + [("crash", "11")]


@pytest.mark.full
def test_an_orphan_does_not_begin_anew_beside_the_attempt_that_slurm_has_started(machines):
    machines.program(fails_on("n2"))
    (machines.folder / "restarts").write_text("1")
    done = machines.attempt(**SPARE)
    assert done.returncode == STATUS["cancelled"]
    assert [end[:2] for end in machines.ends] == [("lost", "orphan")]


@pytest.mark.full
def test_a_task_on_another_node_has_the_job_requeued_that_has_lost_its_first_one(machines):
    """Slurm does not, because of --no-kill. The task leaves a job alone that still has the node, or that runs anew."""
    (machines.folder / "watched").touch()
    lose = f"echo left >{machines.folder}/allocated"
    machines.program(f"/bin/sleep 0.3; {lose}; kill -KILL $(ps -o ppid= $PPID)")  # the job script
    assert machines.attempt(**SPARE).returncode == -9  # and the task has ended, which has its output
    assert (machines.folder / "asked").read_text() == "requeue\n"
    (machines.folder / "restarts").write_text("1")
    assert machines.attempt(**SPARE).returncode == -9
    assert (machines.folder / "asked").read_text() == "requeue\n"


UNWRITABLE = """
mkdir -p $RUN/aside && mv $RUN/attempts.jsonl $RUN/aside/ && mkdir $RUN/attempts.jsonl
"""
"""As on a file system that is read-only for a while: the file of the attempts cannot be written."""


@pytest.mark.full
def test_a_folder_that_stays_unwritable_ends_the_job(machines, monkeypatch):
    monkeypatch.setattr(job, "WRITABLE_S", 1)
    machines.program(f"[ $SLURMD_NODENAME = n1 ] || exit 1\n{UNWRITABLE}exit 1")
    done = machines.attempt()
    assert done.returncode == STATUS["no_space"]
    assert "could not be written for 1 s: giving up (exit status 18)" in done.stdout
    assert not (machines.folder / "asked").exists()


def test_a_full_disk_is_the_cause_and_is_retried_before_the_job_gives_up(machines):
    headline = 'rank 0 on n1: writing checkpoint "a" failed: No space left on device. 0.01 GiB are free'
    machines.program(fails_on("n1", headline.replace('"', "'"), status=2))
    codes = [machines.attempt(number).returncode for number in range(3)]
    assert codes == [0, 0, STATUS["no_space"]]
    why, then, cause = machines.ends[-1]
    assert (why, then) == ("disk", str(STATUS["no_space"]))
    assert re.fullmatch(r"the disk is full \(\d+ MiB free at /\S+\): rank 0 on n1: writing .*", cause)


@pytest.mark.full
def test_on_a_disk_that_is_full_to_the_last_byte_cause_and_end_are_written(machines):
    """A disk of 4 MiB for the run, in a namespace of its own: a mount needs no privileges there."""
    enter = [shutil.which("unshare"), "--map-root-user", "--mount"]
    mount = f"mount -t tmpfs -o size=4M tmpfs {machines.run} && mkdir {machines.run}/logs"
    fill = "dd if=/dev/zero of=$RUN/filled bs=4k 2>/dev/null"
    module = "from mcore_rl.workers.failures import note_failure, rank_failure as f"
    note = f'{sys.executable} -c \'{module}; note_failure(f(1, 2, "No space left on device", host="n1"))\''
    machines.program(f"[ $SLURMD_NODENAME = n1 ] || exit 1\n{fill}\nPYTHONPATH={ROOT} {note}\nexit 1")
    shown = f"tail -n 1 {machines.run}/attempts.jsonl"
    machines.wrap = [*enter, "sh", "-c", f'{mount} && "$0" "$@"; {shown}']
    done = machines.attempt()
    end = json.loads(done.stdout.splitlines()[-1])
    assert (end["why"], end["then"]) == ("disk", "requeue")
    assert end["cause"].endswith("rank 1 on n1: No space left on device")


@pytest.mark.parametrize("gone", ["work", "code"])
def test_a_launch_folder_that_was_deleted_is_the_reason_and_nothing_runs_elsewhere(machines, gone):
    """Slurm has started the script in another folder, where anybody may have put a sitecustomize.py."""
    machines.program("touch $RUN/ran")
    machines.work = machines.folder / "work"
    for name in {"work", "code"} - {gone}:
        (machines.folder / name).mkdir()
    done = machines.attempt(code_dir=str(machines.folder / "code"))
    assert done.returncode == STATUS["refused"] and not (machines.run / "ran").exists()
    cause = f"{machines.folder / gone} cannot be entered on n1: it was deleted, moved, or is not mounted there"
    assert machines.ends == [("refused", "2", cause)]


def test_a_job_whose_copy_of_job_sh_was_deleted_ends_with_that_cause(machines):
    gone = machines.folder / "gone/job.sh"
    done = machines.attempt(job_sh=str(gone))
    assert done.returncode == STATUS["refused"] and "Restore it and submit again" in done.stdout
    ((why, then, cause),) = machines.ends
    assert (why, then) == ("refused", "2") and cause.startswith(f"{gone} cannot be read on ")


def test_a_launch_folder_that_one_node_lacks_is_that_nodes_fault(machines):
    machines.work = machines.folder / "work"
    machines.work.mkdir()
    srun = machines.folder / "bin/srun"
    lacking = f"if [ $host = n2 ]; then mv {machines.work}{{,.moved}}; fi\n  SLURMD_NODENAME"
    text = srun.read_text()
    srun.write_text(text.replace("SLURMD_NODENAME", lacking, 1))
    done = machines.attempt(pre_node=("true",))
    assert done.returncode == 0 and machines.excluded == "n2"
    why, then, cause = machines.ends[0]
    assert (why, then) == ("unfit", "requeue")
    assert cause == f"n2: {machines.work} cannot be entered: it was deleted, moved, or is not mounted there"


@pytest.mark.matrix("1023-False")
@pytest.mark.parametrize(("mode", "is_imported"), [(0o755, True), (0o775, True), (0o777, False), (0o1777, False)])
def test_what_everybody_may_write_is_not_imported(machines, mode, is_imported):
    """Python itself runs a sitecustomize.py that it finds on its path."""
    machines.work = machines.folder / "work"
    machines.work.mkdir()
    machines.work.chmod(mode)
    (machines.work / "sitecustomize.py").write_text(f"open('{machines.run}/planted', 'w')\n")
    machines.program(f"{sys.executable} -c ''; touch $RUN/DONE")
    code = machines.folder / "code"
    code.mkdir()
    done = machines.attempt(code_dir=str(code))
    assert done.returncode == 0 and (machines.run / "planted").exists() == is_imported
    assert (f"warning: {machines.work} is not on PYTHONPATH" in done.stdout) == (not is_imported)


@pytest.mark.full
@pytest.mark.parametrize(
    ("limit", "is_enough"),
    [("00:10:00", False), ("00:10:01", True), ("1-00:00:00", True), ("1-00:10:00", True), ("UNLIMITED", True)],
)
def test_an_attempt_does_not_begin_within_a_limit_that_launch_would_refuse(machines, limit, is_enough):
    (machines.folder / "limit").write_text(limit)
    machines.program("touch $RUN/DONE")
    done = machines.attempt(signal_s=600)
    assert (done.returncode, machines.ends[0][:2]) == ((0, ("finished", "0")) if is_enough else (2, ("limit", "2")))


def test_a_limit_that_is_shortened_while_the_job_runs_ends_it_after_the_save(machines):
    """Requeued, each attempt would save a step and be requeued, without end."""
    machines.program(
        f"""[ $SLURMD_NODENAME = n1 ] || exit 0
echo 00:01:30 >{machines.folder}/limit
kill -USR1 $(ps -o ppid= $PPID)
until [ -e $RUN/STOP ]; do /bin/sleep 0.01; done
mkdir $RUN/checkpoints; echo 7 >$RUN/checkpoints/latest_checkpointed_iteration.txt"""
    )
    done = machines.attempt(signal_s=600)
    assert done.returncode == STATUS["refused"] and not (machines.folder / "asked").exists()
    why, then, cause = machines.ends[0]
    assert (why, then) == ("limit", "2")
    assert cause.startswith("the time limit of the job is now 90 s, not more than survival.signal_s=600")
    assert "Submit again with a longer limit: the run resumes from step 7" in done.stdout


ENDED = {
    # what Slurm then has of the job -> why, then, cause
    "scancel": ("echo COMPLETING Reason=None >state", ("term", "143", "cancelled")),
    "requeue": (
        "echo 1 >restarts; echo COMPLETING Reason=None >state",
        ("term", "143", "requeued by its user or an administrator"),
    ),
    "node": (
        "echo 1 >restarts; echo n2 is down* >states; echo COMPLETING Reason=None >state",
        ("term", "143", "a node is lost: n2 is down*"),
    ),
    "limit": (
        "echo 00:20:00 >limit; echo COMPLETING Reason=TimeLimit >state",
        ("limit", "requeue", "Slurm has ended the attempt: its time limit was set below the time that it had run"),
    ),
    "short limit": ("echo 00:01:00 >limit; echo COMPLETING Reason=TimeLimit >state", ("limit", "2", None)),
}
TERMED = """[ $SLURMD_NODENAME = n1 ] || exit 0
cd {folder}
{before}
kill -TERM $(ps -o ppid= $PPID)
until grep -q '"end"' $RUN/attempts.jsonl || [ -e $RUN/STOP ]; do /bin/sleep 0.01; done
mkdir $RUN/checkpoints; echo 7 >$RUN/checkpoints/latest_checkpointed_iteration.txt
{after}"""


@pytest.mark.full
@pytest.mark.parametrize("who", ENDED)
def test_who_has_ended_an_attempt_is_recorded_once(machines, who):
    slurm, end = ENDED[who]
    machines.program(
        TERMED.format(folder=machines.folder, before=f"kill -USR1 $(ps -o ppid= $PPID); {slurm}", after="")
    )
    done = machines.attempt(signal_s=600)
    assert done.returncode == STATUS["cancelled"]
    ((*found, cause),) = machines.ends
    assert tuple(found) == end[:2] and (cause == end[2] or end[2] is None), cause
    assert f"{found[0]}: {cause}" in done.stdout
    assert (machines.folder / "asked").exists() == (end[1] == "requeue")


def test_term_to_the_whole_job_is_a_stop_with_a_save(machines):
    machines.program(TERMED.format(folder=machines.folder, before="", after=""))
    done = machines.attempt()
    assert done.returncode == STATUS["stopped"] and not (machines.folder / "asked").exists()
    assert machines.ends == [("term", "10", "TERM was sent to the whole job")]
    assert "stopped by TERM to the whole job, at step 7 (exit status 10)" in done.stdout


def test_a_signal_to_the_step_alone_is_named(machines):
    machines.program("echo stopping after step 3: SIGTERM came")
    assert machines.attempt().returncode == 0
    cause = "the program stopped with a save: SIGTERM came to its step alone, not to this script"
    assert machines.ends == [("ended", "requeue", cause)]


@pytest.mark.parametrize("line", ["exit 3", "exit 0", "kill -TERM $$"])
def test_an_inherited_bash_env_that_ends_every_bash_is_named(machines, monkeypatch, line):
    """sbatch passes the variable on, and bash runs that file before a script."""
    file = machines.folder / "env.sh"
    file.write_text(f"{line}\n")
    monkeypatch.setenv("BASH_ENV", str(file))
    done = machines.attempt()
    assert done.returncode == STATUS["refused"]
    cause = f"BASH_ENV={file} ends every bash before its first command"
    assert machines.ends == [("refused", "2", cause)] and f"{cause}. Correct that file" in done.stdout


def test_an_inherited_bash_env_serves_the_lines_of_setup(machines, monkeypatch):
    """It defines the function `module` on many clusters."""
    (machines.folder / "env.sh").write_text('echo noise; module() { echo "$2" >>"$CLUSTER/loaded"; }\n')
    monkeypatch.setenv("BASH_ENV", str(machines.folder / "env.sh"))
    machines.program("touch $RUN/DONE")
    assert machines.attempt(hosts="n1", setup=("module load cuda",)).returncode == 0
    assert "cuda" in (machines.folder / "loaded").read_text()


@pytest.mark.full
def test_a_cause_that_could_not_be_written_is_the_first_cause_all_the_same(machines):
    """As on a file system that has become read-only: a file stands where the folder of the causes was."""
    module = "from mcore_rl.workers.failures import note_failure, rank_failure as f"
    note = f'{sys.executable} -c \'{module}; note_failure(f(0, 1, "Read-only file system", host="n2"))\''
    machines.program(
        f"""rm -rf $MCORE_RL_FAILURES; touch $MCORE_RL_FAILURES
[ $SLURMD_NODENAME = n2 ] || exit 1
PYTHONPATH={ROOT} {note}
exit 1"""
    )
    srun = machines.folder / "bin/srun"
    words = "echo 'srun: error: n1: task 0: Exited with exit code 1' >&2"
    srun.write_text(srun.read_text().replace("exit $status", f"{words}\nexit $status"))
    machines.attempt()
    assert machines.ends == [("crash", "requeue", "rank 0 on n2: Read-only file system")]


WAYS = {
    "a module that sets PYTHONPATH": {"setup": ("export PYTHONPATH={other}:$PYTHONPATH",)},
    "an image that sets PYTHONPATH": {"python": "env PYTHONPATH={other} {python}"},
    "an option of Python": {"python": "{python} -I"},
    "the working folder": {"setup": ("unset PYTHONSAFEPATH", "PYTHONPATH=.:$PYTHONPATH"), "work_dir": "{other}"},
}


def other_code(machines):
    """A folder with a package of the same name, whose programs leave the file `trained` in the run's folder."""
    leaves = f"open({str(machines.run / 'trained')!r}, 'w')"
    package = machines.folder / "other/mcore_rl"
    (package / "workers").mkdir(parents=True)
    (package / "__init__.py").touch()
    for path in ("workers/rank_process.py", "workers/torchrun.py", "../m.py"):
        (package / path).write_text(leaves)
    return package.parent


@pytest.mark.full
@pytest.mark.parametrize("starter", ["srun", "torchrun", "once"])
@pytest.mark.parametrize("way", WAYS)
def test_a_job_that_would_run_other_code_than_its_copy_ends_with_both_paths(way, starter, machines):
    other, copy = other_code(machines), machines.folder / "copy"
    (copy / "mcore_rl").mkdir(parents=True)  # another folder than the checkout, which may be what is installed
    (copy / "mcore_rl/__init__.py").touch()
    text = json.dumps({"python": "{python}"} | WAYS[way])
    fields = json.loads(text.replace("{other}", str(other)).replace("{python}", sys.executable))
    done = machines.attempt(starter=starter, is_training=starter != "once", code_dir=str(copy), **fields)
    assert done.returncode == STATUS["refused"] and not (machines.run / "trained").exists()
    ((why, then, cause),) = machines.ends
    assert (why, then) == ("refused", "2") and f"not from the copy of the code of this job, {copy}" in cause
    if way != "an option of Python":  # which takes what is installed, if anything is
        assert f"mcore_rl is imported from {other}, " in cause


def test_neither_the_submitting_shell_nor_a_file_of_keys_changes_which_code_a_job_runs(machines, monkeypatch):
    """The file is edited after the launch has checked it."""
    other = other_code(machines)
    (machines.folder / "m.py").write_text(f"open({str(machines.run / 'DONE')!r}, 'w')")
    keys = machines.folder / "keys"
    keys.write_text(f"PYTHONPATH={other}\nPYTHONSAFEPATH=\nMASTER_ADDR=elsewhere\nOMP_NUM_THREADS=3\n")
    for name in ("PYTHONPATH", "PYTHONHOME", "PYTHONUSERBASE"):
        monkeypatch.setenv(name, str(other))
    setup = ('echo "$MASTER_ADDR $OMP_NUM_THREADS" >$MCORE_RL_FAILURES/../said',)
    machines.attempt(code_dir=str(ROOT), python=sys.executable, environment_file=str(keys), setup=setup, hosts="n1")
    assert machines.ends == [("finished", "0", "")] and not (machines.run / "trained").exists()
    assert (machines.run / "logs/7.0/said").read_text() == "n1 3\n"


PMIX = ("srun: error: pmi/pmix: can not load PMIx library", "srun: error: Invalid MPI type 'pmix'")
"""Lines of Slurm 22.05 with SLURM_MPI_TYPE=pmix in the environment and without that library."""


@pytest.mark.full
@pytest.mark.parametrize(("pre_node", "status"), [((), 0), (("true",), STATUS["refused"])])
def test_where_srun_starts_nothing_its_first_line_is_the_cause(machines, pre_node, status):
    """In the checks of the nodes, too, where no node has anything to say."""
    said = "\n".join(f"echo {line!r} >&2".replace("\\'", "") for line in PMIX)
    machines._install("bin/srun", f"#!/bin/bash\n{said}\nexit 1\n")
    assert machines.attempt(pre_node=pre_node).returncode == status
    ((_, then, cause),) = machines.ends
    assert then == ("2" if status else "requeue") and cause.endswith(PMIX[0]) and machines.excluded == ""


def test_every_step_is_started_without_mpi_and_with_the_environment_of_the_script(machines):
    """Whatever SLURM_MPI_TYPE and SLURM_EXPORT_ENV the submitting shell has passed on."""
    srun = machines.folder / "bin/srun"
    srun.write_text(srun.read_text().replace("output=", 'echo "$*" >>"$CLUSTER/steps"; output=', 1))
    machines.program("touch $RUN/DONE")
    done = machines.attempt(**SPARE, pre_node=("true",), post_node=("true",))
    assert done.returncode == 0, done.stdout
    steps = [line for line in (machines.folder / "steps").read_text().splitlines() if line.startswith("-")]
    assert len(steps) == 4 and all(step.startswith("--mpi=none --export=ALL ") for step in steps)


PYTHONLESS = {  # bash ends with 127 or 126, env with 127
    "pyhton": "pyhton: command not found",
    "{code}": "Is a directory",
    "env A=1 pyhton": ": No such file or directory",
}


@pytest.mark.full
@pytest.mark.parametrize(
    ("python", "starter", "has_code", "is_checked"),
    [
        ("pyhton", "srun", False, False),
        ("{code}", "torchrun", True, False),
        ("env A=1 pyhton", "once", True, False),
        ("pyhton", "srun", True, True),
    ],
)
def test_a_python_that_cannot_be_started_ends_the_job_at_once_with_the_line_of_its_shell(
    machines, python, starter, has_code, is_checked
):
    """No other node and no other attempt would go better."""
    code = machines.folder / "copy"
    code.mkdir()
    fields = {"python": python.format(code=code), "code_dir": str(code) * has_code, "node_check": is_checked}
    done = machines.attempt(hosts="n1", starter=starter, is_training=starter != "once", **fields)
    assert done.returncode == STATUS["refused"]
    ((_, then, cause),) = machines.ends
    assert then == "2" and "python.command cannot be started: " in cause, cause
    assert cause.endswith(PYTHONLESS[python])


@pytest.mark.full
def test_a_save_that_takes_longer_than_signal_s_is_the_cause_with_the_field_to_raise(machines):
    machines.program("[ $SLURMD_NODENAME = n1 ] || exit 0\nkill -USR1 $(ps -o ppid= $PPID)\n/bin/sleep 4")
    assert machines.attempt(signal_s=4).returncode == 0
    ((why, then, cause),) = machines.ends
    assert (why, then) == ("limit", "requeue")
    assert re.fullmatch(r"the run did not save within [23] s: set survival.signal_s=4 to more than a step .*", cause)


@pytest.mark.matrix("40-True")
@pytest.mark.parametrize(("since_s", "is_short"), [(40, True), (0, False)])
def test_a_save_that_takes_longer_than_the_grace_time_of_a_preemption_is_the_cause(machines, since_s, is_short):
    """Slurm's own lines, of 22.05: the step is cancelled first, and the job when the grace time is over."""
    at = f"$(date -d '{since_s} seconds ago' +%FT%T)"
    before = f"""echo "slurmstepd-n1: error: *** STEP 7.0 ON n1 CANCELLED AT {at} ***"
echo "x [7.0] on n1
slurmstepd-n1: error: *** JOB 7 ON n1 CANCELLED AT {at} DUE TO PREEMPTION ***" >>$RUN/logs/7.log
echo COMPLETING Reason=None >state"""
    machines.program(TERMED.format(folder=machines.folder, before=before, after=""))
    assert machines.attempt().returncode == STATUS["cancelled"]
    ((why, _, cause),) = machines.ends
    short = r"the run did not save in the grace time of 4\d s: ask for a longer GraceTime, or .* checkpoint.interval"
    assert why == "preempted" and re.fullmatch(short if is_short else "Slurm requeues the job, or cancels it", cause)


def test_a_run_folder_that_was_renamed_is_said_to_be_gone(machines, monkeypatch):
    monkeypatch.setattr(job, "WRITABLE_S", 1)
    machines.program("[ $SLURMD_NODENAME = n1 ] && mv $RUN $RUN.renamed; exit 1")
    done = machines.attempt()
    assert done.returncode == STATUS["no_space"] and not machines.run.exists()
    gone = f"{machines.run} is gone: it was renamed, moved or deleted, or is not mounted. Give it back its name"
    assert f"{gone}: waiting up to 1 s" in done.stdout
