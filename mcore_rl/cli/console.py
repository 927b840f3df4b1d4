"""The console script `mcore-rl`: until the command is imported, Ctrl-C ends it without a traceback."""

import importlib
import signal


def main() -> int:
    """Import the command line and run it; returns the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    cli = importlib.import_module("mcore_rl.cli.cli")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    status: int = cli.main()
    return status
