"""`mcore-rl inspect`: the contents of a checkpoint."""

import argparse

from rich.console import Console

from mcore_rl.cli.convert import report_differences
from mcore_rl.convert.check import contents
from mcore_rl.metrics.progress import ByteProgress
from mcore_rl.storage.folders import cached_or_given


def main(args: argparse.Namespace) -> int:
    """List a checkpoint and return the exit status: 0, or 1 if --diff finds a difference."""
    with ByteProgress(Console()) as progress:
        if args.diff is None:
            for line in contents(cached_or_given(args.path)).lines():
                progress.message(line)
            return 0
        args.reference, args.mtp, args.family = None, "keep", None
        return int(report_differences(args.path, args.diff, args, progress) > 0)
