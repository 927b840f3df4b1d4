import io
import json
import os
import platform
import pty
import resource
import shutil
import signal
import subprocess
import sys
import termios
import textwrap
import time
from pathlib import Path

import pytest

from mcore_rl.workers import launcher
from mcore_rl.workers.launcher import bytes_of, launch_local, under_launcher, world_size_of_launcher
from tests.forked import is_gone, wait_for

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS")
ENDED_WITHIN_S = 120.0
"""Far above what an end takes on a busy machine, and far below what programs here sleep otherwise."""


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Makes a module of the given text, which sees its rank as `rank` and a folder for notes as `notes`."""
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parents[3]}")
    head = (
        "import json, os, pathlib, signal, subprocess, sys, time\n"
        "rank = int(os.environ['RANK'])\n"
        f"notes = pathlib.Path({str(tmp_path)!r})\n"
    )

    def write(text):
        (tmp_path / "a_program.py").write_text(head + textwrap.dedent(text))
        return "a_program"

    return write


def start_launcher(
    tmp_path, num_ranks, imports=(), devices=(), most_bytes=resource.RLIM_INFINITY, console=subprocess.PIPE, logs="logs"
):
    """`launch_local` in a process of its own, to which signals can be sent; with `imports` it forks the ranks.
    `devices` are the files of accelerators of this torch, `most_bytes` what a file may have, as on a disk that is full.
    """
    settings = f"forked_rank.DEVICES = {{'__version__': {list(devices)}}}; "
    words = f"'a_program', ['x', 'a=b'], {num_ranks}, pathlib.Path({str(tmp_path / logs)!r}), {list(imports)}"
    code = (
        f"import pathlib, resource, sys; from mcore_rl.workers import forked_rank, launcher; {settings}"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({most_bytes}, {resource.RLIM_INFINITY})); "
        f"sys.exit(launcher.launch_local({words}))"
    )
    # Before 3.12.8 Python takes a module that it had no room to write for a whole one when it is imported again.
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.Popen([sys.executable, "-c", code], stdout=console, stderr=console, env=environment)


def pids(tmp_path, num_ranks):
    files = [tmp_path / f"pid_{rank}" for rank in range(num_ranks)]
    wait_for(lambda: all(file.exists() and file.read_text().endswith(".") for file in files))
    return [int(file.read_text().removesuffix(".")) for file in files]


def test_what_is_refused_before_the_ranks_starts_none(program, tmp_path):
    program("(notes / 'started').touch()")
    code = (
        "import pathlib; from mcore_rl.workers.launcher import launch_local\n"
        "def refuse(): raise ValueError('no prompt')\n"
        f"launch_local('a_program', [], 1, pathlib.Path({str(tmp_path / 'logs')!r}), ['json'], refuse)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=ENDED_WITHIN_S)
    assert ended.returncode == 1 and ended.stderr.splitlines()[-1] == "ValueError: no prompt"
    assert not (tmp_path / "started").exists()


@pytest.mark.full
def test_every_rank_knows_its_place(program, tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    module = program("(notes / f'env_{rank}').write_text(json.dumps([sys.argv[1:], dict(os.environ)]))")
    assert launch_local(module, ["x.toml", "a=b"], 3, tmp_path / "logs") == 0
    seen = [json.loads((tmp_path / f"env_{rank}").read_text()) for rank in range(3)]
    assert [words for words, _ in seen] == [["x.toml", "a=b"]] * 3
    for rank, (_, env) in enumerate(seen):
        assert (env["RANK"], env["LOCAL_RANK"]) == (str(rank), str(rank))
        assert (env["WORLD_SIZE"], env["LOCAL_WORLD_SIZE"]) == ("3", "3")
        assert (env["MASTER_ADDR"], env["OMP_NUM_THREADS"]) == ("127.0.0.1", "1")
    assert len({env["MASTER_PORT"] for _, env in seen}) == 1


def run_launcher(tmp_path, imports):
    """Return status, output and errors of two ranks of the program, and what each has written about itself."""
    process = start_launcher(tmp_path, 2, imports)
    output, errors = process.communicate(timeout=300)
    written = [(tmp_path / f"rank_{rank}").read_text() for rank in range(2)]
    for rank in range(2):
        (tmp_path / f"rank_{rank}").unlink()
    return process.returncode, output, errors, [json.loads(text) for text in written]


@pytest.mark.full
def test_a_forked_rank_is_as_one_of_a_fresh_python(program, tmp_path):
    """Arguments, environment, session, standard streams, signals, `__main__`, clean-up at exit and status are equal."""
    (tmp_path / "a_helper.py").write_text("import os, pathlib\npid = os.getpid()\n")
    program("""
        import atexit
        import a_helper
        sys.stdout.write(f"out of {rank}\\n")
        seen = {
            "words": sys.argv[1:],
            "command": sys.orig_argv,
            "environment": {k: v for k, v in os.environ.items() if k not in ("MASTER_PORT", "LC_CTYPE")},
            "leads its session": os.getsid(0) == os.getpid(),
            "input": sys.stdin.read(),
            "signals": [str(signal.getsignal(n)) for n in (*range(1, 4), *range(10, 16))],
            "blocked": len(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
            "main": [__name__, sys.modules["__main__"].__spec__.name, sys.modules["__main__"].rank],
            "files": sorted(os.readlink(f"/proc/self/fd/{n}").partition(":")[0] for n in (0, 1, 2)),
        }
        (notes / f"forked_{rank}").write_text(str(a_helper.pid != os.getpid()))
        atexit.register(lambda: (notes / f"rank_{rank}").write_text(json.dumps(seen)))
        if rank == 1:
            while not (notes / "rank_0").exists():
                time.sleep(0.01)
            sys.exit("the end of rank 1")
    """)
    fresh = run_launcher(tmp_path, [])
    assert [(tmp_path / f"forked_{rank}").read_text() for rank in range(2)] == ["False", "False"]
    forked = run_launcher(tmp_path, ["a_helper"])
    assert [(tmp_path / f"forked_{rank}").read_text() for rank in range(2)] == ["True", "True"]
    assert forked == fresh
    assert (forked[0], forked[1]) == (1, b"out of 0\n") and b"the end of rank 1" in forked[2]


@pytest.mark.matrix("a thread runs")
@pytest.mark.parametrize("reason", ["an import fails", "a thread runs", "an accelerator"])
def test_where_a_fork_is_unsound_ranks_are_fresh(program, tmp_path, reason):
    body = {
        "an import fails": "raise ImportError('boom')",
        "a thread runs": "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()",
        "an accelerator": "",
    }
    (tmp_path / "a_helper.py").write_text(f"{body[reason]}\n")
    program("(notes / f'parent_{rank}').write_text(str('mcore_rl.workers.launcher' in sys.modules))")
    process = start_launcher(tmp_path, 2, ["a_helper"], ["/dev/null"] if reason == "an accelerator" else [])
    assert process.wait(timeout=300) == 0
    assert [(tmp_path / f"parent_{rank}").read_text() for rank in range(2)] == ["False", "False"]


@pytest.mark.full
@pytest.mark.parametrize(("imports", "is_copy"), [("a_helper", False), ("json", True)])
def test_a_single_rank_is_a_copy_where_the_launcher_has_imported_its_program(program, tmp_path, imports, is_copy):
    (tmp_path / "a_helper.py").touch()
    program("(notes / 'parent').write_text(str('mcore_rl.workers.launcher' in sys.modules))")
    assert start_launcher(tmp_path, 1, [imports]).wait(timeout=300) == 0
    assert (tmp_path / "parent").read_text() == str(is_copy)


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_the_imports_ends_the_launcher_at_once(program, tmp_path, number):
    (tmp_path / "a_helper.py").write_text(
        # Short sleeps: a signal just before a long one would wait for its end.
        f"import pathlib, time\npathlib.Path({str(tmp_path / 'importing')!r}).touch()\n"
        "while True:\n    time.sleep(0.05)\n"
    )
    program("(notes / 'started').touch()")
    process = start_launcher(tmp_path, 2, ["a_helper"])
    wait_for(lambda: (tmp_path / "importing").exists())
    process.send_signal(number)
    _, errors = process.communicate(timeout=ENDED_WITHIN_S)
    assert process.returncode == 128 + number and not (tmp_path / "started").exists()
    name = "Ctrl-C" if number == signal.SIGINT else "SIGTERM"
    said = f"{name} while starting: ended at once, nothing was trained that could be lost.\n"
    assert errors.decode() == said


@pytest.mark.full
def test_threads_are_left_alone_when_set_or_when_there_is_one_rank(program, tmp_path, monkeypatch):
    module = program("(notes / 'threads').write_text(os.environ.get('OMP_NUM_THREADS', 'unset'))")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    launch_local(module, [], 2, tmp_path / "logs")
    assert (tmp_path / "threads").read_text() == "7"
    monkeypatch.delenv("OMP_NUM_THREADS")
    launch_local(module, [], 1, tmp_path / "logs")
    assert (tmp_path / "threads").read_text() == "unset"


def test_rank_0_speaks_on_the_console_and_every_rank_in_its_log(program, tmp_path, capfd):
    # One write each: print, unbuffered, writes in pieces, and those of the two streams may alternate in the log.
    module = program("sys.stdout.write(f'out of {rank}\\n'); sys.stderr.write(f'err of {rank}\\n')")
    assert launch_local(module, [], 2, tmp_path / "logs") == 0
    console = capfd.readouterr()
    assert (console.out, console.err) == ("out of 0\n", "err of 0\n")
    for rank in range(2):
        log = (tmp_path / "logs" / f"rank_{rank}.log").read_text()
        assert sorted(log.splitlines()) == [f"err of {rank}", f"out of {rank}"]


def test_a_full_disk_under_the_log_of_rank_0_stops_neither_the_rank_nor_the_console(program, tmp_path):
    program("""
        for line in range(100):
            sys.stdout.write(f"{line:099}\\n")
        (notes / "done").touch()
    """)  # in one piece or two: of one the limit cuts off a part
    process = start_launcher(tmp_path, 1, most_bytes=5000)
    output, errors = process.communicate(timeout=ENDED_WITHIN_S)
    assert process.returncode == 0 and (tmp_path / "done").exists()
    assert output.decode() == "".join(f"{line:099}\n" for line in range(100))
    log = tmp_path / "logs/rank_0.log"
    assert errors.decode() == f"{log}: File too large. Lines are missing there until it can be written.\n"
    assert log.stat().st_size == 5000


@pytest.mark.full
def test_a_failure_ends_the_launcher_also_where_the_disk_has_no_room_for_its_cause(program, tmp_path):
    program("raise ValueError('boom' * 1000) if rank == 1 else time.sleep(600)")
    process = start_launcher(tmp_path, 2, most_bytes=2000)
    _, errors = process.communicate(timeout=ENDED_WITHIN_S)
    assert process.returncode == 1
    assert errors.decode().splitlines()[-1].startswith(f"First cause: rank 1 on {platform.node()}: ")
    assert not list((tmp_path / "logs/failures").glob("*.json"))


@pytest.mark.full
def test_of_ranks_without_a_written_cause_the_one_with_a_message_is_named(program, tmp_path):
    program("""
        if rank == 1:
            while not (notes / "begun").exists():
                time.sleep(0.01)
            sys.exit(1)  # it gives way
        (notes / "begun").touch()
        time.sleep(0.3)
        sys.stderr.write("TrainingError: full\\n")
        sys.exit(2)
    """)
    process = start_launcher(tmp_path, 2, most_bytes=100)
    _, errors = process.communicate(timeout=ENDED_WITHIN_S)
    headline = f"First cause: rank 0 on {platform.node()}, by the error above (exit status 2)"
    assert process.returncode == 2 and errors.decode().splitlines()[-1].startswith(headline)
    assert "TrainingError: full" in errors.decode()


def test_a_disk_without_room_for_a_start_is_refused_in_a_sentence_and_the_reserve_takes_none(program, tmp_path):
    program("")
    process = start_launcher(tmp_path, 1, most_bytes=10)
    _, errors = process.communicate(timeout=ENDED_WITHIN_S)
    assert f"TrainingError: {tmp_path}/logs: File too large. " in errors.decode()
    assert "Make room, and run the same command again" in errors.decode()
    assert not (tmp_path / "logs/reserve").exists()


@pytest.mark.matrix("0")
@pytest.mark.parametrize("failing", [0, 1])
def test_the_first_failure_is_shown_and_ends_the_others(program, tmp_path, capfd, failing):
    module = program(f"""
        if rank == {failing}:
            raise ValueError(f"boom of {{rank}}")
        time.sleep(600)
    """)
    start = time.monotonic()
    assert launch_local(module, [], 3, tmp_path / "logs") == 1
    assert time.monotonic() - start < ENDED_WITHIN_S
    errors = capfd.readouterr().err
    assert errors.startswith("Traceback")
    headline = f"First cause: rank {failing} on {platform.node()}: ValueError: boom of {failing} (exit status 1)"
    assert errors.splitlines()[-1] == f"{headline}; its output: {tmp_path}/logs/rank_{failing}.log"


def test_a_killed_rank_is_named_with_its_signal(program, tmp_path, capfd):
    module = program("os.kill(os.getpid(), signal.SIGKILL) if rank == 1 else time.sleep(600)")
    assert launch_local(module, [], 2, tmp_path / "logs") == 128 + signal.SIGKILL
    headline = f"rank 1 on {platform.node()} was killed by SIGKILL"
    assert f"First cause: {headline} (exit status 137)" in capfd.readouterr().err
    assert json.loads((tmp_path / "logs/failure.json").read_text())["headline"] == headline


def test_a_rank_that_does_not_heed_sigterm_and_the_children_of_a_failed_one_are_killed(program, tmp_path, monkeypatch):
    monkeypatch.setattr(launcher, "GRACE_S", 0.3)
    monkeypatch.setattr(launcher._join_tees, "__defaults__", (0.3,))  # its children keep the rank's output open
    module = program("""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen(["sleep", "600"])
        (notes / f"pid_{rank}").write_text(f"{child.pid}.")
        while not all((notes / f"pid_{other}").exists() for other in range(2)):
            time.sleep(0.01)
        if rank == 0:
            sys.exit(3)
        time.sleep(600)
    """)
    assert launch_local(module, [], 2, tmp_path / "logs") == 3
    wait_for(lambda: all(is_gone(pid) for pid in pids(tmp_path, 2)))


STOPPABLE = """
    from mcore_rl.workers.launcher import STOPPING, TRAINING, note_stage
    asked = []
    signal.signal({number}, lambda *_: asked.append(1))
    note_stage(TRAINING)
    (notes / f"pid_{{rank}}").write_text(f"{{os.getpid()}}.")
    while not asked:
        time.sleep(0.01)
    note_stage({stage})
    time.sleep(0.2)
    (notes / f"saved_{{rank}}").touch()
"""


@pytest.mark.matrix("15-STOPPING-0")
@pytest.mark.parametrize(
    ("number", "stage", "status"),
    [
        (signal.SIGTERM, "STOPPING", 0),
        (signal.SIGUSR1, "STOPPING", 0),
        (signal.SIGHUP, "STOPPING", 0),
        (signal.SIGINT, "STOPPING", 130),
        (signal.SIGINT, "TRAINING", 0),  # it came after the last step
    ],
)
def test_a_stop_signal_reaches_every_rank_that_trains_and_it_may_save(program, tmp_path, number, stage, status):
    program(STOPPABLE.format(number=int(number), stage=stage))
    process = start_launcher(tmp_path, 2, ["json"] if number == signal.SIGTERM else [])
    pids(tmp_path, 2)
    process.send_signal(number)
    _, errors = process.communicate(timeout=ENDED_WITHIN_S)
    assert process.returncode == status, errors.decode()
    assert (tmp_path / "saved_0").exists() and (tmp_path / "saved_1").exists()
    expected = ["Ctrl-C: the step is finished and saved; press it again to end at once, without saving."]
    expected += ["Stopped by Ctrl-C, and saved. The same command goes on from there."] if status else []
    assert errors.decode().splitlines() == (expected if number == signal.SIGINT else [])


@pytest.mark.matrix("1-0")
@pytest.mark.parametrize(("number", "status"), [(signal.SIGHUP, 0), (signal.SIGINT, 130)])
def test_a_run_in_a_terminal_that_is_closed_stops_and_saves(program, tmp_path, number, status):
    program(STOPPABLE.format(number=int(number), stage="STOPPING") + "    print('saved')\n")
    terminal, theirs = pty.openpty()
    process = start_launcher(tmp_path, 2, console=theirs)
    os.close(theirs)
    pids(tmp_path, 2)
    os.close(terminal)
    process.send_signal(number)
    assert process.wait(timeout=ENDED_WITHIN_S) == status
    assert (tmp_path / "saved_0").exists() and (tmp_path / "saved_1").exists()
    assert (tmp_path / "logs/rank_0.log").read_text() == "saved\n"


@pytest.mark.matrix("forked")
@pytest.mark.parametrize("imports", [[], ["json"]], ids=["fresh", "forked"])
def test_under_nohup_the_end_of_the_terminal_stops_nothing(program, tmp_path, imports):
    program(
        STOPPABLE.format(number=int(signal.SIGTERM), stage="STOPPING")
        + "    (notes / f'hangup_{rank}').write_text(str(signal.getsignal(signal.SIGHUP) == signal.SIG_IGN))\n"
    )
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does before it starts a program
    process = start_launcher(tmp_path, 2, imports)
    signal.signal(signal.SIGHUP, before)
    ranks = pids(tmp_path, 2)
    process.send_signal(signal.SIGHUP)
    assert process.poll() is None and not any(map(is_gone, ranks))
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=ENDED_WITHIN_S) == 0
    assert [(tmp_path / f"hangup_{rank}").read_text() for rank in range(2)] == ["True", "True"]


@pytest.mark.full
def test_logs_that_are_deleted_begin_anew_and_a_run_that_trains_may_still_save(program, tmp_path):
    program(STOPPABLE.format(number=int(signal.SIGINT), stage="STOPPING") + "    print('saved')\n")
    process = start_launcher(tmp_path, 2)
    pids(tmp_path, 2)
    time.sleep(1.0)  # the launcher looks at the ranks every 0.05 s
    shutil.rmtree(tmp_path / "logs")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=ENDED_WITHIN_S)
    assert process.returncode == 130 and (tmp_path / "saved_0").exists() and (tmp_path / "saved_1").exists()
    log = tmp_path / "logs/rank_0.log"
    assert log.read_text() == "saved\n"
    assert f"warning: {log} was deleted or moved: a new one begins here." in errors.decode().splitlines()


@pytest.mark.full
def test_logs_of_a_run_that_is_renamed_go_on_in_it_and_no_folder_of_the_old_name_is_made(program, tmp_path):
    program(STOPPABLE.format(number=int(signal.SIGINT), stage="STOPPING") + "    print('saved')\n")
    process = start_launcher(tmp_path, 2, logs="run/logs/0")
    pids(tmp_path, 2)
    time.sleep(1.0)
    (tmp_path / "run").rename(tmp_path / "renamed")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=ENDED_WITHIN_S)
    assert not (tmp_path / "run").exists() and (tmp_path / "saved_0").exists()
    assert (tmp_path / "renamed/logs/0/rank_0.log").read_text() == "saved\n"


@pytest.mark.full
def test_a_rank_that_fails_after_its_log_was_deleted_is_named(program, tmp_path):
    program("""
        (notes / f"pid_{rank}").write_text(f"{os.getpid()}.")
        while (notes / "logs").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    process = start_launcher(tmp_path, 1)
    pids(tmp_path, 1)
    shutil.rmtree(tmp_path / "logs")
    _, errors = process.communicate(timeout=ENDED_WITHIN_S)
    assert process.returncode == 137 and b"Traceback" not in errors
    assert f"First cause: rank 0 on {platform.node()} was killed by SIGKILL" in errors.decode()


def test_a_second_interrupt_does_not_wait_for_the_ranks(program, tmp_path):
    program("""
        from mcore_rl.workers.launcher import TRAINING, note_stage
        signal.signal(signal.SIGINT, lambda *_: (notes / f"heard_{rank}").touch())
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        note_stage(TRAINING)
        (notes / f"pid_{rank}").write_text(f"{os.getpid()}.")
        while not (notes / f"heard_{rank}").exists():
            time.sleep(0.01)
        while True:
            os.write(2, b"step\\n")
    """)
    process = start_launcher(tmp_path, 1)
    ranks = pids(tmp_path, 1)
    process.send_signal(signal.SIGINT)
    wait_for(lambda: (tmp_path / "heard_0").exists())
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=ENDED_WITHIN_S)
    assert process.returncode == 130 and is_gone(ranks[0])
    said = "Ended at once. The same command goes on from the last complete checkpoint."
    lines = errors.decode().splitlines()
    assert lines[-1] == said and set(lines[1:-1]) <= {"step"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_while_starting_a_signal_ends_the_ranks_at_once_without_traceback(program, tmp_path, number):
    program("""
        (notes / f"pid_{rank}").write_text(f"{os.getpid()}.")
        time.sleep(600)
    """)
    process = start_launcher(tmp_path, 2, ["json"] if number == signal.SIGINT else [])
    ranks = pids(tmp_path, 2)
    process.send_signal(number)
    _, errors = process.communicate(timeout=ENDED_WITHIN_S)
    assert process.returncode == 128 + number and all(is_gone(pid) for pid in ranks)
    name = "Ctrl-C" if number == signal.SIGINT else "SIGTERM"
    said = f"{name} while starting: ended at once, nothing was trained that could be lost.\n"
    assert errors.decode() == said


@pytest.mark.parametrize("imports", [[], ["json"]], ids=["fresh", "forked"])
def test_no_rank_outlives_a_launcher_that_is_killed(program, tmp_path, imports):
    program("""
        (notes / f"pid_{rank}").write_text(f"{os.getpid()}.")
        time.sleep(600)
    """)
    process = start_launcher(tmp_path, 2, imports)
    ranks = pids(tmp_path, 2)
    process.kill()
    process.communicate()
    wait_for(lambda: all(is_gone(pid) for pid in ranks))


@pytest.mark.full
@pytest.mark.parametrize(
    ("variables", "is_rank", "world_size"),
    [
        ({}, False, 1),
        ({"RANK": "1", "WORLD_SIZE": "4"}, True, 4),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4"}, True, 4),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, False, 1),  # the batch script itself
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "1"}, False, 1),  # a shell by srun
    ],
)
def test_a_launcher_is_known_by_its_variables(monkeypatch, variables, is_rank, world_size):
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert (under_launcher(), world_size_of_launcher()) == (is_rank, world_size)


def test_the_launcher_imports_no_torch():
    code = "import sys, mcore_rl.workers.launcher; sys.exit('torch' in sys.modules)"
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    assert subprocess.run([sys.executable, "-c", code], env=environment).returncode == 0


@pytest.mark.full
def test_ranks_know_whether_a_terminal_shows_their_output_and_how_wide_it_is(program, tmp_path, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)  # which a shell's user may have exported
    program(
        """
        from mcore_rl.workers.launcher import is_shown_on_terminal
        print(is_shown_on_terminal(), os.environ.get("COLUMNS"), flush=True)
        """
    )
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 72))
    assert start_launcher(tmp_path, 1, console=theirs).wait(timeout=ENDED_WITHIN_S) == 0
    assert os.read(ours, 4096) == b"True 72\r\n"
    assert (tmp_path / "logs/rank_0.log").read_bytes() == b"True 72\n"
    process = start_launcher(tmp_path, 1)
    assert process.communicate(timeout=ENDED_WITHIN_S)[0].startswith(b"False ")


def test_output_reaches_a_stream_of_text_alone_such_as_a_notebooks():
    notebook = io.StringIO()
    console = bytes_of(notebook)
    for chunk in ("step é".encode()[:-1], "é\n".encode()[1:]):
        console.write(chunk)
        console.flush()
    assert notebook.getvalue() == "step é\n"
    file = io.TextIOWrapper(io.BytesIO())
    assert bytes_of(file) is file.buffer
