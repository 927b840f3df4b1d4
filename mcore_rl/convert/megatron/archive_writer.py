"""The file that `torch.save` makes of a tensor, whose bytes come in blocks and bring their CRC-32 with them.

`torch.save` needs the whole tensor, and runs over it for a checksum that a conversion has already.
"""

import io
import os
import pickle
import struct
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._utils import _rebuild_tensor_v2

from mcore_rl.checkpoint.archive_reader import STORAGES
from mcore_rl.checkpoint.archives import HEADER_BYTES
from mcore_rl.convert.copying.content import Content
from mcore_rl.convert.copying.sources import sizes
from mcore_rl.families.weight_map import Shape

NAMES = {dtype: name for name, dtype in STORAGES.items()}
ALIGNMENT = 64
"""Of the elements, counted from the start of the archive; torch has the same."""
PADDING = b"FB"
"""Marks what is there for the alignment alone, as torch marks it."""
VERSION, DATE = 20, 0x21
"""Of the zip format; 1 January 1980, so that the same tensor gives the same bytes."""
MOST_BYTES = 2**32 - 1
"""Of an archive in the plain zip format."""


def save(file: io.FileIO, content: Content) -> None:
    """Append a chunk to a file, as `torch.save` would do it."""
    target, shape = content.chunk.target, sizes(content.chunk.where)
    small = {"data.pkl": _pickled(shape, target.dtype), "byteorder": b"little", "version": b"3\n"}
    front = b""
    records = []
    for name, data in small.items():
        records.append(_Record(b"archive/" + name.encode(), len(front), len(data), zlib.crc32(data)))
        front += records[-1].header() + data
    elements = _Record(b"archive/data/0", len(front), content.chunk.num_bytes, 0).aligned()
    start = file.tell()
    _write(file, front + elements.header())
    for block in content.blocks():
        _write(file, block)
    elements = replace(elements, crc=content.crc)
    _write(file, _end([*records, elements], file.tell() - start))
    os.pwrite(file.fileno(), elements.header(), start + elements.offset)


@dataclass(frozen=True, slots=True)
class _Record:
    """A file in the archive."""

    name: bytes
    offset: int
    size: int
    crc: int
    extra: bytes = b""

    def aligned(self) -> "_Record":
        """The same with so much before its bytes that they are aligned."""
        before = self.offset + HEADER_BYTES + len(self.name) + 4
        count = -before % ALIGNMENT
        return replace(self, extra=PADDING + struct.pack("<H", count) + bytes(count))

    def header(self) -> bytes:
        """Before the bytes."""
        return b"PK\3\4" + self._facts() + self.name + self.extra

    def entry(self) -> bytes:
        """In the list at the end."""
        place = struct.pack("<3H2L", 0, 0, 0, 0, self.offset)
        return b"PK\1\2" + struct.pack("<H", VERSION) + self._facts() + place + self.name + self.extra

    def _facts(self) -> bytes:
        """Stored as it is, in so many bytes."""
        sizes = self.crc, self.size, self.size, len(self.name), len(self.extra)
        return struct.pack("<5H3L2H", VERSION, 0, 0, 0, DATE, *sizes)


def _end(records: Sequence[_Record], position: int) -> bytes:
    """The list of an archive's files, which begins at `position`."""
    assert position <= MOST_BYTES, f"{position} bytes of one chunk"
    entries = b"".join(record.entry() for record in records)
    return entries + struct.pack(
        "<4s4H2LH", b"PK\5\6", 0, 0, len(records), len(records), len(entries), position, 0
    )


def _pickled(shape: Shape, dtype: torch.dtype) -> bytes:
    """What says how the tensor is made of the elements."""
    file = io.BytesIO()
    _Pickler(file, protocol=2).dump(_Tensor(shape, dtype))
    return file.getvalue()


class _Elements:
    """Stands for the storage of a tensor."""

    def __init__(self, count: int, dtype: torch.dtype) -> None:
        self.count, self.dtype = count, dtype


class _Tensor:
    """Is pickled as a contiguous tensor is."""

    def __init__(self, shape: Shape, dtype: torch.dtype) -> None:
        self._like = torch.empty(shape, dtype=dtype, device="meta")

    def __reduce__(self) -> tuple[Any, ...]:
        elements = _Elements(self._like.numel(), self._like.dtype)
        shape, stride = tuple(self._like.shape), self._like.stride()
        return _rebuild_tensor_v2, (elements, 0, shape, stride, False, OrderedDict())


class _Pickler(pickle.Pickler):
    """Names the elements by the record that has them."""

    def persistent_id(self, obj: Any) -> Any:
        """As torch does it."""
        if isinstance(obj, _Elements):
            return "storage", getattr(torch, NAMES[obj.dtype]), "0", "cpu", obj.count
        return None


def _write(file: io.FileIO, data: bytes | memoryview) -> None:
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]
