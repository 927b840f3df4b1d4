"""Files to documents: JSON lines or plain text, cut at byte offsets so that any process can read any part."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

from mcore_rl.errors import DataError

BOM = b"\xef\xbb\xbf"
COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\xfd7zXZ": "xz",
    b"BZh": "bzip2",
    b"PK\x03\x04": "zip",
}
ENDINGS: dict[str, Literal["jsonl", "text"]] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".txt": "text",
    ".text": "text",
    ".md": "text",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """How documents lie in a file."""

    kind: Literal["jsonl", "text"]
    key: str = "text"
    """JSON lines: the field with the text."""
    separator: str | None = None
    """Plain text: a line equal to this parts two documents; "": a blank line; None: a file is a document."""

    @property
    def is_splittable(self) -> bool:
        """Whether a file may be read in parts."""
        return self.kind == "jsonl" or self.separator is not None

    def is_boundary(self, line: bytes) -> bool:
        """Whether a file may be cut in front of `line`."""
        if self.kind == "jsonl":
            return True
        return line.rstrip(b"\r\n") == self.separator.encode() if self.separator else not line.strip()


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A file as it was when its reading was planned."""

    path: str
    num_bytes: int
    modified_ns: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Bytes [start, end) of a file, where either offset stands for the first boundary at or after it.

    Hence pieces whose offsets join cover each document of the file once, wherever the offsets fall.
    """

    path: str
    start: int
    end: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """A document, or what stands in place of one: then `problem` says why it is none."""

    line: int
    """Where it begins: 1 is the piece's first line."""
    text: str = ""
    problem: str = ""


def find_sources(inputs: Sequence[Path]) -> tuple[Source, ...]:
    """The files of `inputs`, in that order; a folder stands for all below it, by name, not hidden ones."""
    paths: list[Path] = []
    for path in inputs:
        if not path.exists():
            raise DataError(f"input {path} does not exist. Give files, or folders of files.")
        inner = (
            (p for p in path.rglob("*") if p.is_file() and not p.name.startswith("."))
            if path.is_dir()
            else [path]
        )
        paths += sorted(inner)
    if not paths:
        raise DataError(f"no file in {', '.join(map(str, inputs)) or 'the inputs (none given)'}.")
    return tuple(_source(path) for path in paths)


def _source(path: Path) -> Source:
    try:
        with open(path, "rb") as file:
            start = file.read(8)
    except OSError as error:
        raise DataError(f"input {path} cannot be read: {error.strerror}.") from error
    packed = next((name for magic, name in COMPRESSED.items() if start.startswith(magic)), None)
    if packed:
        raise DataError(f"input {path} is compressed ({packed}). Unpack it first.")
    facts = path.stat()
    return Source(path=str(path), num_bytes=facts.st_size, modified_ns=facts.st_mtime_ns)


def layout_kind(sources: Sequence[Source]) -> Literal["jsonl", "text"]:
    """What the files' endings say they hold; DataError when they say nothing, or different things."""
    kinds = {ENDINGS.get(Path(source.path).suffix.lower()) for source in sources}
    kind = kinds.pop()
    if kinds or kind is None:
        endings = sorted({Path(source.path).suffix for source in sources})
        raise DataError(
            f"the endings {endings} do not tell JSON lines from plain text. Say --format jsonl or text."
        )
    return kind


class PieceReader:
    """Iterating gives the piece's records in order; afterwards `num_lines` is how many lines it has."""

    def __init__(self, piece: Piece, layout: Layout) -> None:
        self.piece = piece
        self.layout = layout
        self.num_lines = 0

    def __iter__(self) -> Iterator[Record]:
        with open(self.piece.path, "rb") as file:
            if not self.layout.is_splittable:
                yield _text_record(file.read().removeprefix(BOM), line=1)
            elif self.layout.kind == "jsonl":
                for line in self._lines(file):
                    yield _json_record(line, key=self.layout.key, line=self.num_lines)
            else:
                yield from self._separated(self._lines(file))

    def _lines(self, file: BinaryIO) -> Iterator[bytes]:
        offset = self.piece.start
        if offset:
            file.seek(offset - 1)
            offset += len(file.readline()) - 1
        is_inside = self.piece.start == 0
        for line in file:
            is_boundary = self.layout.is_boundary(line)
            if offset >= self.piece.end and (is_boundary or not is_inside):
                return
            is_inside = is_inside or is_boundary
            if is_inside:
                self.num_lines += 1
                yield line.removeprefix(BOM) if offset == 0 else line
            offset += len(line)

    def _separated(self, lines: Iterator[bytes]) -> Iterator[Record]:
        document: list[bytes] = []
        first_line = 0
        for line in lines:
            if not self.layout.is_boundary(line):
                first_line = first_line if document else self.num_lines
                document.append(line)
            elif document:
                yield _text_record(b"".join(document).rstrip(b"\r\n"), line=first_line)
                document = []
        if document:
            yield _text_record(b"".join(document).rstrip(b"\r\n"), line=first_line)


def _text_record(content: bytes, *, line: int) -> Record:
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        return Record(line=line, problem=_not_utf8(error))
    return Record(line=line, text=text) if text.strip() else Record(line=line, problem="empty")


def _json_record(content: bytes, *, key: str, line: int) -> Record:
    if not content.strip():
        return Record(line=line, problem="empty line")
    try:
        entry = json.loads(content.decode())
    except UnicodeDecodeError as error:
        return Record(line=line, problem=_not_utf8(error))
    except (ValueError, RecursionError) as error:
        return Record(line=line, problem=f"not JSON ({error})")
    if not isinstance(entry, dict):
        return Record(line=line, problem=f"a JSON {type(entry).__name__}, not an object")
    if key not in entry:
        return Record(line=line, problem=f"no key {key!r} (keys: {', '.join(entry) or 'none'})")
    text = entry[key]
    if not isinstance(text, str):
        return Record(line=line, problem=f"{key!r} holds a {type(text).__name__}, not text")
    if not text.strip():
        return Record(line=line, problem=f"{key!r} is empty")
    try:
        text.encode()
    except UnicodeEncodeError:
        # JSON can spell half a surrogate pair ("\ud800"), which no tokenizer takes.
        return Record(line=line, problem=f"{key!r} holds a lone surrogate, which is not text")
    return Record(line=line, text=text)


def _not_utf8(error: UnicodeDecodeError) -> str:
    return f"not UTF-8 (byte 0x{error.object[error.start]:02x})"
