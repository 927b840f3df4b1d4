"""The process above a server: `python -m mcore_rl.workers.supervisor PARENT PROGRAM ARGUMENTS...`.

Servers start further processes, which outlive a server that is killed, and keep its GPUs. All of them end with the
process PARENT, and when it asks for that (process_tree.END_TREE).
"""

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from mcore_rl.workers.process_tree import supervise


def main(arguments: Sequence[str]) -> NoReturn:
    """Run a program, and end with its exit status; `arguments` are the id of the parent process and the command."""
    parent, *command = arguments
    supervise(lambda: os.execvp(command[0], command), int(parent), after_start=lambda: None)


if __name__ == "__main__":
    main(sys.argv[1:])
