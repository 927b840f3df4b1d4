"""The arguments of `mcore-rl generate`."""

import argparse
from pathlib import Path


def generate_arguments(parser: argparse.ArgumentParser) -> None:
    """A run or a checkpoint, a prompt, and how to draw tokens."""
    parser.add_argument("--run", type=Path, help="the run_dir of a training; its newest checkpoint is used")
    parser.add_argument(
        "--checkpoint",
        type=Path,
        help="this checkpoint instead; without --run, of the run whose folder it is in",
    )
    parser.add_argument("--prompt", default="", help="text to continue; empty: the start of a document")
    parser.add_argument("--tokens", type=_positive, default=64, help="how many at the most (default 64)")
    parser.add_argument("--n", type=_positive, default=1, help="how many continuations (default 1)")
    parser.add_argument("--stream", action="store_true", help="show the text as it grows")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: the likeliest token (default)")
    parser.add_argument(
        "--top-k", type=int, default=0, help="among so many likeliest tokens; 0: all (default)"
    )
    parser.add_argument(
        "--top-p", type=float, default=1.0, help="among the likeliest of this probability; 1: all (default)"
    )
    parser.add_argument(
        "--min-p", type=float, default=0.0, help="so many times as likely as the likeliest; 0: all (default)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the first; each next one has the next seed")


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}, wanted 1 or more")
    return number
