"""The bytes of a chunk, in blocks, and their checksums: bytes that move unchanged are read and run over once."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from mcore_rl.convert.copying.plan import Chunk
from mcore_rl.convert.copying.source import ByteRun, TensorSource, as_bytes
from mcore_rl.errors import CheckpointError
from mcore_rl.families.regions import RegionCopy, sizes
from mcore_rl.families.weight_map import Shape
from mcore_rl.storage.checksums import PartChecksum, crc32, joined

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
    """Return the CRC-32 of a run."""
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
