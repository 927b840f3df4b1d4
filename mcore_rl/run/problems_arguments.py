"""The arguments of `mcore-rl problems`."""

import argparse
from pathlib import Path


def problems_arguments(parser: argparse.ArgumentParser) -> None:
    """An RL config, how many, and where to."""
    parser.add_argument("config", metavar="CONFIG.toml", help="an RL config, whose rl.prompts.task is made")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="fields that override the file's")
    parser.add_argument("--count", type=int, default=10000, help="how many (default 10000)")
    parser.add_argument("--output", type=Path, required=True, help="the file to write, JSON lines")
