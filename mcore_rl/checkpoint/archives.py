"""What `torch.save` writes, as an archive: where its records are, and whether they are what was written.

Each record has a CRC-32, at which torch itself does not look when it loads.
"""

import io
import os
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

HEADER_BYTES = 30
"""Of a record, before its name."""
BLOCK_BYTES = 256 << 10
"""That are read at a time for a checksum: they stay in the processor's cache."""


class Sliced(Protocol):
    """A run of bytes that is read by slices."""

    def __len__(self) -> int: ...

    def __getitem__(self, asked: slice, /) -> bytes: ...


class FilePart:
    """So many bytes of an open file from `start` on, read when they are sliced."""

    def __init__(self, descriptor: int, start: int, length: int) -> None:
        self._descriptor, self._start, self._length = descriptor, start, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, asked: slice, /) -> bytes:
        start, stop, _ = asked.indices(self._length)
        return os.pread(self._descriptor, max(0, stop - start), self._start + start)

    def crc32(self, start: int, size: int) -> int:
        """Of so many bytes, or of fewer where the file has ended."""
        block = memoryview(bytearray(min(size, BLOCK_BYTES)))
        crc = done = 0
        while done < size:
            wanted = block[: min(BLOCK_BYTES, size - done)]
            count = os.preadv(self._descriptor, [wanted], self._start + start + done)
            if not count:
                break
            crc = zlib.crc32(block[:count], crc)
            done += count
        return crc


@dataclass(frozen=True, slots=True)
class Record:
    """A file in an archive."""

    name: str
    start: int
    size: int
    crc: int
    """0: torch was told to leave it out."""
    is_plain: bool
    """Not compressed."""


def records(data: Sliced) -> list[Record]:
    """What is in an archive; MALFORMED when it is none."""
    with zipfile.ZipFile(_Window(data)) as archive:
        return [
            Record(
                name=info.filename,
                start=_begin(data, info.header_offset),
                size=info.file_size,
                crc=info.CRC,
                is_plain=info.compress_type == zipfile.ZIP_STORED,
            )
            for info in archive.infolist()
        ]


def content(data: Sliced, found: Sequence[Record], name: str) -> bytes:
    """The bytes of the record whose name ends so; MALFORMED when there is none, or they are not what was written."""
    record = find(found, name)
    read = data[record.start : record.start + record.size]
    if not record.is_plain or len(read) != record.size or not _is_sound(record, zlib.crc32(read)):
        raise zipfile.BadZipFile(f"{record.name} is not what was written")
    return read


def find(found: Sequence[Record], name: str) -> Record:
    """The record whose name ends so; MALFORMED when there is none."""
    for record in found:
        if record.name.endswith(f"/{name}"):
            return record
    raise zipfile.BadZipFile(f"there is no {name}")


def damaged(data: FilePart) -> str | None:
    """The first record whose bytes are not those that were written; None: all are."""
    for record in records(data):
        if record.is_plain and not _is_sound(record, data.crc32(record.start, record.size)):
            return record.name
    return None


def _is_sound(record: Record, crc: int) -> bool:
    return record.crc in (0, crc)


def _begin(data: Sliced, header: int) -> int:
    """Where a record's bytes begin: its own header can have another length than the list at the end says."""
    lengths = data[header + 26 : header + HEADER_BYTES]
    name, extra = (int.from_bytes(lengths[at : at + 2], "little") for at in (0, 2))
    return header + HEADER_BYTES + name + extra


class _Window(io.RawIOBase):
    """A run of bytes as a file."""

    def __init__(self, data: Sliced) -> None:
        self._data, self._position = data, 0

    def readable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """Yes."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """As of any file."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: len(self._data)}[whence]
        self._position = max(0, base + offset)
        return self._position

    def tell(self) -> int:
        """As of any file."""
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        """As of any file."""
        left = max(0, len(self._data) - self._position)
        count = left if size is None or size < 0 else min(size, left)
        begin = self._position
        self._position += count
        return self._data[begin : begin + count]
