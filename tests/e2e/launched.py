"""The program of signalled.py on two ranks of our launcher: LOG_DIR, then its words."""

from collections.abc import Sequence
from pathlib import Path

from mcore_rl.workers.launcher import launch_local

MODULE = "tests.e2e.signalled"


def main(argv: Sequence[str]) -> int:
    return launch_local(MODULE, argv[1:], 2, Path(argv[0]), [MODULE])
