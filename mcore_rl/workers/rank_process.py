"""A rank of a job below a small process that outlives it and records how it died.

    python -m mcore_rl.workers.rank_process mcore_rl.programs.pretrain CONFIG.toml key=value ...

A rank that SIGKILL, SIGSEGV or the out-of-memory killer ends cannot report so itself, and its launcher knows nothing of
other nodes: the first error in a log then comes from an innocent rank, which has lost its peer. Imports no torch.
"""

import os
import runpy
import signal
import sys
import traceback
from collections.abc import Sequence, Set

from mcore_rl.errors import INTERRUPTED_STATUS
from mcore_rl.workers.binding import bind
from mcore_rl.workers.failures import OomKills, Order, has_noted, note_failure, rank_death, rank_failure
from mcore_rl.workers.forked_rank import die_with, end_by_signal, stop_signals
from mcore_rl.workers.launcher import raise_open_files, rank_of_launcher


def main(argv: Sequence[str]) -> int:
    """Run module `argv[0]` with the arguments that follow, in a child; end as the child ends, and record a failure."""
    rank, oom = rank_of_launcher(), OomKills()
    raise_open_files()
    if bound := bind(int(os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or 0)):
        sys.stderr.write(f"rank {rank}: {bound}\n")
        sys.stderr.flush()
    # They stay blocked, and `_ended` takes them one by one: a handler's signal that comes just before a blocking call
    # would wait for the end of that call. SIGCHLD, blocked, is kept even though nobody handles it.
    awaited = {*stop_signals(), signal.SIGCHLD}
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        _be_the_rank(parent, rank, argv, before - awaited)
    code, asked = _ended(child, awaited)
    if code < 0:
        # A rank that was asked to end before it could listen has not failed.
        if -code not in asked:
            note_failure(rank_death(rank, -code, oom))
        end_by_signal(-code)
    if code and code - 128 not in asked and not has_noted(rank):
        note_failure(rank_failure(rank, code, f"ended with status {code}", order=Order.STATUS))
    return code


def _ended(child: int, awaited: Set[int]) -> tuple[int, list[int]]:
    """Send the rank in the process `child` requests to stop among `awaited`, which are blocked, until it ends. Returns
    its exit code, negative for a signal, and the requests that came.
    """
    asked: list[int] = []
    while True:
        number = signal.sigwait(awaited)
        if number != signal.SIGCHLD:
            asked.append(number)
            os.kill(child, number)
            continue
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status), asked


def _be_the_rank(parent: int, rank: int, argv: Sequence[str], mask: Set[int]) -> None:
    die_with(parent)
    for number in stop_signals():
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    sys.argv[1:] = argv[1:]
    try:
        runpy.run_module(argv[0], run_name="__main__", alter_sys=True)
    finally:
        _note_unforeseen(rank, sys.exception())
    sys.exit(0)


def _note_unforeseen(rank: int, error: BaseException | None) -> None:
    # Ctrl-C ends the rank without a traceback.
    if isinstance(error, KeyboardInterrupt):
        sys.stderr.write(f"Rank {rank} was interrupted.\n")
        sys.stderr.flush()
        os._exit(INTERRUPTED_STATUS)
    if error is not None and not isinstance(error, SystemExit):
        cause = f"{type(error).__name__}: {error}"
        text = "".join(traceback.format_exception(error)).rstrip()
        note_failure(rank_failure(rank, 1, cause, f"{cause}\n{text}"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
