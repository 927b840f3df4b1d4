"""A process and everything that it starts, ended together: also children of children, and children that left its
group.

    python -m mcore_rl.workers.process_tree PARENT PROGRAM ARGUMENTS...

runs a server so. Servers start further processes, which outlive a server that is killed, and keep its GPUs; all of them
end with the process PARENT, and when it asks for that by END_TREE.
"""

import ctypes
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import NoReturn

import psutil

from mcore_rl.workers.forked_rank import STOP_SIGNALS, end_by_signal

END_TREE = signal.SIGRTMIN
"""Signal that ends a supervised process with its descendants; nobody else sends it."""
POLL_S = 0.5
"""Seconds between checks that the process that asked for the work still runs."""
MAX_KILLING_S = 5.0
"""Seconds after which descendants that do not end, for example because of a broken disk, are left."""
PR_SET_CHILD_SUBREAPER = 36


def supervise(work: Callable[[], None], parent: int, *, after_start: Callable[[], None]) -> NoReturn:
    """Run `work` in a child of this process, and end with its exit status when nothing that it started runs any more.

    The descendants are killed when the child ends, when END_TREE arrives, or when the process `parent` is gone; also
    those that left their process group (Linux). `after_start` is called in this process.
    """
    os.setpgid(0, 0)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # it ends by the child's signal, which dumped already
    for number in STOP_SIGNALS:  # meant for the process that asked for the work
        signal.signal(number, signal.SIG_IGN)
    awaited = {signal.SIGCHLD, END_TREE}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        _work_and_exit(work)
    after_start()
    status = None
    while status is None and os.getppid() == parent:
        arrived = signal.sigtimedwait(awaited, POLL_S)
        status = _reaped(child)
        if arrived is not None and arrived.si_signo == END_TREE:
            break
    _kill_descendants()
    if os.WIFSIGNALED(status or 0):
        end_by_signal(os.WTERMSIG(status or 0))
    os._exit(os.WEXITSTATUS(status or 0))


def _work_and_exit(work: Callable[[], None]) -> NoReturn:
    code = 1
    try:
        work()
        code = 0
    finally:
        # The parent's exit handlers and the like must not run in the child.
        if code and sys.exc_info()[0] is not SystemExit:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _reaped(child: int) -> int | None:
    """Collect all children that have ended; return the wait status of `child` if it is among them."""
    found = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if pid == 0:
            return found
        if pid == child:
            found = status


def _kill_descendants() -> None:
    # A killed process may have started another a moment before.
    deadline = time.monotonic() + MAX_KILLING_S
    itself = psutil.Process()
    while (found := itself.children(recursive=True)) and time.monotonic() < deadline:
        for process in found:
            try:
                os.kill(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.002)
        _reaped(0)


if __name__ == "__main__":
    command = sys.argv[2:]
    supervise(lambda: os.execvp(command[0], command), int(sys.argv[1]), after_start=lambda: None)
