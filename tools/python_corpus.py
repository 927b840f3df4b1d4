"""Write the Python standard library as a corpus: thin wrapper over mcore_rl.data.python_corpus."""

import argparse
import sys
from pathlib import Path

from mcore_rl.errors import McoreRlError

EXAMPLE = """example:
  python tools/python_corpus.py --output data/python --max-mb 8"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(
        prog="tools/python_corpus.py",
        description="The source text of this Python's standard library; one file in twenty is held out.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument(
        "--output", required=True, type=Path, metavar="FOLDER", help="for train.jsonl and valid.jsonl"
    )
    p.add_argument("--max-mb", type=int, default=8, help="of text, about (default 8)")
    return p


def main() -> int:
    """Parse, run, say where the results are."""
    command = parser()
    args = command.parse_args()
    # Imported only now, because Megatron takes seconds and --help should not.
    from rich.console import Console

    from mcore_rl.data.python_corpus import write_python_corpus

    try:
        corpus = write_python_corpus(args.output, max_bytes=args.max_mb << 20)
    except McoreRlError as error:
        command.exit(2, f"error: {error}\n")
    Console().print(
        f"{corpus.train} ({corpus.train_files} files) and {corpus.valid} ({corpus.valid_files} files): "
        f"{corpus.num_bytes / 1e6:.1f} MB of text",
        soft_wrap=True,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
