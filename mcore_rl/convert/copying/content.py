"""The bytes of a chunk, in blocks, and their checksums: what is moved unchanged is read and run over once."""

import math
import zlib
from collections.abc import Iterator

import torch
from torch import Tensor

from mcore_rl.convert.copying.checksums import Part, as_bytes, joined
from mcore_rl.convert.copying.plan import Chunk, Pair
from mcore_rl.convert.copying.sources import Run, Source, sizes
from mcore_rl.families.weight_map import Shape

BLOCK_BYTES = 512 << 10
"""Small enough to be in a processor's cache still when it is written."""


class Scratch:
    """Memory for one chunk after another: fresh pages for each would cost as much as the copy."""

    def __init__(self) -> None:
        self._memory = bytearray()

    def tensor(self, shape: Shape, dtype: torch.dtype) -> Tensor:
        """A tensor of anything, whose storage is no larger than itself; the one before must not be used any more."""
        count = math.prod(shape)
        if len(self._memory) < count * dtype.itemsize:
            self._memory = bytearray(count * dtype.itemsize)
        if not count:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self._memory, dtype=dtype, count=count).view(shape)


class Content:
    """A chunk's bytes. When all were taken it has their CRC-32, and those of the bytes that they were made of."""

    crc: int
    sources: tuple[tuple[str, Part], ...]

    def __init__(self, chunk: Chunk, source: Source, scratch: Scratch) -> None:
        self.chunk = chunk
        self._source = source
        self._scratch = scratch

    def blocks(self) -> Iterator[memoryview]:
        """All bytes in order; a block is gone when the next is asked for."""
        runs = _as_stored(self.chunk, self._source)
        if runs is None:
            yield self._made()
            return
        own: list[Part] = []
        sources: list[tuple[str, Part]] = []
        for pair, run in runs:
            crc = 0
            for start in range(0, run.size, BLOCK_BYTES):
                block = as_bytes(self._scratch.tensor((min(BLOCK_BYTES, run.size - start),), torch.uint8))
                self._source.read(run, start, block)
                crc = zlib.crc32(block, crc)
                yield block
            own.append(Part(sum(part.size for part in own), run.size, crc))
            if run.row_start is not None:
                sources.append((pair.source, Part(run.row_start, run.size, crc)))
        whole = joined(own, self.chunk.num_bytes)
        assert whole is not None
        self.crc, self.sources = whole, tuple(sources)

    def _made(self) -> memoryview:
        made = as_bytes(fill(self.chunk, self._source, self._scratch))
        runs = ((pair.source, self._source.run(pair.source, pair.where)) for pair in self.chunk.pairs)
        self.sources = tuple(
            (name, Part(run.row_start, run.size, self._source.checksum(run)))
            for name, run in runs
            if run is not None and run.row_start is not None
        )
        self.crc = zlib.crc32(made)
        return made


@torch.no_grad()
def fill(chunk: Chunk, source: Source, scratch: Scratch | None = None) -> Tensor:
    """The elements of a chunk."""
    made = (scratch or Scratch()).tensor(sizes(chunk.where), chunk.target.dtype)
    if sum(math.prod(sizes(pair.into)) for pair in chunk.pairs) < made.numel():
        made.zero_()
    for pair in chunk.pairs:
        out = made[tuple(slice(*span) for span in pair.into)]
        source.fill(out.mT if pair.transposed else out, pair.source, pair.where)
    return made


def _as_stored(chunk: Chunk, source: Source) -> list[tuple[Pair, Run]] | None:
    """The runs that a chunk is made of, one after another; None when it is more than bytes moved unchanged."""
    like = torch.empty(sizes(chunk.where), dtype=chunk.target.dtype, device="meta")
    found: list[tuple[int, Pair, Run]] = []
    for pair in chunk.pairs:
        out = like[tuple(slice(*span) for span in pair.into)]
        run = None if pair.transposed or not out.is_contiguous() else source.run(pair.source, pair.where)
        if run is None or run.dtype != like.dtype:
            return None
        found.append((int(out.storage_offset()) * like.element_size(), pair, run))
    found.sort(key=lambda entry: entry[0])
    end = 0
    for start, _, run in found:
        if start != end:
            return None
        end += run.size
    return [(pair, run) for _, pair, run in found] if end == chunk.num_bytes else None
