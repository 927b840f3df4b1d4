"""torchrun that gives ranks time to save when they are asked to end.

    python -m mcore_rl.workers.torchrun SECONDS ARGUMENTS_OF_TORCHRUN...

By default torchrun kills ranks 30 s after SIGTERM, for example on a preemption: a save that takes longer would be lost.
"""

import sys
from collections.abc import Sequence

import torch
from torch.distributed import run

OPTION = "--shutdown-timeout"


def main(argv: Sequence[str]) -> None:
    """Run torchrun with `argv[1:]` and `argv[0]` seconds between SIGTERM and SIGKILL, if it has the option."""
    seconds, *arguments = argv
    if OPTION in run.get_args_parser().format_help():
        arguments = [f"{OPTION}={seconds}", *arguments]
    else:
        sys.stderr.write(
            f"torchrun of torch {torch.__version__} has no {OPTION}: it kills ranks 30 s after a preemption or "
            'cancellation, whatever they still save. Use survival.starter="srun", which gives them all time there is.\n'
        )
    run.main(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
