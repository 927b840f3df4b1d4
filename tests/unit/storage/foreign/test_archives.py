"""The archives that are accepted are those in which torch reads the very bytes that are checked."""

import io
import random
import struct
import zipfile
import zlib
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rl.errors import CheckpointError
from mcore_rl.storage.archives import (
    RECORDED_BYTES,
    FilePart,
    FileRange,
    archive_records,
    damaged_record,
    record_bytes,
    recorded_crc32,
)
from mcore_rl.storage.foreign import load_saved, refuse_programs

NUM_ARCHIVES = 10_000
NAMES = (
    *("archive/data.pkl", "archive/x/data.pkl", "archive//data.pkl", "archive/DATA.PKL", "archive/data.pkl\0x"),
    *("other/data.pkl", "archive/../data.pkl", "data.pkl", "/data.pkl", "archive/", "archive/.data/version"),
    *("archive/version", "archive/constants.pkl", "archive/data/0", "archive/byteorder", "archive\\data.pkl"),
    *("Archive/data.pkl", "archive/data.pkl/", "archive/\u00e9", "archive/" + "d" * 510 + "data.pkl", ""),
)


@dataclass(frozen=True, kw_only=True)
class Record:
    """A record of an archive that is to be written, as its headers describe it."""

    name: bytes
    content: bytes
    flags: int = 0
    method: int = zipfile.ZIP_STORED
    size_change: int = 0
    """What the directory's size is more than the length."""
    offset_change: int = 0
    """What the directory's offset is more than the true one."""
    local_extra: bytes = b""
    extra: bytes = b""
    attributes: int = 0
    comment: bytes = b""
    is_64_bits: bool = False
    """Whether size and offset stand in the further field of 64-bit numbers."""


@dataclass(frozen=True, kw_only=True)
class Archive:
    """An archive that is to be written."""

    records: tuple[Record, ...]
    before: bytes = b""
    between: bytes = b""
    """Bytes between the directory and the end."""
    behind: bytes = b""
    comment: bytes = b""
    count_change: int = 0
    size_change: int = 0
    offset_change: int = 0
    is_64_bits: bool = False
    locator_change: int = 0
    counts_front: bool = True
    """Whether offsets count the bytes before."""

    def write(self) -> bytes:
        """Return the archive's bytes."""
        data, directory = self.before, b""
        front = 0 if self.counts_front else len(self.before)
        for record in self.records:
            offset = len(data) - front + record.offset_change
            crc, length = zlib.crc32(record.content), len(record.content)
            common = struct.pack("<5HL", 20, record.flags, record.method, 0, 0x21, crc)
            data += b"PK\3\4" + common + struct.pack("<2L", length, length)
            data += struct.pack("<2H", len(record.name), len(record.local_extra))
            data += record.name + record.local_extra + record.content
            size, extra = (length + record.size_change) % 2**32, record.extra
            if record.is_64_bits:
                extra += struct.pack("<2H3Q", 1, 24, size, size, offset % 2**64)
                size = offset = 2**32 - 1
            directory += b"PK\1\2\x14\0" + common + struct.pack("<2L", size, size)
            directory += struct.pack("<3H", len(record.name), len(extra), len(record.comment))
            directory += (
                struct.pack("<2H2L", 0, 0, record.attributes, offset % 2**32) + record.name + extra + record.comment
            )
        start = (len(data) - front + self.offset_change) % 2**32
        count, size = len(self.records) + self.count_change, (len(directory) + self.size_change) % 2**32
        data += directory + self.between
        if self.is_64_bits:
            end = len(data) + self.locator_change
            data += b"PK\6\6" + struct.pack("<Q2H2L4Q", 44, 20, 20, 0, 0, count, count, size, start)
            data += b"PK\6\7" + struct.pack("<LQL", 0, end % 2**64, 1)
            # The fields of 32 bits then count for nobody: they describe another directory.
            count, size, start = count - 1, size, (start + 46) % 2**32
        end_record = struct.pack("<4H2LH", 0, 0, count % 2**16, count % 2**16, size, start, len(self.comment))
        return data + b"PK\5\6" + end_record + self.comment + self.behind


def random_record(rng: random.Random, name: str) -> Record:
    record = Record(name=name.encode(), content=rng.randbytes(rng.randrange(24)))
    if rng.random() < 0.85:
        return record
    changes: dict[str, Any] = {
        "flags": rng.choice((1, 8, 0x800, 0x808, 0x2000)),
        "method": rng.choice((8, 99)),
        "size_change": rng.choice((-1, 1, 1000)),
        "offset_change": rng.choice((-30, -1, 1, 1 << 20)),
        "local_extra": b"FB" + struct.pack("<H", 3) + bytes(3),
        "extra": rng.choice((b"FB\0\0", b"FB\xff\0", struct.pack("<2HQ", 1, 8, 4), b"up\x05\0\1abcd")),
        "attributes": rng.choice((0x10, 0o600 << 16)),
        "comment": b"PK\1\2",
        "is_64_bits": True,
    }
    field = rng.choice([*changes])
    return replace(record, **{field: changes[field]})


def random_archive(rng: random.Random) -> bytes:
    """Return an archive as torch writes it, but for what chance changes: often nothing, one thing or two."""
    names = ["archive/data.pkl", "archive/version", "archive/data/0", *rng.choices(NAMES, k=rng.choice((0, 0, 1, 2)))]
    rng.shuffle(names)
    records = tuple(random_record(rng, name) for name in names)
    records = tuple(replace(r, content=b"3\n") if r.name == b"archive/version" else r for r in records)
    inner = b"PK\5\6" + struct.pack("<4H2LH", 0, 0, 1, 1, 50, 0, 0)
    changes: dict[str, Any] = {
        "before": rng.choice((b"\0", b"PK\3\4" + bytes(26), Archive(records=records[:2]).write())),
        "between": rng.choice((b"\0", inner, b"PK\6\7" + bytes(16))),
        "behind": rng.choice((b"\0", inner, Archive(records=records[1:]).write())),
        "comment": rng.choice((b"c", inner, b"c" * 100)),
        "count_change": rng.choice((-1, 1)),
        "size_change": rng.choice((-46, -1, 1, 46)),
        "offset_change": rng.choice((-30, -1, 1)),
        "is_64_bits": True,
        "counts_front": False,
    }
    chosen = rng.sample([*changes], k=rng.choice((0, 0, 0, 1, 2)))
    if "is_64_bits" in chosen and rng.random() < 0.5:
        changes["locator_change"], chosen = rng.choice((-56, -1, 1)), [*chosen, "locator_change"]
    data = Archive(records=records, **{field: changes[field] for field in chosen}).write()
    if rng.random() < 0.2:
        flipped = bytearray(data)
        flipped[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        data = bytes(flipped)
    return data


def bytes_of_torch(data: bytes) -> bytes | None:
    """Return the bytes that `torch.load` unpickles first; None where it reads no archive."""
    if not torch.serialization._is_zipfile(io.BytesIO(data)):
        return data
    try:
        reader = torch._C.PyTorchFileReader(io.BytesIO(data))
        if torch.serialization._is_torchscript_zip(reader):
            return reader.get_record("constants.pkl")
        return reader.get_record("data.pkl")
    except (RuntimeError, UnicodeDecodeError):  # the latter where torch's message names a record
        return None


def bytes_of_the_check(data: bytes) -> bytes | None:
    """Return the bytes that are checked; None where the archive is refused."""
    try:
        return record_bytes(data, archive_records(data), "data.pkl")
    except zipfile.BadZipFile:
        return None


@pytest.mark.full
def test_what_the_check_accepts_of_random_archives_is_what_torch_loads() -> None:
    rng = random.Random(7)
    outcomes: Counter[tuple[bool, bool]] = Counter()
    for _ in range(NUM_ARCHIVES):
        data = random_archive(rng)
        checked, loaded = bytes_of_the_check(data), bytes_of_torch(data)
        assert checked is None or loaded in (checked, None), (checked, loaded, data)
        outcomes[checked is not None, loaded is not None] += 1
    # Neither side of the comparison is empty, and the archives that only torch would load are many.
    assert outcomes[True, True] > NUM_ARCHIVES // 10, outcomes
    assert outcomes[False, True] > NUM_ARCHIVES // 10, outcomes
    assert outcomes[True, False] < NUM_ARCHIVES // 20, outcomes


def saved(content: object) -> bytes:
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


@pytest.mark.parametrize(
    "content",
    [{}, [torch.arange(5), torch.ones(3, dtype=torch.bfloat16)], {"state": random.Random(1).getstate(), "set": {1, 2}}],
    ids=["empty", "tensors", "random state"],
)
def test_what_torch_saves_is_accepted_and_loaded(content: Any) -> None:
    refuse_programs(saved(content), "a file")
    assert repr(load_saved(saved(content), "a file")) == repr(content)


def large(record: Record) -> bytes:
    return Archive(records=(record, Record(name=b"archive/version", content=b"3\n")), is_64_bits=True).write()


def test_sizes_and_offsets_of_64_bits_are_read() -> None:
    data = large(Record(name=b"archive/data.pkl", content=b"N.", is_64_bits=True))
    assert bytes_of_the_check(data) == bytes_of_torch(data) == b"N."


class Program:
    """Creates a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = str(file)

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (self.file, "w")


def test_nothing_is_run_even_where_the_check_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mcore_rl.storage.foreign.refuse_programs", lambda data, what: None)
    with pytest.raises(CheckpointError, match=r"an entry: a pickle asks for _?io\.open, which could be any program"):
        load_saved(saved(Program(tmp_path / "ran")), "an entry")
    assert not (tmp_path / "ran").exists()


def test_the_checksum_of_a_file_follows_from_those_of_its_archives(tmp_path: Path) -> None:
    """Large records are not read for it; whether they are sound is seen by reading them."""
    file, places, data = tmp_path / "__0_0.distcp", [], b"a beginning"
    for elements in (10, RECORDED_BYTES, 3 * RECORDED_BYTES):
        saved = io.BytesIO()
        torch.save(torch.randint(255, (elements,), dtype=torch.uint8), saved)
        places.append(FileRange(file.name, len(data), len(saved.getvalue())))
        data += saved.getvalue() + b"between"
    file.write_bytes(data)
    crc = f"{zlib.crc32(data):08x}"
    assert recorded_crc32(file, places) == recorded_crc32(file, ()) == crc
    # Overlapping archives add up to more than the file, which is then read.
    assert recorded_crc32(file, [*places, places[-1]]) == crc

    flipped = bytearray(data)
    flipped[places[2].start + 2 * RECORDED_BYTES] ^= 1
    file.write_bytes(flipped)
    assert recorded_crc32(file, places) == crc
    with file.open("rb") as opened:
        found = [damaged_record(FilePart(opened.fileno(), place.start, place.length)) for place in places]
    assert found == [None, None, "archive/data/0"]

    for at in (3, places[0].start + places[0].length // 2, len(data) - 1):
        flipped = bytearray(data)
        flipped[at] ^= 1
        file.write_bytes(flipped)
        assert recorded_crc32(file, places) == f"{zlib.crc32(flipped):08x}" != crc
