"""The ranks of a run as processes of this machine, and this process's place among them. Imports no torch."""

import codecs
import ctypes
import io
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import IO, Any, NoReturn, TextIO, cast

from mcore_rl.errors import INTERRUPTED_STATUS, REFUSED_STATUS, after_echo
from mcore_rl.storage.files import NOT_WRITER, full_disk_explained, is_elsewhere
from mcore_rl.workers import failures
from mcore_rl.workers.forked_rank import PR_SET_PDEATHSIG, THREADS, ForkedRank, imported, stop_signals

POLL_S = 0.05
GRACE_S = 5.0
"""Seconds that a rank may take to end after SIGTERM."""
LOG_TAIL_LINES = 40
CLAIM_S = 1.0
"""Seconds that a rank's failure waits for a graver failure that explains it."""
STAGE_FILE = "MCORE_RL_STAGE_FILE"
"""Environment variable: file in which rank 0 reports to `launch_local` that it trains, or stops as requested."""
TRAINING, STOPPING = "training", "stopping"
TERMINAL = "MCORE_RL_TERMINAL"
"""Environment variable of ranks whose output a terminal shows, with as many columns as COLUMNS says."""
OF_RANKS = frozenset(
    {
        *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK"),
        *("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RUN_ID"),
        *(failures.FAILURES, STAGE_FILE, TERMINAL),
    }
)
"""Environment variables of a rank, which other torch programs would mistake for their own."""
OF_TRAINING = frozenset(
    {
        *("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "CUDA_DEVICE_MAX_CONNECTIONS", "CUBLAS_WORKSPACE_CONFIG"),
        *("NCCL_ALGO", "NVTE_ALLOW_NONDETERMINISTIC_ALGO", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
    }
)
"""Environment variables for training that slow servers down or end them: vLLM refuses expandable segments."""


@dataclass(slots=True)
class _Rank:
    process: "subprocess.Popen[bytes] | ForkedRank"
    log: Path
    tees: list[threading.Thread] = field(default_factory=list)
    is_noted: bool = False
    """Whether the launcher has recorded how it ended."""

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None


def under_launcher() -> bool:
    """Return whether torchrun, srun or `launch_local` started this process as a rank of a run, not a batch script."""
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


def is_shown_on_terminal() -> bool:
    """Return whether a terminal shows what this rank writes, so that its lines should fit."""
    return TERMINAL in os.environ


def note_stage(stage: str) -> None:
    """Report TRAINING or STOPPING to `launch_local`, if it started this rank."""
    path = Path(os.environ.get(STAGE_FILE, ""))
    # The user may delete logs while they grow; a run's folder that was renamed is not made anew.
    if STAGE_FILE in os.environ and path.parents[2].is_dir():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(stage, encoding="utf-8")


def launch_local(
    module: str,
    args: Sequence[str],
    num_ranks: int,
    log_dir: Path,
    imports: Sequence[str] = (),
    refuse: Callable[[], None] | None = None,
    meanwhile: Callable[[], None] | None = None,
) -> int:
    """Run `python -m module *args` as ranks of this machine; return the exit status of the first failure, or 0.

    Rank 0 also writes to this console. `log_dir/rank_K.log` has all of rank K, and failure.json there the first
    failure, which ends the other ranks. SIGTERM, SIGINT, SIGUSR1 and SIGHUP make ranks that train stop and save, and
    end ranks that start. After a save on Ctrl-C the status is 130. No rank outlives this process. To be called in the
    main thread. Raises TrainingError if the disk is full before there are ranks.

    Several ranks (a single rank only if this process has imported `imports` already) begin as copies of this process
    with `imports`, if that is safe; `refuse`, called only then and first, raises the errors that the ranks would raise.
    `meanwhile` is called repeatedly while ranks are running; an error that it raises ends them.
    """
    log_dir.mkdir(parents=True, exist_ok=True)
    raise_open_files()
    causes, stage = (log_dir / "failures").resolve(), (log_dir / ".stage").resolve()
    for old in (*causes.glob("*.json"), log_dir / "failure.json", stage):
        old.unlink(missing_ok=True)
    environment = _environment(num_ranks)
    try:
        with _handled_signals(_ask_to_end):
            shares = num_ranks > 1 or all(module in sys.modules for module in imports)
            is_forked = shares and imported(imports, environment.get(THREADS))
            if is_forked and refuse is not None:
                refuse()
                is_forked = imported(imports, environment.get(THREADS))  # `refuse` may have started threads
    except _AskedToEndError as asked:
        return _ended_while_starting(asked.number)
    failures.make_reserve(causes)
    with full_disk_explained(log_dir):
        (log_dir / NOT_WRITER).write_text("goes when a rank becomes the writer\n")  # bytes, which a full disk refuses
    environment |= {failures.FAILURES: str(causes), STAGE_FILE: str(stage)}
    if sys.stdout.isatty() and sys.stderr.isatty():
        # The ranks write to pipes, which have no width.
        environment |= {TERMINAL: "1", "COLUMNS": str(shutil.get_terminal_size().columns)}
    ranks: list[_Rank] = []
    caught: list[int] = []
    with _handled_signals(lambda number, _: caught.append(number)):
        try:
            # Opened before rank 0 starts: it may live longer than its log.
            logs = [(log_dir / "rank_0.log").open("ab", buffering=0) for _ in ("stdout", "stderr")]
            # Rank 0 comes last, so that no other rank holds its pipes open.
            for rank in reversed(range(num_ranks)):
                own = environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                log = log_dir / f"rank_{rank}.log"
                ranks.insert(0, _start(module, args, own, log, is_first=rank == 0, is_forked=is_forked))
            first = ranks[0]
            pipes = (first.process.stdout, sys.stdout), (first.process.stderr, sys.stderr)
            for (pipe, console), file in zip(pipes, logs, strict=True):
                assert pipe is not None
                tee = threading.Thread(target=_tee, args=(pipe, bytes_of(console), file, first.log), daemon=True)
                tee.start()
                first.tees.append(tee)
            return _wait(ranks, caught, causes, stage, meanwhile)
        finally:
            _end(ranks)
            stage.unlink(missing_ok=True)


def start_server(
    command: Sequence[str], settings: Mapping[str, str], defaults: Mapping[str, str], log: Path
) -> "subprocess.Popen[bytes]":
    """Start a process that is not a rank of the run, in its own process group, so that Ctrl-C does not reach it.

    It gets `settings` and this process's variables without those of a rank and of training; `defaults` only fill gaps.
    Its output is appended to `log`.
    """
    with log.open("ab") as file:
        return subprocess.Popen(
            list(command),
            env={**defaults, **foreign_environment(), **settings},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            process_group=0,
        )


def foreign_environment() -> dict[str, str]:
    """Return this process's environment without the variables of ranks and of training."""
    return {name: value for name, value in os.environ.items() if name not in OF_RANKS | OF_TRAINING}


def environment_variable(name: str) -> str | None:
    """Return an environment variable that the user's config names; None if it is not set or empty."""
    return os.environ.get(name) or None


def raise_open_files() -> None:
    """Raise the limit on open files to the maximum without privileges: large jobs exceed the usual 1024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # some kernels refuse "unlimited"
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _environment(num_ranks: int) -> dict[str, str]:
    # A single thread for each rank unless the user sets another number.
    environment = os.environ | {
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "PYTHONUNBUFFERED": "1",
        "COLUMNS": str(shutil.get_terminal_size().columns),
    }
    if num_ranks > 1:
        environment.setdefault(THREADS, "1")
    return environment


def free_port() -> int:
    """Return a TCP port that nobody on this machine listens on, below those that outgoing connections get."""
    for port in random.SystemRandom().sample(range(12000, 32000), 100):
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
    raise OSError("100 ports between 12000 and 32000 were tried and all are in use")


def _start(
    module: str, args: Sequence[str], environment: dict[str, str], log: Path, *, is_first: bool, is_forked: bool
) -> _Rank:
    # In its own session Ctrl-C reaches it only through this process.
    with log.open("wb") as file:
        if is_forked:
            return _Rank(ForkedRank(module, args, environment, None if is_first else file, stop_signals()), log)
        process = subprocess.Popen(
            [sys.executable, "-m", module, *args],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if is_first else file,
            stderr=subprocess.PIPE if is_first else subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=dies_with_parent(),
        )
    return _Rank(process, log)


def dies_with_parent() -> Callable[[], None] | None:
    """Return the call for the child to make before it becomes Python: the kernel then kills it when its parent ends."""
    if sys.platform != "linux":
        return None
    prctl, parent = ctypes.CDLL(None, use_errno=True).prctl, os.getpid()

    def in_child() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended in between
            os._exit(1)

    return in_child


def bytes_of(stream: TextIO) -> IO[bytes]:
    """Return where bytes for `stream` are written; a notebook's has text alone, which they become."""
    if hasattr(stream, "buffer"):
        return stream.buffer
    decoder = codecs.getincrementaldecoder("utf-8")("replace")

    class _Decoded(io.RawIOBase):
        def write(self, chunk: Any) -> int:
            return stream.write(decoder.decode(bytes(chunk)))

        def flush(self) -> None:
            stream.flush()

    return cast("IO[bytes]", _Decoded())


def _tee(pipe: IO[bytes], console: IO[bytes], file: io.FileIO, log: Path) -> None:
    # A closed console (`| head`) does not stop the log, nor a full disk the rank; a deleted log is opened anew.
    has_console = has_room = True
    with pipe, ExitStack() as opened:
        opened.enter_context(file)
        while chunk := os.read(pipe.fileno(), 1 << 16):
            try:
                if is_elsewhere(file, log) and log.parents[2].is_dir():
                    log.parent.mkdir(parents=True, exist_ok=True)
                    file = opened.enter_context(log.open("ab", buffering=0))
                    _write_line(f"warning: {log} was deleted or moved: a new one begins here.")
                rest = memoryview(chunk)
                while rest:  # of what has no room the part that has is written, without an error
                    rest = rest[file.write(rest) :]
                has_room = True
            except OSError as error:
                if has_room:
                    _write_line(
                        f"{log}: {os.strerror(error.errno or 0)}. Lines are missing there until it can be written."
                    )
                has_room = False
            if has_console:
                try:
                    console.write(chunk)
                    console.flush()
                except OSError:
                    has_console = False


@contextmanager
def _handled_signals(handle: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    before = {number: signal.signal(number, handle) for number in stop_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _AskedToEndError(BaseException):
    # No `except Exception` of an import swallows it.
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def _ask_to_end(number: int, _: FrameType | None) -> NoReturn:
    raise _AskedToEndError(number)


def _ended_while_starting(number: int) -> int:
    asked_by = "Ctrl-C" if number == signal.SIGINT else failures.signal_name(number)
    _write_line(
        f"{after_echo(number)}{asked_by} while starting: ended at once, nothing was trained that could be lost."
    )
    return 128 + number


def _wait(
    ranks: list[_Rank], caught: list[int], causes: Path, stage: Path, meanwhile: Callable[[], None] | None
) -> int:
    """Return the exit status once all ranks have ended well, a rank has failed, or the user does not want to wait."""
    passed_on: list[int] = []
    oom, has_trained = failures.OomKills(), False
    failed_s: float | None = None
    unwritten: list[failures.Failure] = []
    while True:
        has_trained = has_trained or stage.exists()  # noted now, as the user may delete the file with the logs
        if meanwhile is not None:
            meanwhile()
        while caught:
            number = caught.pop(0)
            if number == signal.SIGINT and number in passed_on:
                _kill(ranks)
                _write_line(f"{after_echo()}Ended at once. The same command goes on from the last complete checkpoint.")
                return INTERRUPTED_STATUS
            if not has_trained:
                _kill(ranks)
                return _ended_while_starting(number)
            if number == signal.SIGINT:
                _write_line(
                    f"{after_echo()}Ctrl-C: the step is finished and saved; press it again to end at once, without "
                    "saving."
                )
            passed_on.append(number)
            for rank in ranks:
                if rank.is_alive:
                    rank.process.send_signal(number)
        if _note_the_dead(ranks, causes, oom, passed_on, unwritten):
            failed_s = failed_s or time.monotonic()
            # If the disk has no room for any cause, the ends that this process saw are all there is. Of two statuses,
            # choose the rank with a message for the user: the other rank gave way to it.
            cause = failures.first_cause(causes) or min(
                unwritten, key=lambda failure: (failure.order, failure.status != REFUSED_STATUS), default=None
            )
            # A rank that has lost its peer may end sooner than the rank that knows why.
            if cause and (cause.order == failures.Order.CAUSE or time.monotonic() - failed_s > CLAIM_S):
                with suppress(OSError):  # a full disk
                    failures.publish(causes)
                _report(cause, ranks[cause.rank])
                return cause.status
        elif not any(rank.is_alive for rank in ranks):
            if signal.SIGINT in passed_on and stage.exists() and stage.read_text(encoding="utf-8") == STOPPING:
                _join_tees(ranks)
                _write_line("Stopped by Ctrl-C, and saved. The same command goes on from there.")
                return INTERRUPTED_STATUS
            return 128 + passed_on[-1] if any(rank.process.returncode for rank in ranks) else 0
        time.sleep(POLL_S)


def _note_the_dead(
    ranks: list[_Rank],
    causes: Path,
    oom: failures.OomKills,
    passed_on: Sequence[int],
    unwritten: list[failures.Failure],
) -> bool:
    """Return whether a rank failed; a cause that it did not write is written, or added to `unwritten` without room."""
    failed = False
    for i, rank in enumerate(ranks):
        code = rank.process.poll()
        # A rank that was asked to end before it listened, or after its last step, has not failed.
        if not code or -code in passed_on or code - 128 in passed_on:
            continue
        failed = True
        if rank.is_noted or (code > 0 and failures.has_noted(i, causes)):
            continue
        rank.is_noted = True
        _join_tees([rank], CLAIM_S)  # a child of the rank may keep its output open
        output = rank.log.read_text(errors="replace") if rank.log.exists() else ""  # it may be deleted
        tail = output.rstrip().splitlines()[-LOG_TAIL_LINES:]
        if code < 0:
            failure = replace(failures.rank_death(i, -code, oom, output), text="\n".join(tail))
        else:
            last = tail[-1] if tail else f"ended with status {code}"
            failure = failures.rank_failure(i, code, last, "\n".join(tail), failures.Order.STATUS)
        if failures.note_failure(failure, causes) is None:
            unwritten.append(failure)
    return failed


def _write_line(line: str) -> None:
    with suppress(OSError):  # its terminal may be closed
        sys.stderr.write(line + "\n")
        sys.stderr.flush()


def _report(cause: failures.Failure, rank: _Rank) -> None:
    # Rank 0's own text is on the console already.
    _join_tees([rank])
    text = f"{cause.text.rstrip()}\n" if cause.rank else ""
    headline = cause.headline
    if cause.status == REFUSED_STATUS:  # the message for the user is above and is not repeated
        headline = f"{headline.partition(': ')[0]}, by the error above"
    _write_line(f"{text}First cause: {headline} (exit status {cause.status}); its output: {rank.log}")


def _join_tees(ranks: Sequence[_Rank], timeout_s: float = GRACE_S) -> None:
    for tee in (tee for rank in ranks for tee in rank.tees):
        tee.join(timeout=timeout_s)


def _kill(ranks: Sequence[_Rank]) -> None:
    # Output so far reaches the console first.
    for rank in ranks:
        with suppress(ProcessLookupError):
            os.killpg(rank.process.pid, signal.SIGKILL)
    _join_tees(ranks)


def _end(ranks: list[_Rank]) -> None:
    # Children too are ended if a rank failed or had to be ended.
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
    _join_tees(ranks)
