"""Programs as processes that begin with torch and Megatron in memory, seconds sooner than those of a fresh Python."""

import gc
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import psutil

from mcore_rl.workers.launcher import free_port
from tests.ranks import forkserver

TIMEOUT_S = float(os.environ.get("MCORE_RL_TEST_TIMEOUT_S", "600"))
"""Seconds of a program's limit: more of them where a real server starts on a machine with much other work."""
CLI = "mcore_rl.cli.cli"


def run_main(module: str, words: Sequence[object], num_ranks: int = 1) -> "subprocess.CompletedProcess[str]":
    """Return status and output of `python -m module words...`, seconds sooner.

    Of several ranks the output is that of rank 0, and the status 0 or that of the first rank that failed. What a
    launcher adds, such as the end of the other ranks, is tested with `mcore-rl` and torchrun themselves.
    """
    arguments = [str(word) for word in words]
    with tempfile.TemporaryDirectory() as folder:
        outputs = [(Path(folder, f"stdout_{rank}"), Path(folder, f"stderr_{rank}")) for rank in range(num_ranks)]
        world = {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)} if num_ranks > 1 else {}
        world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())} if num_ranks > 1 else {}
        ranks = [
            forkserver().Process(
                target=_main,
                args=(module, arguments, os.getcwd(), *outputs[rank]),
                kwargs={name: str(rank) for name in ("RANK", "LOCAL_RANK") if num_ranks > 1} | world,
            )
            for rank in range(num_ranks)
        ]
        for process in ranks:
            process.start()
        deadline = time.monotonic() + TIMEOUT_S
        for process in ranks:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        failed = [process.exitcode for process in ranks if process.exitcode != 0]
        status = next((code for code in failed if code is not None), -1) if failed else 0
        output, errors = (path.read_text() for path in outputs[0])
        return subprocess.CompletedProcess([module, *arguments], status, output, errors)


def succeed(module: str, words: Sequence[object], num_ranks: int = 1) -> "subprocess.CompletedProcess[str]":
    """Return the output of `run_main`; AssertionError with all that it wrote where its status is not 0."""
    finished = run_main(module, words, num_ranks)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished


def begin_main(module: str, words: Sequence[object], output: Path, **environment: str) -> ForkServerProcess:
    """Return the started process of `python -m module words...`; `output` gets what it writes."""
    arguments = [str(word) for word in words]
    process = forkserver().Process(
        target=_main, args=(module, arguments, os.getcwd(), output, output), kwargs=environment
    )
    process.start()
    return process


def run_command(*words: object) -> "subprocess.CompletedProcess[str]":
    """Return status and output of `mcore-rl words...`; its launcher, and so its ranks, are copies of a warm process."""
    return run_main(CLI, words)


class RunningCommand:
    """`mcore-rl words...` in the background, a copy of a warm process as of `run_command`."""

    def __init__(self, words: Sequence[object], output: Path, module: str = CLI) -> None:
        """Start it, or another module than `mcore-rl`; `output` gets what it writes."""
        self._output = output
        output.touch()
        self._process = begin_main(module, words, output)
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def text(self) -> str:
        """All that it has written so far."""
        return self._output.read_text()

    def poll(self) -> int | None:
        """Return the exit status; None while it runs."""
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def wait(self) -> int:
        """Return the exit status once it has ended; AssertionError after TIMEOUT_S."""
        self._process.join(TIMEOUT_S)
        status = self.poll()
        self.kill()
        assert status is not None, f"no end within {TIMEOUT_S} s:\n{self.text}"
        return status

    def kill(self) -> None:
        """End it, and with it its ranks, if it has not ended."""
        self.send_signal(signal.SIGKILL)
        self._process.join()


def wait_for(is_so: Callable[[], object], within_s: float = 300.0) -> None:
    """Return when `is_so`; AssertionError when it is not within some seconds."""
    deadline = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < deadline, f"not within {within_s} s"
        time.sleep(0.02)


def is_gone(pid: int) -> bool:
    """Return whether a process has ended."""
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def _main(module: str, words: list[str], folder: str, output: Path, errors: Path, **environment: str) -> None:
    gc.freeze()  # as in tests/ranks.py
    os.environ.update(environment)
    for path, descriptor in ((output, 1), (errors, 2)):
        with path.open("ab") as file:
            os.dup2(file.fileno(), descriptor)
    os.chdir(folder)
    if "WORLD_SIZE" in environment:
        import torch

        torch.set_num_threads(1)  # as OMP_NUM_THREADS=1 of a launcher, which comes too late here
    sys.argv = [module, *words]
    sys.exit(importlib.import_module(module).main(words))
