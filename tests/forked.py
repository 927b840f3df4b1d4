"""`run_main`: a program as one rank or several, in processes that begin with torch and Megatron in memory."""

import importlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.ranks import forkserver, free_port

TIMEOUT_S = 240.0


def run_main(module: str, words: Sequence[object], num_ranks: int = 1) -> "subprocess.CompletedProcess[str]":
    """Return status and output of `python -m module words...`, seconds sooner.

    Of several ranks the output is that of rank 0, and the status 0 or that of the first rank that failed. What a
    launcher adds, such as the end of the other ranks, is tested with `mcore-rl` and torchrun themselves.
    """
    arguments = [str(word) for word in words]
    with tempfile.TemporaryDirectory() as folder:
        outputs = [
            (Path(folder, f"stdout_{rank}"), Path(folder, f"stderr_{rank}")) for rank in range(num_ranks)
        ]
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


def _main(module: str, words: list[str], folder: str, output: Path, errors: Path, **environment: str) -> None:
    os.environ.update(environment)
    for path, descriptor in ((output, 1), (errors, 2)):
        with path.open("wb") as file:
            os.dup2(file.fileno(), descriptor)
    os.chdir(folder)
    if "WORLD_SIZE" in environment:
        import torch

        torch.set_num_threads(1)  # as OMP_NUM_THREADS=1 of a launcher, which comes too late here
    sys.argv = [module, *words]
    sys.exit(importlib.import_module(module).main(words))
