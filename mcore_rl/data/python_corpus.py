"""A corpus that every machine has: the source text of Python's standard library."""

import hashlib
import json
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from mcore_rl.errors import DataError
from mcore_rl.files import write_atomically

LEFT_OUT = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "__pycache__",
    "encodings",
    "pydoc_data",
}
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
    """Write FOLDER/train.jsonl and valid.jsonl: modules by the hash of their path, up to `max_bytes`.

    The same interpreter gives the same files, wherever it is installed.
    """
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
    """Return the paths below the library, with forward slashes."""
    found = []
    for folder, folders, names in os.walk(library):
        folders[:] = [name for name in folders if name not in LEFT_OUT]
        below = Path(folder).relative_to(library)
        found += [(below / name).as_posix() for name in names if _is_module(name)]
    return found


def _is_module(name: str) -> bool:
    """Return whether this is source that is the same on every machine."""
    return name.endswith(".py") and not name.startswith("_sysconfigdata")


def _hash(path: str) -> str:
    return hashlib.sha256(path.encode()).hexdigest()


def _read(path: Path) -> str:
    """Return the text; empty for the odd file that is not UTF-8."""
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError:
        return ""
