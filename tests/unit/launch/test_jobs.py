import json
import os
import shutil
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from mcore_rl.cli.cli import main
from mcore_rl.cli.show import make_report  # now: another user may not read Python's own files
from mcore_rl.launch.job import STATUS
from mcore_rl.launch.planning import in_use_violations


class Run:
    def __init__(self, path, array=""):
        self.path = path
        submission = {
            "job": "12",
            "program": "pretrain",
            "name": "a",
            "cluster": "c",
            "nodes": 2,
            "ranks_per_node": 8,
            "time": "2026-01-01T00:00:00+00:00",
            "code": "abc",
            "array": array,
        }
        (path / "launch/0").mkdir(parents=True)
        (path / "launch/0/submission.json").write_text(json.dumps(submission))

    def attempt(self, event, number=0, element="", **fields):
        entry = {"event": event, "time": time.time(), "job": "12", "attempt": number, "nodes": "n[1-2]", "step": 0}
        folder = self.path / element
        folder.mkdir(exist_ok=True)
        with (folder / "attempts.jsonl").open("a") as file:
            file.write(json.dumps(entry | fields) + "\n")

    def metrics(self, *records):
        with (self.path / "metrics.jsonl").open("a") as file:
            for record in records:
                file.write(json.dumps({"time": time.time()} | record) + "\n")

    def checkpoint(self, step, complete=True):
        folder = self.path / f"checkpoints/iter_{step:07d}"
        folder.mkdir(parents=True)
        if complete:
            (folder / "checkpoint.json").write_text("{}")


@pytest.fixture
def run(home):
    return Run(home / "runs/a")


def listed(capsys, *words):
    """By run: the cells of its line, by column."""
    assert main(["jobs", *map(str, words)]) == 0
    lines = capsys.readouterr().out.splitlines()
    starts = [lines[0].index(name) for name in lines[0].split()]
    names = lines[0].split()
    cells = [
        {name: line[start:stop].strip() for name, start, stop in zip(names, starts, [*starts[1:], None], strict=True)}
        for line in lines[1:]
    ]
    return {row["run"].rpartition("/")[2]: row for row in cells}


def test_a_running_job_is_listed_with_step_speed_checkpoint_and_how_the_attempt_before_ended(run, slurm, capsys):
    slurm.says("squeue", "12|N/A|RUNNING|None|n[1-2]\n")
    run.attempt("start")
    run.attempt("end", why="hang", then="requeue", step=10, status=1)
    run.attempt("start", 1, step=10)
    run.metrics({"step": 12, "train/tokens_per_s_per_rank": 4321.5}, {"step": 13, "event": "saved"})
    run.checkpoint(10)
    run.checkpoint(13, complete=False)
    row = listed(capsys)["a"]
    assert (row["job"], row["state"], row["attempts"], row["nodes"]) == ("12", "RUNNING", "2", "n[1-2]")
    assert (row["step"], row["tokens/s/rank"], row["checkpoint"]) == ("13", "4,322", "10")
    assert row["why"] == "before: hang at step 10" and row["age"].endswith(" s")


def test_a_waiting_job_is_listed_with_its_reason(run, slurm, capsys):
    slurm.says("squeue", "12|N/A|PENDING|Resources|\n")
    row = listed(capsys, "runs/a")["a"]
    assert (row["state"], row["why"], row["step"], row["age"]) == ("PENDING", "Resources", "-", "-")


@pytest.mark.parametrize(
    ("reason", "by"),
    [("JobHeldUser", ""), ("JobHeldAdmin", " by an administrator"), ("job requeued in held state", "")],
)
def test_a_held_job_is_listed_with_the_command_that_releases_it(run, slurm, capsys, reason, by):
    """Reasons of Slurm 22.05, for `scontrol hold` and `scontrol requeuehold`."""
    slurm.says("squeue", f"12|N/A|PENDING|{reason}|\n")
    why = f"{reason}: held until `scontrol release 12`{by}"
    assert listed(capsys, "runs/a")["a"]["why"] == why
    assert list(in_use_violations(run.path)) == [
        f'run_dir="{run.path}" is in use by job 12, which is PENDING ({why}). Wait for it, end it (scancel 12), or '
        "choose another run_dir."
    ]


@pytest.mark.parametrize(
    ("sacct", "state", "why"),
    [
        ("12|FAILED|11:0|n1\n", "FAILED", "status 11"),
        ("12|CANCELLED by 1000|0:15|n1\n", "CANCELLED", "signal 15 by its user"),
        (
            "12|FAILED|0:53|n1\n",
            "FAILED",
            "signal 53: Slurm could not open the job's log, whose folder was gone or could not be written",
        ),
        ("12|NODE_FAIL|0:0|n1\n12|TIMEOUT|0:0|n2\n", "TIMEOUT", ""),
        ("12+0|FAILED|3:0|n1\n12+1|COMPLETED|0:0|n2\n", "FAILED", "status 3"),
    ],
)
def test_of_an_ended_job_accounting_is_asked(run, slurm, capsys, sacct, state, why):
    slurm.says("sacct", sacct)
    row = listed(capsys)["a"]
    assert (row["state"], row.get("why", "")) == (state, why)


def test_without_accounting_the_controller_is_asked(run, slurm, capsys):
    slurm.fails("sacct", "Slurm accounting storage is disabled")
    slurm.says("scontrol", "JobId=12 JobName=a JobState=FAILED Restarts=1 ExitCode=11:0 NodeList=n[1-2]\n")
    row = listed(capsys)["a"]
    assert (row["state"], row["why"], row["nodes"]) == ("FAILED", "status 11", "n[1-2]")


def test_the_reason_of_the_end_is_the_meaning_of_its_exit_status(run, slurm, capsys):
    run.attempt("start")
    run.attempt("end", why="crash", then=str(STATUS["crash_loop"]), status=1)
    assert listed(capsys)["a"]["why"].startswith("crash: gave up: no attempt saved a new checkpoint")


def test_the_first_cause_of_a_failure_is_in_the_line_of_its_run(run, slurm, capsys):
    cause = 'rank 1 on n2: ValueError: "boom"'
    run.attempt("start")
    run.attempt("end", why="crash", then="requeue", status=1, step=5, cause=cause)
    assert listed(capsys)["a"]["why"] == f"crash: {cause}; requeued"
    slurm.says("squeue", "12|N/A|RUNNING||n1\n")
    run.attempt("start", 1)
    assert listed(capsys)["a"]["why"] == f"before: crash: {cause}, at step 5"


def test_json_has_an_object_for_each_run_with_numbers_as_numbers(run, slurm, capsys):
    slurm.says("squeue", "12|N/A|RUNNING|None|n[1-2]\n")
    run.attempt("start")
    run.metrics({"step": 12, "train/tokens_per_s_per_rank": 4321.5})
    assert main(["jobs", "--json"]) == 0
    (listed,) = json.loads(capsys.readouterr().out)
    found = [listed[key] for key in ("job", "state", "attempts", "step", "tokens_per_s_per_rank", "checkpoint")]
    assert found == ["12", "RUNNING", 1, 12, 4321.5, None]


def test_an_attempt_that_ended_without_a_record_is_reported(run, slurm, capsys):
    run.attempt("start")
    assert "its last attempt ended without a record: see" in listed(capsys)["a"]["why"]
    slurm.says("sacct", "12|FAILED|18:0|n1\n")
    why = listed(capsys)["a"]["why"]
    assert "without a record (gave up: no attempt saved a new checkpoint, and the last found the disk" in why


def test_the_end_of_an_orphan_is_not_that_of_the_attempt_that_runs(run, slurm, capsys):
    slurm.says("squeue", "12|N/A|RUNNING||n3\n")
    run.attempt("start")
    run.attempt("start", 1)
    run.attempt("end", why="crash", then="orphan", step=10)
    row = listed(capsys)["a"]
    assert (row["attempts"], row.get("why", "")) == ("2", "")


def test_an_attempt_that_slurm_ended_is_listed_as_such(run, slurm, capsys):
    slurm.says("sacct", "12|CANCELLED by 7|0:15|n1\n")
    run.attempt("start")
    run.attempt("end", why="crash", then="orphan")
    assert listed(capsys)["a"]["why"].startswith("signal 15 by its user; crash: cancelled, or ended by Slurm")


def test_attempts_of_earlier_jobs_of_the_run_are_not_counted(run, slurm, capsys):
    run.attempt("start", job="11")
    run.attempt("end", job="11", why="crash", then="11")
    run.attempt("start")
    assert listed(capsys)["a"]["attempts"] == "1"


def test_the_elements_of_an_array_have_a_line_each(home, slurm, capsys):
    run = Run(home / "runs/seeds", array="0-1")
    run.attempt("start", element="0", job="13")
    run.attempt("start", element="1", job="12")
    slurm.says("squeue", "12|0|RUNNING||n1\n12|1|PENDING|Priority|\n")
    rows = listed(capsys)
    assert [(rows[name]["job"], rows[name]["state"]) for name in "01"] == [("12_0", "RUNNING"), ("12_1", "PENDING")]


@pytest.mark.parametrize("is_installed", [True, False])
def test_where_slurm_does_not_answer_the_folders_are_read_and_it_is_asked_once(
    run, slurm, capsys, monkeypatch, is_installed
):
    if is_installed:
        monkeypatch.setattr("mcore_rl.launch.jobs.SLURM_S", 0.2)
        slurm.hangs("squeue")
    else:
        slurm.lacks("squeue", "sacct", "scontrol")
    Run(run.path.with_name("b"))
    for event, fields, state, why in (
        ("start", {}, "started", ""),
        ("end", {"why": "hang", "then": "requeue", "step": 3}, "requeued", "hang: requeued"),
        ("start", {"number": 1}, "started", "before: hang at step 3"),
        (
            "end",
            {"number": 1, "why": "crash", "then": "restart"},
            "started",
            "crash: started again within its allocation",
        ),
        ("end", {"number": 2, "why": "stop", "then": "10"}, "ended", "stop: stopped by the STOP file"),
    ):
        run.attempt(event, **fields)
        assert main(["jobs"]) == 0
        shown = capsys.readouterr()
        assert "States come from the runs' folders alone." in shown.err
        header, line, other = shown.out.splitlines()
        assert line.split()[2] == state and line[header.index("why") :].startswith(why)
        assert other.split()[2] == "submitted"
    assert slurm.asked("sacct") == slurm.asked("scontrol") == ""


def test_a_job_that_never_ran_is_listed_with_the_stage_that_failed(home, slurm, capsys):
    before = ""
    for number, name in enumerate(("pretrain", "sft", "rl")):
        run = Run(home / "runs" / name)
        path = run.path / "launch/0/submission.json"
        fields = {"job": str(11 + number), "name": f"whole-{name}", "after": before}
        fields |= {"dependency": f"afterok:{10 + number}" if before else ""}
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))
        before = str(run.path)
        if name == "pretrain":
            run.attempt("start", job="11")
            slurm.says("squeue", "11|N/A|RUNNING||n1\n12|N/A|PENDING|Dependency|\n13|N/A|PENDING|Dependency|\n")
            first = run
    rows = listed(capsys)
    assert rows["sft"]["why"] == f"waits for whole-pretrain (job 11, {home}/runs/pretrain)"
    assert rows["rl"]["why"] == f"waits for whole-sft (job 12, {home}/runs/sft)"
    first.attempt("end", job="11", why="crash", then="11", cause="rank 3 on n2 was killed by SIGKILL")
    slurm.says("squeue", "")
    slurm.says("sacct", "11|FAILED|11:0|n1\n12|CANCELLED|0:0|\n13|CANCELLED|0:0|\n")
    rows = listed(capsys)
    failed = f"not started: whole-pretrain (job 11, {home}/runs/pretrain) FAILED, status 11; crash: rank 3"
    assert all(rows[name]["why"].startswith(failed) for name in ("sft", "rl"))
    assert rows["rl"]["why"].endswith("launch the pipeline again: finished stages are skipped")
    assert rows["pretrain"]["why"].startswith("status 11; crash: rank 3 on n2 was killed by SIGKILL; gave up")


def test_torn_and_long_lines_of_metrics_are_skipped(run, slurm, capsys):
    run.metrics({"step": 1, "train/tokens_per_s_per_rank": 5.0}, {"step": 2, "moe/expert_load": [[1] * 1000] * 500})
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "train')
    assert listed(capsys)["a"]["step"] == "-"  # the last megabyte holds no whole line
    run.metrics({}, {"step": 4, "train/tokens_per_s_per_rank": 6.0})
    assert (row := listed(capsys)["a"])["step"] == "4" and row["tokens/s/rank"] == "6"


@pytest.mark.parametrize("text", ["torn{", "[]", '{"job": 1}'])
def test_a_run_whose_submission_cannot_be_read_is_named(home, run, slurm, capsys, text):
    other = home / "runs/b/launch/0"
    other.mkdir(parents=True)
    (other / "submission.json").write_text(text)
    slurm.says("squeue", "12|N/A|RUNNING|None|n[1-2]\n")
    assert main(["jobs"]) == 0
    out, err = capsys.readouterr()
    assert "runs/a" in out and "runs/b" not in out
    assert "runs/b is left out: no submission.json below its launch/ can be read" in err


def test_a_folder_without_runs_is_an_error(home, slurm, capsys):
    assert main(["jobs", "runs"]) == 2
    assert "runs: no run in it was launched" in capsys.readouterr().err


def test_a_damaged_checkpoint_that_the_last_start_passed_over_is_listed(run, slurm, capsys):
    slurm.says("squeue", "12|N/A|RUNNING|None|n[1-2]\n")
    run.attempt("start")
    (run.path / "run.json").write_text(json.dumps([{"step": 0}, {"step": 5, "warnings": ["iter_7 is damaged"]}]))
    assert listed(capsys, run.path)["a"]["why"] == "warning: iter_7 is damaged"
    (run.path / "DONE").write_text("all 9 steps are done\n")
    assert listed(capsys, run.path)["a"]["why"] == "all 9 steps are done; warning: iter_7 is damaged"
    (run.path / "run.json").write_text("[")
    assert listed(capsys, run.path)["a"]["why"] == "all 9 steps are done"


def test_the_health_of_a_runs_servers_is_in_its_line(run, slurm, capsys):
    run.attempt("start")
    servers = [{"url": "http://n3:20000", "is_serving": True}, {"url": "http://n4:20000", "is_serving": False}]
    (run.path / "servers").mkdir()
    (run.path / "servers/status.json").write_text(json.dumps({"version": 3, "servers": servers}))
    assert "servers 1/2, without http://n4:20000" in listed(capsys)["a"]["why"]


def test_the_newest_warnings_of_the_log_are_listed_once_each_by_their_first_lines(run, slurm, capsys):
    slurm.says("squeue", "12|N/A|RUNNING|None|n[1-2]\n")
    run.attempt("start")
    (run.path / "run.json").write_text(json.dumps([{"step": 5, "warnings": ["iter_7 is damaged"]}]))
    run.metrics(
        {"step": 1, "event": "warning: old"},
        {"step": 2, "event": "warning: one"},
        {"step": 5, "event": "warning: iter_7 is damaged"},
        {"step": 6, "event": "a warning: none"},
        {"step": 7, "event": "warning: two\n  of p-1"},
        {"step": 8, "event": "warning: one"},
        {"step": 9, "event": "warning: three", "path": "x"},
    )
    assert listed(capsys, run.path)["a"]["why"] == (
        "warning: iter_7 is damaged; warning: three (step 9); warning: one (step 8); warning: two (step 7)"
    )


def test_a_warning_that_quotes_a_completion_reaches_the_terminal_with_its_control_characters_escaped(
    run, slurm, capsys
):
    slurm.says("squeue", "12|N/A|RUNNING|None|n[1-2]\n")
    run.attempt("start")
    run.metrics({"step": 2, "event": "warning: it wrote \x1b[2J\x1b]0;title\x07"})
    assert main(["jobs", str(run.path)]) == 0
    shown = capsys.readouterr().out
    assert "warning: it wrote \\x1b[2J\\x1b]0;title\\x07 (step 2)" in shown and "\x1b" not in shown


@contextmanager
def another_user():
    """Root reads everything; another user does not read what has no permissions."""
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)


@pytest.fixture
def theirs():
    """A run in a folder that everybody may enter, with nothing in it that is not readable."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield Run(folder / "runs/a")
    shutil.rmtree(folder)


@pytest.mark.full
@pytest.mark.parametrize("unreadable", ["attempts.jsonl", "metrics.jsonl", "DONE", "launch", ""])
def test_a_run_of_another_user_is_named_with_what_cannot_be_read_and_whose_it_is(
    theirs, home, slurm, capsys, unreadable
):
    theirs.attempt("start")
    (theirs.path / "metrics.jsonl").touch()
    (theirs.path / "DONE").touch()
    path = theirs.path / unreadable
    path.chmod(0)
    with another_user():
        status = main(["jobs", str(theirs.path)])
    path.chmod(0o755)
    err = capsys.readouterr().err
    assert f"{path} of the run {theirs.path} cannot be read: Permission denied. {path} belongs to {path.owner()}" in err
    assert status == (2 if unreadable in ("launch", "") else 0)


@pytest.mark.full
@pytest.mark.parametrize("unreadable", ["config.toml", "metrics.jsonl", "logs/7.0/failure.json", ""])
def test_a_report_on_a_run_of_another_user_names_the_run_and_not_the_page(theirs, home, slurm, capsys, unreadable):
    (theirs.path / "logs/7.0").mkdir(parents=True)
    for name in ("metrics.jsonl", "logs/7.0/failure.json"):
        (theirs.path / name).touch()
    config = Path(__file__).parents[3] / "launch/recipes/tiny_moe/pretrain.toml"
    (theirs.path / "config.toml").write_text(config.read_text())
    path = theirs.path / unreadable
    path.chmod(0)
    os.chdir(theirs.path.parent)
    with another_user():
        assert main(["report", str(theirs.path)]) == 2, make_report
    path.chmod(0o755)
    err = capsys.readouterr().err
    assert f" of the run {theirs.path} cannot be read: Permission denied. {path} belongs to {path.owner()}" in err
    assert "--output" not in err
