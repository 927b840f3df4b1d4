"""Files to documents: JSON lines or plain text, cut at byte offsets so that any process can read any part."""

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

from mcore_rl.data import records
from mcore_rl.data.shapes import refuse_labels
from mcore_rl.errors import DataError
from mcore_rl.storage.files import with_ending

FORMATS: dict[str, Literal["jsonl", "text"]] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    **dict.fromkeys(records.DELIMITERS, "jsonl"),
    ".txt": "text",
    ".text": "text",
    ".md": "text",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class DocumentFormat:
    """The format of documents in a file."""

    kind: Literal["jsonl", "text"]
    """Records, of JSON lines or any other form that `read_records` reads; or plain text."""
    key: str = "text"

    def is_splittable_in(self, name: str) -> bool:
        """Return whether the file `name` may be read in parts, as lines may, and plain text, one document, may not."""
        return self.kind == "jsonl" and records.is_in_lines(name)


@dataclass(frozen=True, kw_only=True, slots=True)
class InputFile:
    """A file as it was when its reading was planned."""

    path: str
    num_bytes: int
    modified_ns: int


@dataclass(frozen=True, kw_only=True, slots=True)
class FileSlice:
    """Bytes [start, end) of a file, both moved to the next line: adjacent slices share no document."""

    path: str
    start: int
    end: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """A document, or an entry that is not a document, with the reason in `problem`."""

    line: int
    """Line on which it begins; 1 is the slice's first line."""
    text: str = ""
    problem: str = ""


def find_input_files(inputs: Sequence[Path]) -> tuple[InputFile, ...]:
    """Return the files of `inputs`, of folders all but hidden ones and outputs of our commands, by name."""
    paths: list[Path] = []
    for path in inputs:
        if records.is_dataset(str(path)):
            paths.append(path)
            continue
        if not path.exists():
            raise DataError(f"input {path} does not exist. Give files, or folders of files.")
        inner = (
            (p for p in path.rglob("*") if p.is_file() and not p.name.startswith(".") and not _is_output(p))
            if path.is_dir()
            else [path]
        )
        paths += sorted(inner)
    if not paths:
        raise DataError(f"no file in {', '.join(map(str, inputs)) or 'the inputs (none given)'}.")
    return tuple(_source(path) for path in paths)


def _is_output(path: Path) -> bool:
    """Return whether a file is a tokenizer, or PREFIX.bin, .idx, .json, .log.jsonl or PREFIX.partial/*."""
    if path.suffix in (".model", ".bin", ".idx") or any(part.endswith(".partial") for part in path.parts):
        return True
    prefix = path.name.removesuffix(".log.jsonl").removesuffix(".json")
    made = (".idx", ".partial") if prefix != path.name else ()
    return any(with_ending(path.with_name(prefix), ending).exists() for ending in made)


def _source(path: Path) -> InputFile:
    if records.is_dataset(str(path)):
        rows = records.load_dataset(str(path))
        # The fingerprint replaces the modification time: a changed dataset has another fingerprint.
        return InputFile(path=str(path), num_bytes=rows.data.nbytes, modified_ns=zlib.crc32(rows._fingerprint.encode()))
    with records.opened(str(path)):
        status = path.stat()
    return InputFile(path=str(path), num_bytes=status.st_size, modified_ns=status.st_mtime_ns)


def format_of_endings(sources: Sequence[InputFile]) -> Literal["jsonl", "text"]:
    """Return the format that the files' suffixes mean. Raises DataError if they mean none, or several."""
    kinds = {
        "jsonl" if records.is_table(source.path) else FORMATS.get(records.unpacked_suffix(source.path))
        for source in sources
    }
    kind = kinds.pop()
    if kinds or kind is None:
        endings = sorted({Path(source.path).suffix for source in sources})
        raise DataError(
            f"the endings {endings} do not distinguish JSON lines from plain text. Give --format jsonl or text."
        )
    return kind


class DocumentReader:
    """Iterator over a slice's documents, in order; afterwards `num_lines` is the number of its lines."""

    def __init__(self, file_slice: FileSlice, document_format: DocumentFormat) -> None:
        self.file_slice = file_slice
        self.document_format = document_format
        self.num_lines = 0

    def __iter__(self) -> Iterator[Document]:
        path = self.file_slice.path
        if self.document_format.kind == "jsonl" or records.is_table(path):
            for record in self._records():
                yield _document_of(record, self.document_format.key)
            return
        with records.opened(path) as file:
            content = file.read().removeprefix(records.BOM)
        try:
            text = content.decode()
        except UnicodeDecodeError as error:
            yield Document(line=1, problem=records.not_utf8(error))
            return
        yield Document(line=1, problem="empty") if _is_empty(text) else Document(line=1, text=text)

    def _records(self) -> Iterator[records.Record]:
        path = self.file_slice.path
        if Path(path).is_file() and (self.file_slice.start or self.file_slice.end < Path(path).stat().st_size):
            with records.opened(path) as file:
                for line in self._lines(file):
                    if line.strip():
                        yield records.record_of_line(line, path, self.num_lines)
            return
        for record in records.read_records(path):
            self.num_lines = record.line
            yield record
        if not self.num_lines:
            yield records.Record(line=1, file=path, problem="there is no record in it")

    def _lines(self, file: BinaryIO) -> Iterator[bytes]:
        offset = self.file_slice.start
        # One byte back: a slice that begins right after a line end begins with a whole line, which must not be skipped.
        if offset:
            file.seek(offset - 1)
            offset += len(file.readline()) - 1
        for line in file:
            if offset >= self.file_slice.end:
                return
            self.num_lines += 1
            yield line.removeprefix(records.BOM) if offset == 0 else line
            offset += len(line)


def _document_of(record: records.Record, key: str) -> Document:
    line = record.line
    try:
        entry = record.fields
        refuse_labels(entry, "document", [key])
    except DataError as error:
        return Document(line=line, problem=str(error))
    if key not in entry:
        return Document(line=line, problem=f"no key {key!r} (keys: {', '.join(entry) or 'none'})")
    text = entry[key]
    if not isinstance(text, str):
        return Document(line=line, problem=f"{key!r} holds a {type(text).__name__}, not text")
    if _is_empty(text):
        return Document(line=line, problem=f"{key!r} is empty")
    return Document(line=line, text=text)


def _is_empty(text: str) -> bool:
    """Return whether a text has nothing but white space and byte order marks, which editors put before a text."""
    return not text.replace(records.BOM.decode(), "").strip()
