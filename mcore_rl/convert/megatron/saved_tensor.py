"""A tensor in the file format of `torch.save`: found without reading its elements, and written block by block.

The format is a zip archive: `data.pkl` describes the tensor, `data/0` has its elements. Torch's own functions do not
serve: loading needs torch's unpickler and the whole tensor in memory, and saving runs over it once more for a
checksum that a conversion has already.
"""

import io
import math
import os
import pickle
import struct
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._utils import _rebuild_tensor_v2

from mcore_rl.convert.copying.content import ChunkBytes
from mcore_rl.errors import CheckpointError
from mcore_rl.families.regions import sizes
from mcore_rl.families.weight_map import Shape
from mcore_rl.storage.checksums import crc32
from mcore_rl.storage.foreign.archives import (
    HEADER_BYTES,
    SliceableBytes,
    archive_records,
    record_bytes,
    record_named,
)
from mcore_rl.storage.foreign.pickles import MALFORMED, PLAIN, AllowListUnpickler

STORAGES = {
    "FloatStorage": torch.float32,
    "DoubleStorage": torch.float64,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
"""Classes by which torch names the type of a storage."""
STORAGE_NAMES = {dtype: name for name, dtype in STORAGES.items()}
ALIGNMENT = 64
"""Elements begin at a multiple of this number of bytes from the start of the archive, as in torch's archives."""
PADDING = b"FB"
"""Marks the zip field used only for alignment, as torch marks it."""
ZIP_VERSION, ZIP_DATE = 20, 0x21
"""Version 2.0 of the zip format; 1 January 1980, so that the same tensor gives the same bytes."""
MAX_ARCHIVE_BYTES = 2**32 - 1
"""Largest size in bytes of an archive in the plain zip format, which has 32-bit offsets."""


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """The elements of a saved tensor: a strided view of a run of bytes."""

    start: int
    """Byte of the file at which the storage begins."""
    num_bytes: int
    """Number of bytes of the storage."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    storage_offset: int
    """Index in the storage of the tensor's first element."""


def find_tensor(data: SliceableBytes, start: int, what: str) -> SavedTensor:
    """Find the tensor that is saved in `data`.

    Args:
        data: The archive.
        start: Byte of the file at which the archive begins.
        what: What the archive should be, for messages.

    Raises:
        CheckpointError: The bytes are no archive, or hold something else than a plain tensor.
    """
    try:
        return _find(data, start)
    except MALFORMED as error:
        raise CheckpointError(f"{what} is not a saved tensor ({type(error).__name__}: {error}).") from error


def save(file: io.FileIO, content: ChunkBytes) -> None:
    """Append a chunk to a file, with the bytes that `torch.save` would write."""
    target, shape = content.chunk.target, sizes(content.chunk.where)
    small = {"data.pkl": _pickled(shape, target.dtype), "byteorder": b"little", "version": b"3\n"}
    front = b""
    records = []
    for name, data in small.items():
        records.append(_RecordHeader(b"archive/" + name.encode(), len(front), len(data), crc32(data)))
        front += records[-1].header() + data
    elements = _RecordHeader(b"archive/data/0", len(front), content.chunk.num_bytes, 0).aligned()
    start = file.tell()
    _write(file, front + elements.header())
    for block in content.blocks():
        _write(file, block)
    elements = replace(elements, crc=content.crc)
    _write(file, _directory([*records, elements], file.tell() - start))
    # The checksum is known only now: the header before the elements, which has it too, is written once more.
    os.pwrite(file.fileno(), elements.header(), start + elements.offset)


def _find(data: SliceableBytes, start: int) -> SavedTensor:
    records = archive_records(data)
    has_byteorder = any(record.name.partition("/")[2] == "byteorder" for record in records)
    if has_byteorder and record_bytes(data, records, "byteorder") != b"little":
        raise ValueError("its bytes are in big-endian order")
    allowed = PLAIN | {
        ("torch._utils", "_rebuild_tensor_v2"): _RebuildArguments,
        ("torch._utils", "_rebuild_parameter"): lambda data, *_: data,
        **{("torch", name): dtype for name, dtype in STORAGES.items()},
    }
    saved = AllowListUnpickler(io.BytesIO(record_bytes(data, records, "data.pkl")), allowed).load()
    if not isinstance(saved, _RebuildArguments):
        raise ValueError(f"it holds a {type(saved).__name__}")
    _, dtype, key, _, numel = saved.storage
    if not isinstance(dtype, torch.dtype):
        raise ValueError("it has a storage without a type")
    record = record_named(records, f"data/{key}")
    if not record.is_plain:
        raise ValueError("it is compressed")
    last = saved.storage_offset + sum((n - 1) * s for n, s in zip(saved.shape, saved.stride, strict=True))
    size = numel * dtype.itemsize
    # A view beyond its storage would read other tensors' bytes, or crash.
    if record.size < size or (math.prod(saved.shape) and not 0 <= last < numel):
        raise ValueError("its storage is shorter than its shape")
    return SavedTensor(
        start=start + record.start,
        num_bytes=size,
        dtype=dtype,
        shape=saved.shape,
        stride=saved.stride,
        storage_offset=saved.storage_offset,
    )


class _RebuildArguments:
    """The arguments with which torch would rebuild a tensor."""

    def __init__(
        self, storage: Any, offset: int, shape: tuple[int, ...], stride: tuple[int, ...], *_: Any
    ) -> None:
        self.storage, self.storage_offset = storage, int(offset)
        self.shape, self.stride = tuple(map(int, shape)), tuple(map(int, stride))


@dataclass(frozen=True, slots=True)
class _RecordHeader:
    """A record to be written: its headers before its bytes and in the directory."""

    name: bytes
    offset: int
    """Byte of the archive at which its header begins."""
    size: int
    crc: int
    extra: bytes = b""

    def aligned(self) -> "_RecordHeader":
        """Return the same record, padded so that its bytes begin at a multiple of ALIGNMENT."""
        # 4: the mark and the length of the padding itself.
        before = self.offset + HEADER_BYTES + len(self.name) + 4
        count = -before % ALIGNMENT
        return replace(self, extra=PADDING + struct.pack("<H", count) + bytes(count))

    def header(self) -> bytes:
        """Return the header that precedes the bytes."""
        return b"PK\3\4" + self._common_fields() + self.name + self.extra

    def directory_entry(self) -> bytes:
        """Return the entry in the directory at the archive's end."""
        place = struct.pack("<3H2L", 0, 0, 0, 0, self.offset)
        return (
            b"PK\1\2"
            + struct.pack("<H", ZIP_VERSION)
            + self._common_fields()
            + place
            + self.name
            + self.extra
        )

    def _common_fields(self) -> bytes:
        """Return the fields that both headers share. The size appears twice, because nothing is compressed."""
        lengths = self.crc, self.size, self.size, len(self.name), len(self.extra)
        return struct.pack("<5H3L2H", ZIP_VERSION, 0, 0, 0, ZIP_DATE, *lengths)


def _directory(records: Sequence[_RecordHeader], position: int) -> bytes:
    """Return the directory of an archive's records, which begins at byte `position`, and the archive's end."""
    assert position <= MAX_ARCHIVE_BYTES, f"{position} bytes of one chunk"
    entries = b"".join(record.directory_entry() for record in records)
    return entries + struct.pack(
        "<4s4H2LH", b"PK\5\6", 0, 0, len(records), len(records), len(entries), position, 0
    )


def _pickled(shape: Shape, dtype: torch.dtype) -> bytes:
    """Return `data.pkl`: how the tensor is made of its elements."""
    file = io.BytesIO()
    _TensorPickler(file, protocol=2).dump(_TensorToPickle(shape, dtype))
    return file.getvalue()


class _StorageToPickle:
    """Placeholder for the storage of a tensor."""

    def __init__(self, count: int, dtype: torch.dtype) -> None:
        self.count, self.dtype = count, dtype


class _TensorToPickle:
    """Pickles as a contiguous tensor does."""

    def __init__(self, shape: Shape, dtype: torch.dtype) -> None:
        self._like = torch.empty(shape, dtype=dtype, device="meta")

    def __reduce__(self) -> tuple[Any, ...]:
        storage = _StorageToPickle(self._like.numel(), self._like.dtype)
        shape, stride = tuple(self._like.shape), self._like.stride()
        return _rebuild_tensor_v2, (storage, 0, shape, stride, False, OrderedDict())


class _TensorPickler(pickle.Pickler):
    """Names a storage by the record that has its elements, as torch does."""

    def persistent_id(self, obj: Any) -> Any:
        """Return torch's reference to a storage; None for other objects, which are pickled as they are."""
        if isinstance(obj, _StorageToPickle):
            return "storage", getattr(torch, STORAGE_NAMES[obj.dtype]), "0", "cpu", obj.count
        return None


def _write(file: io.FileIO, data: bytes | memoryview) -> None:
    """Write all of `data`: one call of the system may write less."""
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]
