"""`mcore-rl plot`: the picture of a run."""

import argparse
import sys

from mcore_rl.report.plots import plot_run


def main(args: argparse.Namespace) -> int:
    """Draw it and say where it is; `args` as `mcore-rl plot` declares them."""
    sys.stdout.write(f"{plot_run(args.run)}\n")
    return 0
