"""A file as `python FILE words...` runs it, for processes that begin as copies of a warm one."""

import runpy
import sys
from collections.abc import Sequence


def main(argv: Sequence[str]) -> None:
    """Run the file that the first word names."""
    sys.argv = list(argv)
    runpy.run_path(argv[0], run_name="__main__")
