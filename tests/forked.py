"""`run_main`: a program as one rank, in a process that has torch and Megatron in memory from its start."""

import importlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.ranks import forkserver

TIMEOUT_S = 120.0


def run_main(module: str, words: Sequence[object]) -> "subprocess.CompletedProcess[str]":
    """Status and output of `python -m module words...`, seconds sooner."""
    with tempfile.TemporaryDirectory() as folder:
        output, errors = Path(folder, "stdout"), Path(folder, "stderr")
        process = forkserver().Process(
            target=_main, args=(module, [str(word) for word in words], os.getcwd(), output, errors)
        )
        process.start()
        process.join(TIMEOUT_S)
        if process.is_alive():
            process.kill()
            process.join()
        status = process.exitcode if process.exitcode is not None else -1
        return subprocess.CompletedProcess(
            [module, *map(str, words)], status, output.read_text(), errors.read_text()
        )


def kill_main(module: str, words: Sequence[object], is_time: Callable[[], bool]) -> None:
    """Start `python -m module words...`, and end it by SIGKILL as soon as `is_time` returns True."""
    with tempfile.TemporaryDirectory() as folder:
        output, errors = Path(folder, "stdout"), Path(folder, "stderr")
        process = forkserver().Process(
            target=_main, args=(module, [str(word) for word in words], os.getcwd(), output, errors)
        )
        process.start()
        deadline_s = time.monotonic() + TIMEOUT_S
        while not is_time() and process.is_alive() and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert process.is_alive() and is_time(), errors.read_text()
        process.kill()
        process.join()


def _main(module: str, words: list[str], folder: str, output: Path, errors: Path) -> None:
    for path, descriptor in ((output, 1), (errors, 2)):
        with path.open("wb") as file:
            os.dup2(file.fileno(), descriptor)
    os.chdir(folder)
    sys.argv = [module, *words]
    sys.exit(importlib.import_module(module).main(words))
