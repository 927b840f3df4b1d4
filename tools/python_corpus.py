"""Write the Python standard library as a corpus, which every machine has: python tools/python_corpus.py --help"""

import argparse
import hashlib
import json
import os
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from mcore_rl.errors import DataError, McoreRlError
from mcore_rl.storage.files import write_atomically

EXAMPLE = """example:
  python tools/python_corpus.py --output data/python --max-mb 8"""
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "encodings", "pydoc_data"}
"""Folders that are left out: other packages, repetitive tests, and tables."""
VALID_EVERY = 20
"""One file in this many is held out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PythonCorpus:
    """Two files of JSON lines with `text` and `path`; no file of the library is in both."""

    train: Path
    valid: Path
    train_files: int
    valid_files: int
    num_bytes: int
    """Bytes of text in both files."""


def write_python_corpus(folder: Path, *, max_bytes: int = 8 << 20) -> PythonCorpus:
    """Write FOLDER/train.jsonl and valid.jsonl: modules by their path's hash; the same for the same interpreter."""
    library = Path(sysconfig.get_paths()["stdlib"])
    train: list[str] = []
    valid: list[str] = []
    num_bytes = 0
    for path in sorted(_modules(library), key=_hash):
        text = _read(library / path)
        if not text.strip():
            continue
        num_bytes += len(text.encode())
        if num_bytes > max_bytes and train and valid:
            num_bytes -= len(text.encode())
            break
        held_out = int(_hash(path), 16) % VALID_EVERY == 0
        (valid if held_out else train).append(json.dumps({"text": text, "path": path}) + "\n")
    if not train or not valid:
        raise DataError(
            f"{library} holds {len(train) + len(valid)} Python files to learn from: this interpreter has "
            "its standard library in another form. Use a Python with the library's sources, or give text "
            "of your own."
        )
    folder.mkdir(parents=True, exist_ok=True)
    for name, lines in (("train", train), ("valid", valid)):
        write_atomically(folder / f"{name}.jsonl", "".join(lines))
    return PythonCorpus(
        train=folder / "train.jsonl",
        valid=folder / "valid.jsonl",
        train_files=len(train),
        valid_files=len(valid),
        num_bytes=num_bytes,
    )


def _modules(library: Path) -> list[str]:
    found = []
    for folder, folders, names in os.walk(library):
        folders[:] = [name for name in folders if name not in LEFT_OUT]
        below = Path(folder).relative_to(library)
        found += [(below / name).as_posix() for name in names if _is_module(name)]
    return found


def _is_module(name: str) -> bool:
    return name.endswith(".py") and not name.startswith("_sysconfigdata")


def _hash(path: str) -> str:
    return hashlib.sha256(path.encode()).hexdigest()


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError:
        return ""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(
        prog="tools/python_corpus.py",
        description="The source text of this Python's standard library; one file in twenty is held out.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("--output", required=True, type=Path, metavar="FOLDER", help="for train.jsonl and valid.jsonl")
    p.add_argument("--max-mb", type=int, default=8, help="of text, about (default 8)")
    return p


def main() -> int:
    """Parse, run, say where the results are."""
    command = parser()
    args = command.parse_args()
    try:
        corpus = write_python_corpus(args.output, max_bytes=args.max_mb << 20)
    except McoreRlError as error:
        command.exit(2, f"error: {error}\n")
    print(
        f"{corpus.train} ({corpus.train_files} files) and {corpus.valid} ({corpus.valid_files} files): "
        f"{corpus.num_bytes / 1e6:.1f} MB of text"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
