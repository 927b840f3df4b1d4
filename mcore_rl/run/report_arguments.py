"""The arguments of `mcore-rl report`."""

import argparse
from pathlib import Path


def report_arguments(parser: argparse.ArgumentParser) -> None:
    """Runs, and where the page goes."""
    parser.add_argument("runs", metavar="RUN", type=Path, nargs="+", help="the run_dir of a training")
    parser.add_argument(
        "--output", type=Path, default=Path("report.html"), help="the page (default report.html)"
    )
