"""Tensors in the files of Megatron checkpoints: found, read, with adapters added to them, and saved."""

import io
import math
import os
import pickle
import struct
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._utils import _rebuild_tensor_v2

from mcore_rl.config.model import ModelConfig
from mcore_rl.config.optim import LoraConfig
from mcore_rl.convert.copying.tensors import ByteRun, ChunkBytes, FileBytes, as_bytes
from mcore_rl.convert.megatron.folder import DistFolder, DistPart
from mcore_rl.errors import CheckpointError
from mcore_rl.families.rules import Rows, packed_rows
from mcore_rl.families.weight_map import AxisRange, Region, Shape, sizes
from mcore_rl.storage import archives
from mcore_rl.storage.checkpoint import ADAPTER
from mcore_rl.storage.checksums import crc32
from mcore_rl.storage.folders import lora_of
from mcore_rl.storage.foreign import PLAIN, AllowListUnpickler

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
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    storage_offset: int


def find_tensor(data: archives.SliceableBytes, start: int, what: str) -> SavedTensor:
    """Find the tensor saved in `data`, an archive at byte `start`; CheckpointError for anything else."""
    try:
        return _find(data, start)
    except archives.MALFORMED as error:
        raise CheckpointError(f"{what} is not a saved tensor ({type(error).__name__}: {error}).") from error


def save(file: io.FileIO, content: ChunkBytes) -> None:
    """Append a chunk to a file, with the bytes that `torch.save` would write."""
    pickled = io.BytesIO()
    _TensorPickler(pickled, protocol=2).dump(_TensorToPickle(sizes(content.chunk.where), content.chunk.target.dtype))
    small = {"data.pkl": pickled.getvalue(), "byteorder": b"little", "version": b"3\n"}
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
    position, count = file.tell() - start, len(records) + 1
    assert position <= MAX_ARCHIVE_BYTES, f"{position} bytes of one chunk"
    directory = b"".join(record.directory_entry() for record in (*records, elements))
    _write(file, directory + struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, count, count, len(directory), position, 0))
    # The checksum is known only now: the header before the elements, which has it too, is written once more.
    os.pwrite(file.fileno(), elements.header(), start + elements.offset)


def _find(data: archives.SliceableBytes, start: int) -> SavedTensor:
    records = archives.archive_records(data)
    has_byteorder = any(record.name.partition("/")[2] == "byteorder" for record in records)
    if has_byteorder and archives.record_bytes(data, records, "byteorder") != b"little":
        raise ValueError("its bytes are in big-endian order")
    allowed = PLAIN | {
        ("torch._utils", "_rebuild_tensor_v2"): _RebuildArguments,
        ("torch._utils", "_rebuild_parameter"): lambda data, *_: data,
        **{("torch", name): dtype for name, dtype in STORAGES.items()},
    }
    saved = AllowListUnpickler(io.BytesIO(archives.record_bytes(data, records, "data.pkl")), allowed).load()
    if not isinstance(saved, _RebuildArguments):
        raise ValueError(f"it holds a {type(saved).__name__}")
    _, dtype, key, _, numel = saved.storage
    if not isinstance(dtype, torch.dtype):
        raise ValueError("it has a storage without a type")
    record = archives.record_named(records, f"data/{key}")
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
    def __init__(self, storage: Any, offset: int, shape: tuple[int, ...], stride: tuple[int, ...], *_: Any) -> None:
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
        before = self.offset + archives.HEADER_BYTES + len(self.name) + 4
        count = -before % ALIGNMENT
        return replace(self, extra=PADDING + struct.pack("<H", count) + bytes(count))

    def header(self) -> bytes:
        return b"PK\3\4" + self._common_fields() + self.name + self.extra

    def directory_entry(self) -> bytes:
        place = struct.pack("<3H2L", 0, 0, 0, 0, self.offset)
        return b"PK\1\2" + struct.pack("<H", ZIP_VERSION) + self._common_fields() + place + self.name + self.extra

    def _common_fields(self) -> bytes:
        """Return the fields that both headers share. The size appears twice, because nothing is compressed."""
        lengths = self.crc, self.size, self.size, len(self.name), len(self.extra)
        return struct.pack("<5H3L2H", ZIP_VERSION, 0, 0, 0, ZIP_DATE, *lengths)


class _StorageToPickle:
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
        if isinstance(obj, _StorageToPickle):
            return "storage", getattr(torch, STORAGE_NAMES[obj.dtype]), "0", "cpu", obj.count
        return None


def _write(file: io.FileIO, data: bytes | memoryview) -> None:
    """Write all of `data`: one call of the system may write less."""
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]


MAX_PREFETCH_BYTES = 64 << 20


class DistSource:
    """Tensors of a Megatron checkpoint on any mesh; each part is compared with its checksum before it is used."""

    def __init__(self, folder: DistFolder) -> None:
        self._tensors = folder.tensors
        self._files = FileBytes(folder.path)
        self._path = folder.path
        self._parts: dict[str, dict[AxisRange, list[DistPart]]] = {}
        self._saved: dict[archives.FileRange, SavedTensor] = {}

    def fill(self, out: Tensor, name: str, where: Region) -> None:
        region_out = out.view(sizes(where))
        for part, common in self._overlapping(name, where):
            part_out = _region_of(region_out, common, where)
            run = self._run_of_part(name, part, common)
            if run is not None and run.dtype == out.dtype and part_out.is_contiguous():
                self._files.read(run.file, run.start, as_bytes(part_out))
                continue
            saved = self._saved_tensor(name, part)
            with self._files.bytes_of(part.saved.file, saved.start, saved.num_bytes) as raw:
                tensor = raw.view(saved.dtype).as_strided(saved.shape, saved.stride, saved.storage_offset)
                part_out.copy_(_region_of(tensor, common, part.where))
                # No view of the mapped file may outlive the block.
                del tensor, raw

    def prefetch(self, name: str, where: Region) -> None:
        for part, common in self._overlapping(name, where):
            saved = part.saved
            # Before the archive is first opened, the elements' position inside it is unknown.
            run = self._run_of_part(name, part, common) if saved in self._saved else None
            start, size = (run.start, run.size) if run else (saved.start, saved.length)
            self._files.prefetch(saved.file, start, min(size, MAX_PREFETCH_BYTES))

    def run(self, name: str, where: Region) -> ByteRun | None:
        overlapping = list(self._overlapping(name, where))
        if len(overlapping) != 1 or overlapping[0][1] != where:
            return None
        return self._run_of_part(name, *overlapping[0])

    def read(self, run: ByteRun, start: int, out: memoryview) -> None:
        self._files.read(run.file, run.start + start, out)

    def object_bytes(self, key: str, saved: archives.FileRange) -> bytes:
        """Return the bytes of an object as torch.save wrote them; CheckpointError when they are damaged."""
        archives.check_part(self._path, key, saved)
        return self._files.part(saved.file, saved.start, saved.length)[:]

    def _overlapping(self, name: str, where: Region) -> Iterator[tuple[DistPart, Region]]:
        # By their first axis, as a stacked tensor has thousands of parts.
        by_axis = self._parts.get(name)
        if by_axis is None:
            by_axis = self._parts[name] = {}
            for part in self._tensors[name].parts:
                by_axis.setdefault(part.where[0] if part.where else AxisRange(0, 1), []).append(part)
        for axis, parts in by_axis.items():
            if where and not (axis.start < where[0].stop and where[0].start < axis.stop):
                continue
            for part in parts:
                spans = zip(where, part.where, strict=True)
                common = tuple(AxisRange(max(a.start, b.start), min(a.stop, b.stop)) for a, b in spans)
                if all(span.start < span.stop for span in common):
                    yield part, common

    def _run_of_part(self, name: str, part: DistPart, common: Region) -> ByteRun | None:
        saved = self._saved_tensor(name, part)
        wanted = _region_of(torch.empty_strided(saved.shape, saved.stride, device="meta"), common, part.where)
        if not wanted.is_contiguous():
            return None
        first = saved.storage_offset + int(wanted.storage_offset())
        start, size = (count * saved.dtype.itemsize for count in (first, wanted.numel()))
        return ByteRun(part.saved.file, saved.start + start, size, saved.dtype, None)

    def _saved_tensor(self, name: str, part: DistPart) -> SavedTensor:
        saved = self._saved.get(part.saved)
        if saved is None:
            archives.check_part(self._path, name, part.saved)
            what = f"{name} in {self._path / part.saved.file}"
            archive = self._files.part(*part.saved)
            saved = self._saved[part.saved] = find_tensor(archive, part.saved.start, what)
        if saved.shape != sizes(part.where):
            raise CheckpointError(
                f"{self._path / part.saved.file}: {name} has shape {saved.shape} there, {sizes(part.where)} in "
                ".metadata. Take another copy."
            )
        return saved


def _region_of(tensor: Tensor, where: Region, origin: Region) -> Tensor:
    """Return the region `where` of a whole tensor; `tensor` is the whole tensor's region `origin`."""
    return tensor[tuple(slice(a.start - b.start, a.stop - b.start) for a, b in zip(where, origin, strict=True))]


WEIGHT = "weight"
"""Key suffix of a weight with an adapter; the keys of A and B end in "adapter.A" and "adapter.B" instead."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredAdapter:
    """The adapter of a weight in a checkpoint, or of a tensor with the weights of all layers or experts."""

    key_a: str
    key_b: str
    rank: int
    num_inputs: int
    num_blocks: int
    """Number of row blocks of A: one per projection, or 1 if all projections share a block."""
    scale: float
    projection_of_row: tuple[int, ...]
    """Index of the projection that each row of B belongs to."""

    def block(self, projection: int) -> AxisRange:
        """Return the rows of A for a projection."""
        index = projection if self.num_blocks > 1 else 0
        return AxisRange(index * self.rank, (index + 1) * self.rank)


def stored_lora(folder: DistFolder) -> LoraConfig | None:
    """Return the section `lora` of a checkpoint's run, None without adapters; CheckpointError if it lacks."""
    if not any(ADAPTER in key for key in folder.weights):
        return None
    lora = lora_of(folder.marker)
    if not lora.is_on:
        raise CheckpointError(
            f"{folder.path} has low-rank adapters, as the reference policy of a run, and does not say their scale. "
            "Name a checkpoint of that run."
        )
    return lora


def stored_adapters(folder: DistFolder, lora: LoraConfig, model: ModelConfig) -> dict[str, StoredAdapter]:
    """Return the adapters by the keys of their weights."""
    found = {}
    for key_a in folder.weights:
        if not key_a.endswith(f"{ADAPTER}A"):
            continue
        module = key_a.removesuffix("adapter.A")
        *_, rows_a, num_inputs = folder.tensors[key_a].shape
        *_, num_rows, rank = folder.tensors[f"{module}adapter.B"].shape
        rows = packed_rows(module.rstrip(".").rpartition(".")[2], num_rows, model)
        found[module + WEIGHT] = adapter_of(module, rank, num_inputs, rows, rows_a // rank, lora)
    return found


def adapter_of(module: str, rank: int, num_inputs: int, rows: Rows, num_blocks: int, lora: LoraConfig) -> StoredAdapter:
    """Return the adapter of `module`, whose name ends in a dot."""
    group = [index for index, size in enumerate(rows.sizes) for _ in range(size)]
    return StoredAdapter(
        key_a=f"{module}adapter.A",
        key_b=f"{module}adapter.B",
        rank=rank,
        num_inputs=num_inputs,
        num_blocks=num_blocks,
        scale=lora.scale_of(rank),
        projection_of_row=tuple(group * rows.groups),
    )


class MergedSource(DistSource):
    """Tensors of a checkpoint with the adapters added to the weights, in fp32, and rounded once."""

    def __init__(self, folder: DistFolder, adapters: Mapping[str, StoredAdapter]) -> None:
        super().__init__(folder)
        self._adapters = adapters

    def run(self, name: str, where: Region) -> ByteRun | None:
        return None if name in self._adapters else super().run(name, where)

    def fill(self, out: Tensor, name: str, where: Region) -> None:
        if name not in self._adapters:
            super().fill(out, name, where)
            return
        weight, product = self.parts(name, where)
        out.copy_((weight + product).view(out.shape))

    def parts(self, name: str, where: Region) -> tuple[Tensor, Tensor]:
        """Return a region of a weight without its adapter, and of scale * B A, both fp32."""
        adapter = self._adapters[name]
        *lead, rows, columns = where
        weight = torch.empty(sizes(where))
        super().fill(weight, name, where)
        all_rows = AxisRange(0, adapter.num_blocks * adapter.rank)
        weight_a = self._read(adapter.key_a, (*lead, all_rows, columns))
        weight_b = self._read(adapter.key_b, (*lead, rows, AxisRange(0, adapter.rank)))
        projections = torch.tensor(adapter.projection_of_row[rows.start : rows.stop])
        product = torch.empty_like(weight)
        for projection in projections.unique().tolist():
            chosen = projections == projection
            block = adapter.block(projection)
            product[..., chosen, :] = weight_b[..., chosen, :] @ weight_a[..., block.start : block.stop, :]
        return weight, adapter.scale * product

    def notes(self, dtype: torch.dtype | None) -> Iterator[str]:
        """Yield, by kind of matrix, its adapter's size and the loss from rounding to `dtype` (None: its own)."""
        seen = set()
        for key, adapter in sorted(self._adapters.items()):
            kind = key.split(".layers.", 1)[1].lstrip("0123456789.")
            if kind in seen:
                continue
            seen.add(kind)
            stored = self._tensors[key]
            one, matrix = AxisRange(0, 1), (len(adapter.projection_of_row), adapter.num_inputs)
            where = (*(one,) * (len(stored.shape) - 2), *(AxisRange(0, size) for size in matrix))
            weight, product = self.parts(key, where)
            loss = (weight + product).to(dtype or stored.dtype).float() - weight - product
            lost = _rms(loss) / _rms(product) if product.any() else 0.0
            yield (
                f"{key}: the adapter of the first matrix is {_rms(product) / _rms(weight):.2g} of it (rms), and "
                f"rounding loses {lost:.2%} of the adapter"
            )

    def _read(self, key: str, where: Region) -> Tensor:
        found = torch.empty(sizes(where))
        super().fill(found, key, where)
        return found


def _rms(tensor: Tensor) -> float:
    return math.sqrt(tensor.double().square().mean().item())
