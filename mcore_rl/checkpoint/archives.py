"""The archives that `torch.save` writes: where their records are, and whether their bytes are those that were written.

Each record has a CRC-32, which torch itself does not compare when it loads.
"""

import io
import os
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

HEADER_BYTES = 30
"""Length of the header of a record, without its name."""
BLOCK_BYTES = 256 << 10
"""Bytes that are read at a time for a checksum: they stay in the processor's cache."""


class FileRange(NamedTuple):
    """The bytes start <= i < start + length of a file, as torch.save wrote them."""

    file: str
    start: int
    length: int


class SliceableBytes(Protocol):
    """Bytes that are read by slices."""

    def __len__(self) -> int: ...

    def __getitem__(self, asked: slice, /) -> bytes: ...


class FilePart:
    """`length` bytes of an open file from `start` on, read when they are sliced."""

    def __init__(self, descriptor: int, start: int, length: int) -> None:
        self._descriptor, self._start, self._length = descriptor, start, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, asked: slice, /) -> bytes:
        start, stop, _ = asked.indices(self._length)
        return os.pread(self._descriptor, max(0, stop - start), self._start + start)

    def crc32(self, start: int, size: int) -> int:
        """Return the CRC-32 of `size` bytes from `start` on, or of fewer where the file ends."""
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
class ArchiveRecord:
    """A file in an archive."""

    name: str
    start: int
    size: int
    crc: int
    """CRC-32 of its bytes; 0 where torch was asked to leave it out."""
    is_plain: bool
    """Whether it is not compressed."""


def archive_records(data: SliceableBytes) -> list[ArchiveRecord]:
    """Return the records of an archive; one of pickles.MALFORMED is raised when the bytes are none."""
    with zipfile.ZipFile(_ReadableFile(data)) as archive:
        return [
            ArchiveRecord(
                name=info.filename,
                start=_begin(data, info.header_offset),
                size=info.file_size,
                crc=info.CRC,
                is_plain=info.compress_type == zipfile.ZIP_STORED,
            )
            for info in archive.infolist()
        ]


def record_bytes(data: SliceableBytes, found: Sequence[ArchiveRecord], name: str) -> bytes:
    """Return the bytes of the record `*/name`; BadZipFile when there is none, or they are not what was written."""
    record = record_named(found, name)
    read = data[record.start : record.start + record.size]
    if not record.is_plain or len(read) != record.size or not _is_sound(record, zlib.crc32(read)):
        raise zipfile.BadZipFile(f"{record.name} is not what was written")
    return read


def record_named(found: Sequence[ArchiveRecord], name: str) -> ArchiveRecord:
    """Return the record `*/name`; BadZipFile when there is none. The folder in front is the archive's own name."""
    for record in found:
        if record.name.endswith(f"/{name}"):
            return record
    raise zipfile.BadZipFile(f"there is no {name}")


def damaged_record(data: FilePart) -> str | None:
    """Return the name of the first record whose bytes are not those that were written; None when all are."""
    for record in archive_records(data):
        if record.is_plain and not _is_sound(record, data.crc32(record.start, record.size)):
            return record.name
    return None


def _is_sound(record: ArchiveRecord, crc: int) -> bool:
    return record.crc in (0, crc)


def _begin(data: SliceableBytes, header: int) -> int:
    """Return where a record's bytes begin; its header can have another length than the directory says."""
    # Bytes 26 to 29 of the header: the lengths of the name and of a further field, two bytes each.
    lengths = data[header + 26 : header + HEADER_BYTES]
    name, extra = (int.from_bytes(lengths[at : at + 2], "little") for at in (0, 2))
    return header + HEADER_BYTES + name + extra


class _ReadableFile(io.RawIOBase):
    """Sliceable bytes as a file, for zipfile."""

    def __init__(self, data: SliceableBytes) -> None:
        self._data, self._position = data, 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move the position, as in any file."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: len(self._data)}[whence]
        self._position = max(0, base + offset)
        return self._position

    def tell(self) -> int:
        """Return the position."""
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        """Return the next `size` bytes, or all that are left."""
        left = max(0, len(self._data) - self._position)
        count = left if size is None or size < 0 else min(size, left)
        begin = self._position
        self._position += count
        return self._data[begin : begin + count]
