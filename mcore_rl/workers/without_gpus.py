"""Run a module in another Python that sees no GPU; imports no torch."""

import os
import subprocess
import sys
from collections.abc import Sequence


def run_without_gpus(module: str, arguments: Sequence[object]) -> None:
    """Run `python -m module arguments` to its end, on a single CPU thread, with every GPU hidden and its output
    dropped.

    Megatron is patched for CPUs only if torch sees no GPU, and groups of ranks belong to a process.

    Raises:
        subprocess.CalledProcessError: If it failed; its output is on standard error.
    """
    hidden = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", module, *map(str, arguments)]
    done = subprocess.run(words, env=os.environ | hidden, capture_output=True, text=True)
    if done.returncode:
        sys.stderr.write(done.stderr)
        done.check_returncode()
