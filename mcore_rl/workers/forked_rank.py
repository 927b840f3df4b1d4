"""A rank that begins as a copy of its launcher, which has imported the program once for all ranks. Imports no torch.

A fresh Python spends 4 to 5 CPU-seconds on the imports of torch and Megatron.
"""

import atexit
import ctypes
import importlib
import importlib.util
import os
import resource
import runpy
import signal
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import IO

THREADS = "OMP_NUM_THREADS"
DEVICES = {
    "cuda": ("/dev/nvidiactl", "/dev/nvhost-ctrl", "/dev/dxg"),
    "hip": ("/dev/kfd", "/dev/dxg"),
    "xpu": ("/dev/dri", "/dev/dxg"),
}
"""Device files of the accelerators that a build of torch may use; the last is for Windows' Linux."""
PR_SET_PDEATHSIG = 1
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
"""Requests to stop a run; SIGHUP comes when its terminal is closed."""


def stop_signals() -> tuple[signal.Signals, ...]:
    """Return the requests to stop that this process obeys: not SIGHUP where it is ignored, as `nohup` makes it."""
    return tuple(n for n in STOP_SIGNALS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN)


def imported(modules: Sequence[str], threads: str | None) -> bool:
    """Import `modules`, and return whether ranks may be copies of this process.

    It is False with several threads (a copy would wait for their locks), with an accelerator's context, with nothing to
    import, or if an import fails. `threads` is the number for OpenMP and BLAS; None for their default.
    """
    if not modules or sys.platform != "linux" or _may_use_accelerator():
        return False
    before = os.environ.get(THREADS)
    if threads is not None:
        os.environ[THREADS] = threads
    try:
        for module in modules:
            importlib.import_module(module)
    except (ImportError, OSError, RuntimeError):  # a rank meets it again; its log and failure file name it
        return False
    finally:
        if before is not None:
            os.environ[THREADS] = before
        elif threads is not None:
            del os.environ[THREADS]
    return len(os.listdir("/proc/self/task")) == 1


def _may_use_accelerator() -> bool:
    # Asked without importing torch.
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return True
    build = runpy.run_path(str(Path(found.origin).parent / "version.py"))
    return any(
        build.get(kind) is not None and any(Path(file).exists() for file in files) for kind, files in DEVICES.items()
    )


class ForkedRank:
    """`python -m module *args` in a copy of this process, with the methods of subprocess.Popen that a launcher uses.

    `environment` is all of its variables; `log` has its output, None for pipes; the signals `handled`, which have
    handlers in this process, are reset in the rank.
    """

    def __init__(
        self,
        module: str,
        args: Sequence[str],
        environment: Mapping[str, str],
        log: IO[bytes] | None,
        handled: Sequence[int],
    ) -> None:
        pipes = [] if log else [os.pipe(), os.pipe()]
        outputs = [log.fileno()] * 2 if log else [writer for _, writer in pipes]
        readers = [os.fdopen(reader, "rb", buffering=0) for reader, _ in pipes]
        self.stdout: IO[bytes] | None
        self.stderr: IO[bytes] | None
        self.stdout, self.stderr = readers or (None, None)
        self.returncode: int | None = None
        arguments = (module, list(args), dict(environment), outputs, handled, os.getpid())
        self._process = get_context("fork").Process(target=_be_the_rank, args=arguments)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        # Until the copy has its own handlers, a signal would end in a handler of ours.
        signal.pthread_sigmask(signal.SIG_BLOCK, handled)
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, handled)
            for _, writer in pipes:
                os.close(writer)
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Return its exit status, the negative number of the signal that ended it, or None while it runs."""
        self.returncode = self._process.exitcode
        return self.returncode

    def wait(self) -> int:
        """Wait for its end and return as `poll` does."""
        self._process.join()
        code = self.poll()
        assert code is not None
        return code

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Ask it to end, by SIGTERM."""
        self.send_signal(signal.SIGTERM)


def _be_the_rank(
    module: str, args: list[str], environment: dict[str, str], outputs: list[int], handled: Sequence[int], parent: int
) -> None:
    os.setsid()
    die_with(parent)
    for number in handled:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, handled)
    for number, (name, output) in enumerate(zip(("stdout", "stderr"), outputs, strict=True), start=1):
        os.dup2(output, number)
        stream = os.fdopen(number, "w", encoding="utf-8", errors="backslashreplace", closefd=False)
        stream.reconfigure(write_through=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    os.environ.clear()
    os.environ.update(environment)
    torch = sys.modules.get("torch")
    if torch is not None and environment.get(THREADS, "").isdecimal():  # torch has read the launcher's environment
        torch.set_num_threads(int(environment[THREADS]))
    sys.argv = [module, *args]
    sys.orig_argv = [sys.executable, "-m", module, *args]  # what a run records as its command
    sys.modules.pop(module, None)  # so that runpy does not warn that it runs a second time
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    finally:
        error = sys.exception()
        if isinstance(error, Exception):
            sys.excepthook(type(error), error, error.__traceback__)
        atexit._run_exitfuncs()
        if isinstance(error, Exception):
            sys.exit(1)


def die_with(parent: int) -> None:
    """Make the kernel end this process when its parent `parent` ends: an orphan must not continue."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended in between
            os._exit(1)


def end_by_signal(number: int) -> None:
    """End this process by the signal that ended its child, so that others name it too; without a core."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)
