"""The files of a checkpoint without torch: the archives that `torch.save` writes, checked by their checksums.

Each record of an archive has a CRC-32, which torch itself does not compare when it loads. The directory is not read by
`zipfile`, which finds different records than torch in some files: the checked bytes must be the loaded bytes.
"""

import os
import pickle
import struct
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from mcore_rl.errors import CheckpointError, DamagedCheckpointError
from mcore_rl.storage.checkpoint import COMMON, FORMAT_FILE, METADATA, Marker, others
from mcore_rl.storage.checksums import BLOCK_BYTES, PartChecksum, as_hex, crc32, crc32_of, joined

RECORD_MARK = b"PK\3\4"
HEADER_BYTES = 30
"""Length of the header of a record, without its name."""
ENTRY = struct.Struct("<4s6H3L5H2L")
"""Fixed part of a record's entry in the directory."""
EXTRA = struct.Struct("<2H")
"""Kind and length of each of an entry's further fields."""
END, LOCATOR_64, END_64 = struct.Struct("<4s4H2LH"), struct.Struct("<4sLQL"), struct.Struct("<4sQ2H2L4Q")
"""ZIP signatures: end of central directory, Zip64 locator, Zip64 end record."""
IN_64_BITS = 2**32 - 1
"""Value of a field if its number is in the entry's further field of KIND_64_BITS."""
KIND_64_BITS = 1
HAS_SIZES_BEHIND, HAS_UTF8_NAME = 0x8, 0x800
"""Flags of an entry that torch's writer sets."""
IS_DIRECTORY = 0x10
"""Attribute of MS-DOS, which all writers use, that marks a directory."""
MAX_NAME_BYTES = 500
"""Longest name of a record: torch cuts names at 512 bytes."""
TORCHSCRIPT_RECORD = "constants.pkl"
"""Record by which torch knows a TorchScript program, which it would load in place of the pickle."""
RECORDED_BYTES = 64 << 10
"""Records larger than this are not read for the checksum of a file: the archive's checksum is used."""


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
        """Return the CRC-32 of `size` bytes from `start` on, or of fewer at the end of the file."""
        block = memoryview(bytearray(min(size, BLOCK_BYTES)))
        crc = done = 0
        while done < size:
            wanted = block[: min(BLOCK_BYTES, size - done)]
            count = os.preadv(self._descriptor, [wanted], self._start + start + done)
            if not count:
                break
            crc = crc32(block[:count], crc)
            done += count
        return crc


@dataclass(frozen=True, slots=True)
class ArchiveRecord:
    """A file in an archive."""

    name: str
    start: int
    size: int
    crc: int
    """CRC-32 of its bytes; 0 if torch was asked to leave it out."""
    is_plain: bool
    """True if the record is stored uncompressed."""


def archive_records(data: SliceableBytes) -> list[ArchiveRecord]:
    """Return the records of an archive in the order of its directory, all in the first record's folder. An archive that
    torch could read otherwise is refused (zipfile.BadZipFile): it must begin with a record, end with the directory, and
    have plain ASCII names that differ in more than case.
    """
    if data[: len(RECORD_MARK)] != RECORD_MARK:
        raise zipfile.BadZipFile("it does not begin as an archive of torch.save does")
    start, size, count = _directory(data)
    directory = data[start : start + size]
    records = []
    position = 0
    while position < len(directory):
        record, position = _record(data, directory, position)
        records.append(record)
    if position != size or len(records) != count or not records:
        raise zipfile.BadZipFile(f"its directory has {len(records)} records, {count} are announced")
    folder = f"{records[0].name.partition('/')[0]}/"
    for record in records:
        if not record.name.startswith(folder):
            raise zipfile.BadZipFile(f"{record.name} is not in the folder {folder} of the first record")
    if len({record.name.lower() for record in records}) < len(records):
        raise zipfile.BadZipFile("two of its records have one name")
    if any(record.name == f"{folder}{TORCHSCRIPT_RECORD}" for record in records):
        raise zipfile.BadZipFile("it is a TorchScript program")
    return records


def record_bytes(data: SliceableBytes, found: Sequence[ArchiveRecord], name: str) -> bytes:
    """Return the bytes of the record `name`; BadZipFile if there is none, or they have changed."""
    record = record_named(found, name)
    read = data[record.start : record.start + record.size]
    if not record.is_plain or len(read) != record.size or not _is_sound(record, crc32(read)):
        raise zipfile.BadZipFile(f"{record.name} is not what was written")
    return read


def record_named(found: Sequence[ArchiveRecord], name: str) -> ArchiveRecord:
    """Return the record `name` of the folder that all records share; BadZipFile if there is none."""
    wanted = f"{found[0].name.partition('/')[0]}/{name}"
    for record in found:
        if record.name == wanted:
            return record
    raise zipfile.BadZipFile(f"there is no {name}")


def damaged_record(data: FilePart) -> str | None:
    """Return the name of the first record with bytes that have changed since they were written; None if none have."""
    for record in archive_records(data):
        if record.is_plain and not _is_sound(record, data.crc32(record.start, record.size)):
            return record.name
    return None


def recorded_crc32(file: Path, archives: Iterable[FileRange]) -> str:
    """Return the CRC-32 of a file in hexadecimal, with the recorded one of large records in `archives`."""
    with file.open("rb") as opened:
        size = os.fstat(opened.fileno()).st_size
        whole = FilePart(opened.fileno(), 0, size)
        large: list[PartChecksum] = []
        for archive in archives:
            if archive.length <= RECORDED_BYTES:
                continue  # so is none of its records
            try:
                records = archive_records(FilePart(opened.fileno(), archive.start, archive.length))
            except zipfile.BadZipFile:
                continue
            large += [
                PartChecksum(archive.start + record.start, record.size, record.crc)
                for record in records
                if record.is_plain and record.crc and record.size > RECORDED_BYTES
            ]
        parts: list[PartChecksum] = []
        position = 0
        for part in [*sorted(large), PartChecksum(size, 0, 0)]:
            if not position <= part.start <= size - part.size:
                # Archives overlap or end beyond the file, which no writer does: the file's own bytes count.
                return as_hex(whole.crc32(0, size))
            between = part.start - position
            parts += [PartChecksum(position, between, whole.crc32(position, between)), part]
            position = part.start + part.size
        crc = joined(parts, size)
        assert crc is not None, f"{parts} do not make up {size} bytes"
        return as_hex(crc)


def _is_sound(record: ArchiveRecord, crc: int) -> bool:
    return record.crc in (0, crc)


def _directory(data: SliceableBytes) -> tuple[int, int, int]:
    """Return the first byte, the length in bytes and the number of records of the directory at the archive's end."""
    end = len(data) - END.size
    mark, *disks, count_here, count, size, start, comment_length = _unpack(END, data, end)
    if mark != b"PK\5\6" or comment_length:
        raise zipfile.BadZipFile("it does not end as an archive of torch.save does")
    locator = end - LOCATOR_64.size
    if data[max(locator, 0) : max(locator, 0) + 4] == b"PK\6\7":
        # More or larger than 32 bits hold: these fields then count, and torch finds them where the locator says.
        _, disk, end_64, num_disks = _unpack(LOCATOR_64, data, locator)
        end = locator - END_64.size
        mark, _, _, _, *disks, count_here, count, size, start = _unpack(END_64, data, end)
        if mark != b"PK\6\6" or end_64 != end or disk or num_disks != 1:
            raise zipfile.BadZipFile("its end is not where it says")
    if any(disks) or count_here != count or start + size != end:
        raise zipfile.BadZipFile("its directory is not at its end")
    return start, size, count


def _record(data: SliceableBytes, directory: bytes, position: int) -> tuple[ArchiveRecord, int]:
    mark, _, _, flags, method, _, _, *numbers = _unpack(ENTRY, directory, position)
    crc, stored_size, size, name_length, extra_length, comment_length, disk, _, attributes, header = numbers
    begin_extra = position + ENTRY.size + name_length
    encoded = directory[position + ENTRY.size : begin_extra]
    extra = directory[begin_extra : begin_extra + extra_length]
    if mark != b"PK\1\2" or comment_length or len(extra) != extra_length:
        raise zipfile.BadZipFile("its directory is not what was written")
    # A name cut at a zero byte, cut at 512 bytes or decoded differently would be a different name to another reader.
    if not encoded.isascii() or not encoded.decode("ascii").isprintable() or len(encoded) > MAX_NAME_BYTES:
        raise zipfile.BadZipFile(f"a record has the name {encoded[:MAX_NAME_BYTES]!r}")
    name = encoded.decode("ascii")
    if flags & ~(HAS_SIZES_BEHIND | HAS_UTF8_NAME) or disk:
        raise zipfile.BadZipFile(f"{name} is encrypted or in another file")
    # For a directory torch reads no bytes, and returns whatever was in the memory.
    if attributes & IS_DIRECTORY:
        raise zipfile.BadZipFile(f"{name} is a directory")
    size, stored_size, header = _in_64_bits(name, (size, stored_size, header), extra)
    if method == zipfile.ZIP_STORED and stored_size != size:
        raise zipfile.BadZipFile(f"{name} has two sizes")
    before = data[header : header + HEADER_BYTES]
    if len(before) != HEADER_BYTES or before[: len(RECORD_MARK)] != RECORD_MARK:
        raise zipfile.BadZipFile(f"{name} is not where the directory says")
    # Bytes 26 to 29 of the header before the record: the lengths of the name and of a further field. The further field
    # can have another length than the directory says, as it aligns the record.
    begin = header + HEADER_BYTES + sum(struct.unpack_from("<2H", before, 26))
    return (
        ArchiveRecord(name=name, start=begin, size=size, crc=crc, is_plain=method == zipfile.ZIP_STORED),
        begin_extra + extra_length,
    )


def _in_64_bits(name: str, fields: Sequence[int], extra: bytes) -> list[int]:
    """Return a record's fields; fields that do not fit into 32 bits are taken from its field of 64-bit numbers."""
    wanted = [field for field in fields if field == IN_64_BITS]
    position = num_found = 0
    large: tuple[int, ...] = ()
    while position < len(extra):
        kind, length = _unpack(EXTRA, extra, position)
        value = extra[position + EXTRA.size : position + EXTRA.size + length]
        if kind == KIND_64_BITS and len(value) == length == 8 * len(wanted):
            large = struct.unpack(f"<{len(wanted)}Q", value)
            num_found += 1
        elif kind == KIND_64_BITS or len(value) != length:
            raise zipfile.BadZipFile(f"the size of {name} is not what was written")
        position += EXTRA.size + length
    if num_found > 1 or len(large) != len(wanted):
        raise zipfile.BadZipFile(f"the size of {name} is not what was written")
    left = iter(large)
    return [next(left) if field == IN_64_BITS else field for field in fields]


def _unpack(form: struct.Struct, data: SliceableBytes, start: int) -> tuple[Any, ...]:
    found = data[start : start + form.size] if start >= 0 else b""
    if len(found) != form.size:
        raise zipfile.BadZipFile("it is shorter than an archive")
    return form.unpack(found)


MALFORMED = (
    *(zipfile.BadZipFile, NotImplementedError, pickle.UnpicklingError, EOFError),
    *(AttributeError, IndexError, KeyError, TypeError, ValueError, OverflowError),
    # Crafted bytes: values within values without end, and sizes beyond all memory.
    *(RecursionError, MemoryError),
)
DESCRIPTIONS = (METADATA, COMMON, FORMAT_FILE)
"""Small files that describe the large ones' content."""
UNREADABLE = (OSError, RuntimeError, *MALFORMED)


def check_descriptions(path: Path, marker: Marker) -> None:
    """Raise a DamagedCheckpointError when a small file that describes other files has changed since it was written."""
    for name in DESCRIPTIONS:
        if name in marker.crc32 and crc32_of(path / name) != marker.crc32[name]:
            raise DamagedCheckpointError(
                f"{path / name} is damaged: its bytes are not those that were written. {others(path)}"
            )


def check_identity(path: Path, marker: Marker, name: str, archives: Iterable[FileRange]) -> None:
    """Raise a DamagedCheckpointError unless `name` is the marker's file; `check_part` reads large records."""
    if name not in marker.crc32:
        return
    try:
        is_written = recorded_crc32(path / name, archives) == marker.crc32[name]
    except UNREADABLE:
        is_written = False
    if not is_written:
        raise DamagedCheckpointError(
            f"{path / name} is not the file that was written with {path.name}: it is damaged, or of another step. "
            f"{others(path)}"
        )


def check_part(path: Path, key: str, part: FileRange) -> None:
    """Raise a DamagedCheckpointError when the bytes of a tensor's or object's part are not those that were written."""
    with (path / part.file).open("rb") as file:
        try:
            record = damaged_record(FilePart(file.fileno(), part.start, part.length))
        except UNREADABLE as error:
            record = str(error)
    if record is not None:
        raise DamagedCheckpointError(
            f"{path / part.file} is damaged: the bytes of {key} are not those that were written ({record}). "
            f"{others(path)}"
        )


def file_sizes(path: Path, parts: Iterable[Any]) -> dict[str, int]:
    """Return the number of bytes of each file in `.metadata`; CheckpointError if one is missing, or ends too soon."""
    ends: dict[str, int] = {}
    for info in parts:
        ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
    sizes = {}
    for name, end in sorted(ends.items()):
        sizes[name] = (path / name).stat().st_size if (path / name).is_file() else 0
        if sizes[name] < end:
            raise CheckpointError(
                f"{path} is damaged: {name} has {sizes[name]} bytes, {end} are in use. {others(path)}"
            )
    return sizes
