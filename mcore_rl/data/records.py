"""Records of data as people have it: JSON lines and lists, CSV, parquet (also compressed), and datasets of the hub."""

import bz2
import codecs
import csv
import gzip
import importlib
import io
import json
import lzma
import re
import sys
import zlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Generic, TypeVar, cast

from mcore_rl.errors import ConfigError, DataError
from mcore_rl.storage.files import DATA_ENDINGS, PACKED, POINTER, POINTER_REMEDY, data_files, is_saved


def required_package(module: str, extra: str, name: str) -> Any:
    """Import a module with which `name` is read; a ConfigError names the `extra` that has it, where it is absent."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{name} is read with the package {module.partition('.')[0]}, which is not installed. Install it: "
            f"pip install 'mcore-rl[{extra}]'."
        ) from error


T = TypeVar("T")
SPLITS = ("train", "valid", "val", "dev", "test", "eval")
"""Prefixes of file names that mark the splits of a dataset; a folder with several splits is not read as a whole."""
HUB = "hub:"
"""Begins the name of a dataset of the hub: hub:NAME, hub:NAME:SPLIT, hub:NAME#CONFIG:SPLIT."""


def _open_zstandard(name: str, mode: str) -> Any:
    return required_package("backports.zstd", "zstandard", name).open(name, mode)


def _open_utf_16(name: str, _: str) -> BinaryIO:
    return io.BytesIO(Path(name).read_bytes().decode("utf-16").encode())


BEGINS: dict[bytes, Any] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ\x00": lzma.open,
    b"\x28\xb5\x2f\xfd": _open_zstandard,
    # A frame that readers skip; pzstd puts one in front of the content.
    **{bytes([number, 0x2A, 0x4D, 0x18]): _open_zstandard for number in range(0x50, 0x60)},
    codecs.BOM_UTF16_LE: _open_utf_16,
    codecs.BOM_UTF16_BE: _open_utf_16,
    b"PK\x03\x04": "It is an archive (zip). Unpack it first.",
    POINTER: POINTER_REMEDY,
}
"""First bytes of files that are not read as they are, and what opens them; of files that are not read, the reason."""
DELIMITERS = {".csv": ",", ".tsv": "\t"}
BOM = codecs.BOM_UTF8
DAMAGED = (OSError, EOFError, lzma.LZMAError, zlib.error, UnicodeError, csv.Error)
PLACEHOLDER = re.compile(r"\{\{([A-Za-z_]\w*)\}\}|\{([A-Za-z_]\w*)\}")
ROWS_AT_A_TIME = 1024
MAX_BAD = 0.01
"""Share of documents that may be bad unless the user allows another."""
SHOWN = 5
"""Number of bad lines that an error, or a line of the log, lists."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """A line of a file, or a row of a table, as an object; if it is not an object, `problem` is the reason."""

    line: int
    """Line or row, from 1."""
    file: str
    entry: Mapping[str, Any] | None = None
    problem: str = ""

    @property
    def fields(self) -> Mapping[str, Any]:
        """The object. Raises DataError, without file and line, if there is none."""
        if self.entry is None:
            raise DataError(self.problem)
        return self.entry


def is_table(name: str) -> bool:
    """Return whether `name` is a parquet file or a dataset, with rows instead of lines as records."""
    return is_dataset(name) or Path(name).suffix.lower() == ".parquet"


def is_dataset(name: str) -> bool:
    """Return whether the package `datasets` reads `name`: a dataset of the hub, or a folder that it saved."""
    return name.startswith(HUB) or is_saved(Path(name))


def unpacked_suffix(name: str) -> str:
    """Return the last ending of a file's name in small letters, without the ending of a compression."""
    packed = next((ending for ending in PACKED if ending and name.lower().endswith(ending)), "")
    return Path(name.lower().removesuffix(packed)).suffix


def is_packed(name: str) -> bool:
    """Return whether a file is compressed, or text in UTF-16 or UTF-32: its bytes are not those of its lines."""
    return _opener(name) is not open


def is_in_lines(name: str) -> bool:
    """Return whether a file has a record in each line, and may be read in parts; a DataError for a damaged list."""
    if is_table(name) or unpacked_suffix(name) in DELIMITERS or is_packed(name):
        return False
    with opened(name) as file:
        return _json_list(file, name) is None


@contextmanager
def opened(name: str) -> Iterator[BinaryIO]:
    """Open a file for its decompressed bytes; DataError if it is missing, damaged or cut off, also while it is read."""
    try:
        with cast(BinaryIO, _opener(name)(name, "rb")) as file:
            yield file
    except Exception as error:
        # ZstdError is of a package that may be absent.
        if not isinstance(error, DAMAGED) and type(error).__name__ != "ZstdError":
            raise
        reason = getattr(error, "strerror", None) or str(error)
        raise DataError(f"{name} cannot be read: {reason}. Name files that exist and are whole.") from error


def _opener(name: str) -> Any:
    path = Path(name)
    if path.exists() and not path.is_file():
        raise DataError(f"{name} is no file, but a folder, pipe or device. Write the data to a file, and name that.")
    with path.open("rb") as file:
        begin = file.read(max(map(len, BEGINS)))
    opener = next((opener for magic, opener in BEGINS.items() if begin.startswith(magic)), open)
    if isinstance(opener, str):
        raise DataError(f"{name} holds no data. {opener}")
    return opener


def read_records(name: str) -> Iterator[Record]:
    """Yield the records of a file (JSON lines, a JSON list, CSV, parquet), the files in a folder, or a dataset of the
    hub, in order. Raises DataError for a damaged file and a folder without data or of several splits, ConfigError
    without the package that reads it.
    """
    if Path(name).is_dir() and not is_saved(Path(name)):
        for path in _files_of_one_split(Path(name)):
            yield from read_records(str(path))
        return
    if is_table(name):
        for number, entry in enumerate(_rows(name), start=1):
            yield Record(line=number, file=name, entry=entry)
        return
    with opened(name) as file:
        if delimiter := DELIMITERS.get(unpacked_suffix(name)):
            csv.field_size_limit(sys.maxsize)  # its 128 KiB are less than a document
            rows = csv.DictReader(io.TextIOWrapper(file, "utf-8-sig", newline=""), delimiter=delimiter, strict=True)
            for entry in rows:
                # The reader has None as the key of fields too many, and as the value of fields too few.
                is_whole = None not in entry and None not in entry.values()
                problem = "" if is_whole else f"it has not the {len(rows.fieldnames or ())} fields of the first line"
                yield Record(line=rows.line_num, file=name, entry=entry if is_whole else None, problem=problem)
            return
        if (entries := _json_list(file, name)) is not None:
            for number, entry in enumerate(entries, start=1):
                yield record_of_line(json.dumps(entry).encode(), name, number)
            return
        file.seek(0)
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield record_of_line(line, name, number)


def _files_of_one_split(folder: Path) -> list[Path]:
    files = data_files(folder)
    if not files:
        raise DataError(f"{folder} has no file that ends in {', '.join(DATA_ENDINGS)}. Name files of data.")
    splits = [split for split in SPLITS if any(path.name.lower().startswith(split) for path in files)]
    if len(splits) > 1 and splits != ["valid", "val"]:
        shown = ", ".join(path.name for path in files[:SHOWN])
        raise DataError(f"{folder} has files of several splits ({shown}). Name the files of one of them.")
    return files


def _rows(name: str) -> Iterator[Mapping[str, Any]]:
    if is_dataset(name):
        yield from load_dataset(name)
        return
    parquet = required_package("pyarrow.parquet", "parquet", name)
    try:
        with parquet.ParquetFile(name) as table:
            for batch in table.iter_batches(ROWS_AT_A_TIME, use_threads=False):
                yield from batch.to_pylist()
    except (OSError, ValueError) as error:  # ArrowInvalid is a ValueError
        raise DataError(f"{name} cannot be read as parquet: {error}. Copy it again.") from error


def load_dataset(name: str) -> Any:
    """Return the dataset that `hub:NAME#CONFIG:SPLIT` names, or that `save_to_disk` wrote to the folder `name`."""
    datasets = required_package("datasets", "hub", name)
    path, _, split = name.removeprefix(HUB).partition(":")
    path, _, config = path.partition("#")
    try:
        if name.startswith(HUB):
            return datasets.load_dataset(path, config or None, split=split or "train")
        found = datasets.load_from_disk(name)
    except (OSError, ValueError, RuntimeError, LookupError) as error:  # of the hub, of the disk, of names
        raise DataError(
            f"{name} cannot be loaded: {error}. It is read as hub:NAME#CONFIG:SPLIT, or as datasets.save_to_disk wrote "
            "it; correct the name, download it where there is a network, or save it again."
        ) from error
    if isinstance(found, datasets.DatasetDict):
        folders = ", ".join(f"{name}/{split}" for split in found)
        raise DataError(f"{name} is a saved dataset of several splits. Name one of them: {folders}.")
    return found


def beside(template: str | None, entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record without the fields that the template names."""
    named = {match[2] for match in PLACEHOLDER.finditer(template or "")}
    return {key: value for key, value in entry.items() if key not in named}


def filled(template: str, entry: Mapping[str, Any]) -> str:
    """Return the template with {name} replaced by the record's field, {{name}} by {name}; DataError if absent."""

    def value(match: re.Match[str]) -> str:
        if match[1]:
            return f"{{{match[1]}}}"
        if match[2] not in entry:
            raise DataError(
                f"the template names {{{match[2]}}}, which it lacks (keys: {', '.join(entry) or 'none'}). Write "
                f"{{{{{match[2]}}}}} for the text itself"
            )
        return str(entry[match[2]])

    return PLACEHOLDER.sub(value, template)


class RecordReader(ABC, Generic[T]):
    """A reader of examples `T` that collects problems, so that a user can correct all of them at once."""

    def __init__(self, plural: str, *, skips_long: bool) -> None:
        """`plural` names the lines in messages; examples too long are left out if `skips_long`, else refused."""
        self._plural = plural
        self._skips_long = skips_long
        self.problems: list[str] = []
        """File, line and reason of each line that is no example."""
        self.refused: list[str] = []
        """A sentence for each example that is too long, and for each empty file."""
        self.num_skipped = 0
        self.notes: list[str] = []
        """For each file the shapes of its records, and the keys that were not read."""
        self._shapes: dict[str, None] = {}
        self._unread: Counter[str] = Counter()
        self._warnings: dict[str, None] = {}

    def note(self, shape: str, unread: Sequence[str]) -> None:
        """Remember the shape of a record and its keys that are not read."""
        self._shapes[shape] = None
        self._unread.update(unread)

    def warn(self, sentence: str) -> None:
        """Remember a warning about the records of this file; each sentence is kept once."""
        self._warnings[sentence] = None

    @abstractmethod
    def _example(self, record: Record) -> T | None:
        """Return the example of a record; None to leave it out. Raises DataError, without file and line, if invalid."""

    def _excess(self, example: T) -> str | None:
        """Return why an example is too long and how to make room for it; None if it fits."""
        return None

    def read(self, path: str) -> Iterator[T]:
        """Yield the examples of one file that fit."""
        num_lines = 0
        self._shapes, self._unread, self._warnings = {}, Counter(), {}
        for record in read_records(path):
            num_lines += 1
            try:
                example = self._example(record)
            except DataError as error:
                self.problems.append(f"{record.file}:{record.line}: {error}.")
                continue
            if example is None:
                continue
            if (excess := self._excess(example)) is None:
                yield example
            elif self._skips_long:
                self.num_skipped += 1
            else:
                self.refused.append(f'{record.file}:{record.line}: {excess}, or set data.too_long="skip".')
        if self._shapes:
            self.notes.append(f"{path} is read as {' and '.join(self._shapes)}")
        if self._unread:
            names = ", ".join(f"{key} ({count})" for key, count in self._unread.items())
            self.notes.append(
                f"{WARNING}{path} has keys that are not read: {names}; a prompt_template can use those of records, a "
                "chat template those of turns"
            )
        self.notes += [f"{WARNING}{path}: {sentence}" for sentence in self._warnings]
        if not num_lines:
            self.refused.append(f"{path} is empty. Give it lines with {self._plural}, or leave it out.")


WARNING = "warning: "
"""Prefix of the notes of a reader that are warnings; the log has a line for each."""


def warnings_among(notes: Sequence[str]) -> list[str]:
    """Return the warnings among the notes of a reader."""
    return [note for note in notes if note.startswith(WARNING)]


def shapes_among(notes: Sequence[str]) -> str:
    """Return the notes of a reader that are not warnings, as the end of a log line."""
    return "".join(f". {note}" for note in notes if not note.startswith(WARNING))


def refuse_bad_share(num_bad: int, num_documents: int, max_bad: float, shown: str) -> None:
    """Raise DataError, which ends in `shown`, if more than the share `max_bad` of the documents could not be read."""
    if num_bad > max_bad * (num_bad + num_documents):
        raise DataError(
            f"{num_bad} of {num_bad + num_documents} documents are bad, and --max-bad allows a share of {max_bad:g}. "
            f"Correct them, or allow more.{shown}"
        )


def beyond_max(bad_lines: Sequence[str], max_bad: int | None) -> Sequence[str]:
    """Return the bad lines where they are more than `max_bad`, which ends the run; None allows any number."""
    return bad_lines if max_bad is not None and len(bad_lines) > max_bad else ()


def listed(bad_lines: Sequence[str]) -> str:
    """Return the first SHOWN of `bad_lines`, each "file:line: reason", and how many more there are."""
    more = len(bad_lines) - SHOWN
    return "\n".join(bad_lines[:SHOWN]) + (f"\nand {more} more like these" if more > 0 else "")


def _json_list(file: BinaryIO, name: str) -> list[Any] | None:
    """Return the entries of a file that is one JSON list, else None; DataError if the list is damaged or cut off."""
    first = next((line for line in file if line.removeprefix(BOM).strip()), b"").removeprefix(BOM)
    if not first.lstrip().startswith(b"["):
        return None
    rest = file.read()
    with suppress(ValueError, RecursionError):
        entries: list[Any] = json.loads(first)
        return None if rest.strip() else entries
    try:
        entries = json.loads(first + rest)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{name} begins a JSON list that is damaged or cut off: {error}. Copy the file again, or correct it there."
        ) from error
    return entries


def record_of_line(line: bytes, file: str, number: int) -> Record:
    """Return the record of a line of JSON, with a problem where it is no object."""
    try:
        entry = json.loads(line.decode("utf-8-sig"))
        if b"\\u" in line:
            # JSON can spell half a surrogate pair ("\ud800"), which no tokenizer takes.
            json.dumps(entry, ensure_ascii=False).encode()
        problem = "" if isinstance(entry, dict) else f"a JSON {type(entry).__name__}, wanted an object"
    except UnicodeDecodeError as error:
        problem = not_utf8(error)
    except UnicodeEncodeError:
        problem = "it holds a lone surrogate, which is not text"
    except (ValueError, RecursionError) as error:
        # Such as UTF-16 without a mark, a parquet file of another name, what a machine wrote while it crashed.
        problem = "not text: it has NUL bytes" if b"\0" in line else f"not JSON ({error})"
    return Record(line=number, file=file, entry=None if problem else entry, problem=problem)


def not_utf8(error: UnicodeDecodeError) -> str:
    """Return what a text that is not UTF-8 is, as the end of a sentence."""
    byte = error.object[error.start]
    return f"not UTF-8 (byte 0x{byte:02x}); from Latin-1 it becomes that with iconv -f LATIN1 -t UTF-8"
