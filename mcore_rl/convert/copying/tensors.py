"""The tensors that a conversion writes, in chunks that fit in memory: their plan, their sources, and their bytes.

A process never holds more of a file than the region at hand.
"""

import itertools
import math
import mmap
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from mcore_rl.errors import CheckpointError
from mcore_rl.families.weight_map import AxisRange, Copies, Region, RegionCopy, Shape, listed, sizes, whole
from mcore_rl.storage.archives import FilePart
from mcore_rl.storage.checksums import PartChecksum, crc32, joined

OutputDtype = Literal["keep", "bf16", "fp32"]
OUTPUT_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
CHUNK_BYTES = 64 << 20
"""Largest size in bytes of a chunk, unless a row is larger. It affects the written bytes, so it is not a setting."""
NUMBERED = ""
"""Stands for files with a task each, which are named as torch names them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetTensor:
    """A tensor to write. Elements that no copy covers are zeros."""

    name: str
    shape: Shape
    dtype: torch.dtype
    copies: Copies

    @property
    def num_bytes(self) -> int:
        """Number of bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive elements of a target: some of its rows, each with all of its elements."""

    target: TargetTensor
    where: Region
    copies: tuple[RegionCopy, ...]
    """The copies that make it; their `into` is relative to the chunk."""

    @property
    def start(self) -> int:
        """Byte of the target at which the chunk begins."""
        position = 0
        for axis, size in zip(self.where, self.target.shape, strict=True):
            position = position * size + axis.start
        return position * self.target.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        """Number of bytes of its elements."""
        return math.prod(sizes(self.where)) * self.target.dtype.itemsize


@dataclass(frozen=True, slots=True)
class CopyTask:
    """Chunks that one worker writes to one file, and then records as done."""

    index: int
    file: str
    chunks: tuple[Chunk, ...]

    @property
    def num_bytes(self) -> int:
        """Number of bytes of all chunks."""
        return sum(chunk.num_bytes for chunk in self.chunks)


def chunks_of(target: TargetTensor, limit: int = CHUNK_BYTES) -> Iterator[Chunk]:
    """Yield the chunks of a target in the order of its elements, each of at most `limit` bytes or of one row."""
    # The last axis is never one to lead: a chunk would then be a single element.
    num_lead = max(0, min(target.copies.num_lead, len(target.shape) - 1))
    lead, shape = target.shape[:num_lead], target.shape[num_lead:]
    if not shape:
        yield chunk_at(target, ())
        return
    row_bytes = math.prod(shape[1:]) * target.dtype.itemsize
    count = max(1, limit // max(row_bytes, 1))
    for index in itertools.product(*map(range, lead)):
        front = tuple(AxisRange(i, i + 1) for i in index)
        for start in range(0, shape[0], count):
            rows = AxisRange(start, min(start + count, shape[0]))
            yield chunk_at(target, (*front, rows, *whole(shape[1:])))


def chunk_at(target: TargetTensor, where: Region) -> Chunk:
    """Return any region of a target as a chunk."""
    return Chunk(target, where, tuple(target.copies.within(where)))


def tasks_of(files: Mapping[str, Iterable[TargetTensor]], max_bytes: int) -> list[CopyTask]:
    """Group the chunks of all targets, in their order, into tasks of at most `max_bytes` or of one chunk.

    Args:
        files: The targets of each file; with `NUMBERED` for a name, every task has its own file.
        max_bytes: Most bytes of a task.
    """
    tasks: list[CopyTask] = []
    for file, targets in files.items():
        groups: list[list[Chunk]] = []
        group_bytes = 0
        for chunk in (chunk for target in targets for chunk in chunks_of(target)):
            if not groups or group_bytes + chunk.num_bytes > max_bytes:
                groups.append([])
                group_bytes = 0
            groups[-1].append(chunk)
            group_bytes += chunk.num_bytes
        for index, group in enumerate(groups, len(tasks)):
            tasks.append(CopyTask(index, file or f"__{index}_0.distcp", tuple(group)))
    return tasks


def common_dtype(name: str, dtypes: Mapping[str, torch.dtype]) -> torch.dtype:
    """Return the type that all sources of the target `name` have. Raises CheckpointError if they differ."""
    kinds = sorted({str(dtype) for dtype in dtypes.values()})
    if len(kinds) > 1:
        lines = [f"{source} is {dtype}" for source, dtype in sorted(dtypes.items())]
        raise CheckpointError(
            f"{name} would be made of tensors of the types {', '.join(kinds)}:\n{listed(lines, 6)}\n"
            "Choose one with --dtype bf16 or --dtype fp32."
        )
    return next(iter(dtypes.values()))


def output_dtype(
    name: str,
    copies: Sequence[RegionCopy],
    choice: OutputDtype,
    dtype_of: Callable[[str], torch.dtype],
    *,
    is_fp32: bool,
) -> torch.dtype:
    """Return the type of a target: fp32 where Megatron requires it, else the user's choice or its sources' type."""
    if is_fp32:
        return torch.float32
    if choice != "keep":
        return OUTPUT_DTYPES[choice]
    return common_dtype(name, {copy.source: dtype_of(copy.source) for copy in copies})


def digest(tasks: Sequence[CopyTask]) -> str:
    """Return the SHA-256 of everything in the tasks: equal digests give equal bytes from equal sources."""
    state = sha256()
    for task in tasks:
        state.update(f"{task.index} {task.file}\n".encode())
        for chunk in task.chunks:
            target = chunk.target
            state.update(f"{target.name} {target.shape} {target.dtype} {_plain(chunk.where)}\n".encode())
            for copy in chunk.copies:
                state.update(f" {_plain(copy.into)} {copy.source} {_plain(copy.where)} {copy.transposed}\n".encode())
    return state.hexdigest()


def _plain(where: Region) -> list[tuple[int, ...]]:
    """Return a region as plain tuples, so that a renamed class leaves the digest as it was."""
    return [tuple(axis) for axis in where]


class ByteRun(NamedTuple):
    """The bytes start <= i < start + size of a file, and their meaning."""

    file: str
    start: int
    size: int
    dtype: torch.dtype
    tensor_start: int | None
    """Byte of its tensor at which the run begins; None if the tensor itself is not contiguous in the file."""


class TensorSource(Protocol):
    """A checkpoint that has tensors by name; each worker opens its own."""

    def fill(self, out: Tensor, name: str, where: Region) -> None:
        """Copy a region to `out`, converting to its type; `out` has the region's sizes, but may lack axes of size 1."""

    def prefetch(self, name: str, where: Region) -> None:
        """Start reading a region from disk that will be needed soon."""

    def run(self, name: str, where: Region) -> ByteRun | None:
        """Return where a region is stored; None if its bytes are not contiguous."""

    def read(self, run: ByteRun, start: int, out: memoryview) -> None:
        """Fill `out` with the bytes of a run from its byte `start` on."""


class FileBytes:
    """Files of a folder, opened and mapped on first use."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, mmap.mmap] = {}
        self._descriptors: dict[str, int] = {}

    def __del__(self) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)

    def __getitem__(self, name: str) -> mmap.mmap:
        found = self._files.get(name)
        if found is None:
            found = self._files[name] = mmap.mmap(self._descriptor(name), 0, prot=mmap.PROT_READ)
        return found

    def read(self, name: str, start: int, out: memoryview) -> None:
        """Fill `out` with the bytes from `start` on."""
        # Read, not mapped: bytes that move unchanged then cost no page faults and are not counted as this process's.
        while out:
            count = os.preadv(self._descriptor(name), [out], start)
            if not count:
                raise CheckpointError(f"{self._folder / name} has become shorter. Take another copy.")
            out, start = out[count:], start + count

    def part(self, name: str, start: int, length: int) -> FilePart:
        """Return a range of a file without reading it yet."""
        return FilePart(self._descriptor(name), start, length)

    def prefetch(self, name: str, start: int, count: int) -> None:
        """Read these bytes in the background."""
        if count:
            os.posix_fadvise(self._descriptor(name), start, count, os.POSIX_FADV_WILLNEED)

    @contextmanager
    def bytes_of(self, name: str, start: int, count: int) -> Iterator[Tensor]:
        """Yield uint8 `[count]`, a view of the file; its pages are given back on leaving."""
        mapped = self[name]
        if not count:
            yield torch.empty(0, dtype=torch.uint8)
            return
        # madvise wants the start of a page; the pages at both ends are shared with neighbours, and are read again.
        page = start // mmap.PAGESIZE * mmap.PAGESIZE
        self.prefetch(name, start, count)
        yield _view(mapped, start, count)
        # Without this, pages that were read once stay in this process's memory and count against --max-ram.
        mapped.madvise(mmap.MADV_DONTNEED, page, start + count - page)

    def _descriptor(self, name: str) -> int:
        found = self._descriptors.get(name)
        if found is None:
            found = self._descriptors[name] = os.open(self._folder / name, os.O_RDONLY)
        return found


def as_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor; no copy is made if it is contiguous."""
    flat = tensor.reshape(-1) if tensor.is_contiguous() else tensor.contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def _view(mapped: mmap.mmap, start: int, count: int) -> Tensor:
    with warnings.catch_warnings():
        # The file is opened for reading only, and nothing writes to the view.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(mapped, dtype=torch.uint8, offset=start, count=count)


BLOCK_BYTES = 512 << 10
"""Small enough that a block is still in the processor's cache when it is written."""


class ScratchMemory:
    """Memory for one chunk after another: new pages for each would cost as much as the copy."""

    def __init__(self) -> None:
        self._memory = bytearray()

    def tensor(self, shape: Shape, dtype: torch.dtype) -> Tensor:
        """Return an uninitialized tensor with a storage no larger than itself; the previous tensor becomes invalid."""
        count = math.prod(shape)
        if len(self._memory) < count * dtype.itemsize:
            self._memory = bytearray(count * dtype.itemsize)
        if not count:
            # frombuffer refuses a count of zero.
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self._memory, dtype=dtype, count=count).view(shape)


class ChunkBytes:
    """A chunk's bytes. Once all are taken it has their CRC-32, and the checksums of the bytes that made them."""

    crc: int
    sources: tuple[tuple[str, PartChecksum], ...]
    """Name of a source tensor and the checksum of a part of it, where that part is one run."""

    def __init__(self, chunk: Chunk, source: TensorSource, scratch: ScratchMemory) -> None:
        self.chunk = chunk
        self._source = source
        self._scratch = scratch

    def blocks(self) -> Iterator[memoryview]:
        """Yield all bytes in order; a block becomes invalid when the next is requested."""
        runs = _runs_as_stored(self.chunk, self._source)
        if runs is None:
            yield self._computed()
            return
        parts: list[PartChecksum] = []
        sources: list[tuple[str, PartChecksum]] = []
        for copy, run in runs:
            crc = 0
            for start in range(0, run.size, BLOCK_BYTES):
                elements = self._scratch.tensor((min(BLOCK_BYTES, run.size - start),), torch.uint8)
                block = as_bytes(elements)
                self._source.read(run, start, block)
                refuse_not_finite(elements.view(run.dtype), self.chunk, self._source)
                crc = crc32(block, crc)
                yield block
            parts.append(PartChecksum(sum(part.size for part in parts), run.size, crc))
            if run.tensor_start is not None:
                # The bytes are unchanged, so output and source have the same checksum.
                sources.append((copy.source, PartChecksum(run.tensor_start, run.size, crc)))
        crc_of_all = joined(parts, self.chunk.num_bytes)
        assert crc_of_all is not None
        self.crc, self.sources = crc_of_all, tuple(sources)

    def _computed(self) -> memoryview:
        """Return the bytes of a chunk that is cast, dequantized, or put together from strided regions."""
        elements = fill(self.chunk, self._source, self._scratch)
        refuse_not_finite(elements, self.chunk, self._source)
        data = as_bytes(elements)
        runs = ((copy.source, self._source.run(copy.source, copy.where)) for copy in self.chunk.copies)
        self.sources = tuple(
            (name, PartChecksum(run.tensor_start, run.size, _checksum(self._source, run)))
            for name, run in runs
            if run is not None and run.tensor_start is not None
        )
        self.crc = crc32(data)
        return data


@torch.no_grad()
def fill(chunk: Chunk, source: TensorSource, scratch: ScratchMemory | None = None) -> Tensor:
    """Return the elements of a chunk; `scratch` gives the memory, so that the result lives until its next use."""
    elements = (scratch or ScratchMemory()).tensor(sizes(chunk.where), chunk.target.dtype)
    # Zeros only where no copy writes, such as in the padding of the vocabulary.
    if sum(math.prod(sizes(copy.into)) for copy in chunk.copies) < elements.numel():
        elements.zero_()
    for copy in chunk.copies:
        out = elements[tuple(slice(*axis) for axis in copy.into)]
        source.fill(out.mT if copy.transposed else out, copy.source, copy.where)
    return elements


def is_finite(elements: Tensor) -> bool:
    """Return whether no element is infinite or NaN; elements of a byte pass, because their scales do not."""
    if not elements.is_floating_point() or elements.element_size() == 1:
        return True
    # A sum costs a tenth of looking at each, and is finite only if each is; of many large ones it may be infinite too.
    return bool(elements.sum().isfinite()) or bool(elements.isfinite().all())


def refuse_not_finite(elements: Tensor, chunk: Chunk, source: TensorSource) -> None:
    """Raise a CheckpointError where elements of a chunk are infinite or NaN, with the tensor that they come from."""
    if is_finite(elements):
        return
    name, count, largest = chunk.target.name, int((~elements.isfinite()).sum()), math.nan
    for copy in chunk.copies:
        exact = torch.empty(sizes(copy.where), dtype=torch.float64)
        source.fill(exact, copy.source, copy.where)
        if faults := int((~exact.to(elements.dtype).isfinite()).sum()):
            name, count, largest = copy.source, faults, float(exact.abs().max())
            break
    raise CheckpointError(
        f"{name} has {count} values that are infinite or NaN as {elements.dtype}: a model computes nothing with them. "
        + (
            f"The largest is {largest:.6g}: choose a type that holds it, --dtype fp32."
            if math.isfinite(largest)
            else "Take another copy of the weights, or an earlier checkpoint."
        )
    )


def _checksum(source: TensorSource, run: ByteRun) -> int:
    block, crc = memoryview(bytearray(BLOCK_BYTES)), 0
    for start in range(0, run.size, BLOCK_BYTES):
        source.read(run, start, part := block[: run.size - start])
        crc = crc32(part, crc)
    return crc


def _runs_as_stored(chunk: Chunk, source: TensorSource) -> list[tuple[RegionCopy, ByteRun]] | None:
    """Return the runs that a chunk consists of, in order; None unless it only copies bytes unchanged."""
    # A tensor without memory, only to find where each copy's elements would be.
    like = torch.empty(sizes(chunk.where), dtype=chunk.target.dtype, device="meta")
    found: list[tuple[int, RegionCopy, ByteRun]] = []
    for copy in chunk.copies:
        out = like[tuple(slice(*axis) for axis in copy.into)]
        run = None if copy.transposed or not out.is_contiguous() else source.run(copy.source, copy.where)
        if run is None or run.dtype != like.dtype:
            return None
        found.append((int(out.storage_offset()) * like.element_size(), copy, run))
    found.sort(key=lambda entry: entry[0])
    end = 0
    for start, _, run in found:
        # A gap would have to be filled with zeros.
        if start != end:
            return None
        end += run.size
    return [(copy, run) for _, copy, run in found] if end == chunk.num_bytes else None
