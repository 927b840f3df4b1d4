"""The ranks of a run as processes of this machine, and this process's place among them. Imports no torch."""

import ctypes
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from mcore_rl.errors import McoreRlError
from mcore_rl.files import write_atomically

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
POLL_S = 0.05
GRACE_S = 5.0
"""The time that a rank may take to end after SIGTERM."""
LOG_TAIL_LINES = 40
FAILURE_FILE = "MCORE_RL_FAILURE_FILE"
"""Environment variable with the file in which the rank that failed first reports to `launch_local`."""
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Failure:
    """The cause of a run's end: the first rank that failed, its exit status, and its traceback or message."""

    rank: int
    status: int
    text: str


@dataclass(slots=True)
class _Rank:
    process: "subprocess.Popen[bytes]"
    log: Path
    tees: list[threading.Thread] = field(default_factory=list)

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None


def under_launcher() -> bool:
    """Return whether torchrun, srun or `launch_local` started this process as one rank of a run.

    A batch script has SLURM_PROCID and SLURM_NTASKS too; only a task of srun knows of a step's tasks.
    """
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return True
    return "SLURM_PROCID" in os.environ and int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1


def rank_of_launcher() -> int:
    """Return this process's rank from the launcher's environment; 0 without a launcher."""
    return int(os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or 0)


def world_size_of_launcher() -> int:
    """Return the number of ranks that the launcher started; 1 without a launcher."""
    if not under_launcher():
        return 1
    return int(os.environ.get("WORLD_SIZE") or os.environ["SLURM_STEP_NUM_TASKS"])


def error_text(error: McoreRlError) -> str:
    """Return the text that the user reads instead of a traceback."""
    separator = "\n" if "\n" in str(error) else " "
    return f"{type(error).__name__}:{separator}{error}"


def note_failure(failure: Failure) -> None:
    """Report to `launch_local`, if it started this rank, that the run ends because of this rank."""
    path = os.environ.get(FAILURE_FILE)
    if path is None:
        return
    write_atomically(Path(path), json.dumps([failure.rank, failure.status, failure.text]))
    time.sleep(3 * POLL_S)  # so that `launch_local` reads it before other ranks end


def launch_local(module: str, args: Sequence[str], num_ranks: int, log_dir: Path) -> int:
    """Run `python -m module *args` as ranks of this machine and return the exit status of the first failure, or 0.

    Rank 0 also writes to this console; `log_dir/rank_K.log` has all of rank K. The first failure is shown and the
    other ranks are ended. SIGTERM, SIGINT and SIGUSR1 are passed on, and no rank outlives this process. To be
    called in the main thread.
    """
    log_dir.mkdir(parents=True, exist_ok=True)
    failure_file = log_dir / "failure.json"
    failure_file.unlink(missing_ok=True)
    environment = _environment(num_ranks) | {FAILURE_FILE: str(failure_file.resolve())}
    command = [sys.executable, "-m", module, *args]
    ranks: list[_Rank] = []
    with _caught_signals() as caught:
        try:
            for rank in range(num_ranks):
                environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                log = log_dir / f"rank_{rank}.log"
                ranks.append(_start(command, environment, log, is_first=rank == 0))
            _tee_to_console(ranks[0])
            return _wait(ranks, caught, failure_file)
        finally:
            _end(ranks)


def _environment(num_ranks: int) -> dict[str, str]:
    """Return the environment of all ranks: one thread each unless the user sets another number."""
    environment = os.environ | {
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "PYTHONUNBUFFERED": "1",
        "COLUMNS": str(shutil.get_terminal_size().columns),
    }
    if num_ranks > 1:
        environment.setdefault("OMP_NUM_THREADS", "1")
    return environment


def free_port() -> int:
    """Return a TCP port that nobody listens on here, below those that outgoing connections get."""
    for port in random.SystemRandom().sample(range(12000, 32000), 100):
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
    raise OSError("100 ports between 12000 and 32000 were tried and all are in use")


def _start(command: list[str], environment: dict[str, str], log: Path, *, is_first: bool) -> _Rank:
    """Start a rank in its own session, so that Ctrl-C reaches it once, from here; it dies with this process."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if is_first else file,
            stderr=subprocess.PIPE if is_first else subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_dies_with_parent(),
        )
    return _Rank(process, log)


def _dies_with_parent() -> Callable[[], None] | None:
    """Return the call of the child before it becomes Python: the kernel then kills it when its parent ends."""
    if sys.platform != "linux":
        return None
    prctl, parent = ctypes.CDLL(None, use_errno=True).prctl, os.getpid()

    def in_child() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended in between
            os._exit(1)

    return in_child


def _tee_to_console(rank: _Rank) -> None:
    for pipe, console in ((rank.process.stdout, sys.stdout), (rank.process.stderr, sys.stderr)):
        assert pipe is not None
        thread = threading.Thread(target=_tee, args=(pipe, console.buffer, rank.log), daemon=True)
        thread.start()
        rank.tees.append(thread)


def _tee(pipe: IO[bytes], console: IO[bytes], log: Path) -> None:
    """Copy `pipe` to its end; a console that is gone (`| head`) does not stop the log."""
    has_console = True
    with pipe, log.open("ab", buffering=0) as file:
        while chunk := os.read(pipe.fileno(), 1 << 16):
            file.write(chunk)
            if has_console:
                try:
                    console.write(chunk)
                    console.flush()
                except OSError:
                    has_console = False


@contextmanager
def _caught_signals() -> Iterator[list[int]]:
    """The forwarded signals that arrive meanwhile, in order."""
    caught: list[int] = []
    before = {number: signal.signal(number, lambda got, _: caught.append(got)) for number in FORWARDED}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(ranks: list[_Rank], caught: list[int], failure_file: Path) -> int:
    """Until all ranks have ended well or one has not; a second Ctrl-C is not waited for."""
    interrupts = 0
    while True:
        while caught:
            number = caught.pop(0)
            interrupts += number == signal.SIGINT
            for rank in ranks:
                if rank.is_alive:
                    rank.process.send_signal(number)
        if interrupts > 1:
            return 128 + signal.SIGINT
        failure = _first_failure(ranks, failure_file)
        if failure:
            _report(failure, ranks[failure.rank])
            return failure.status
        if not any(rank.is_alive for rank in ranks):
            return 0
        time.sleep(POLL_S)


def _first_failure(ranks: list[_Rank], failure_file: Path) -> Failure | None:
    """Return the failure that the first rank to fail recorded; else a rank that was killed; else one that gave up."""
    codes = {i: rank.process.returncode for i, rank in enumerate(ranks) if not rank.is_alive}
    if failure_file.exists():
        return Failure(*json.loads(failure_file.read_text()))
    for i in sorted((i for i, code in codes.items() if code), key=lambda i: codes[i] > 0):
        tail = ranks[i].log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        return Failure(i, codes[i] if codes[i] > 0 else 128 - codes[i], "\n".join(tail))
    return None


def _report(failure: Failure, rank: _Rank) -> None:
    """Write the failure to stderr; rank 0's own text is on the console already."""
    for tee in rank.tees:
        tee.join(timeout=GRACE_S)
    signals = {128 + number: number.name for number in signal.Signals}
    how = (
        f"ended by {signals[failure.status]}"
        if failure.status in signals
        else f"exit status {failure.status}"
    )
    text = f"{failure.text.rstrip()}\n" if failure.rank else ""
    sys.stderr.write(f"{text}Rank {failure.rank} failed first ({how}); its output: {rank.log}\n")
    sys.stderr.flush()


def _end(ranks: list[_Rank]) -> None:
    """No rank is left, nor, where one failed or had to be ended, its children."""
    alive = [rank for rank in ranks if rank.is_alive]
    failed = alive or any(rank.process.returncode for rank in ranks)
    for rank in alive:
        rank.process.terminate()
    deadline = time.monotonic() + GRACE_S
    while any(rank.is_alive for rank in alive) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    for rank in ranks if failed else []:
        with suppress(ProcessLookupError):
            os.killpg(rank.process.pid, signal.SIGKILL)
    for rank in ranks:
        rank.process.wait()
        for tee in rank.tees:
            tee.join(timeout=GRACE_S)
