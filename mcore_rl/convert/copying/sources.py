"""Rectangles of stored tensors: a process never holds more of a file than the rectangle at hand."""

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from mcore_rl.checkpoint.archive_reader import Saved, find_tensor
from mcore_rl.convert.copying.checksums import as_bytes
from mcore_rl.convert.copying.file_bytes import FileBytes
from mcore_rl.convert.hf import mxfp4
from mcore_rl.convert.hf.folder import HfFolder, Stored
from mcore_rl.convert.megatron.folder import DistFolder, Place, Rectangle
from mcore_rl.errors import CheckpointError
from mcore_rl.families.weight_map import AxisRange, Region, Shape

FP8 = (torch.float8_e4m3fn,)
SCALE = "_scale_inv"
"""`X.weight_scale_inv` holds the scales of the fp8 blocks of `X.weight`."""
MOST_AHEAD_BYTES = 64 << 20
"""Of a part, that is read before it is asked for."""
BAND_BLOCKS = 8
"""Rows of fp8 blocks that are dequantised at a time."""


class Run(NamedTuple):
    """Bytes start <= i < start + size of a file, and what they are."""

    file: str
    start: int
    size: int
    dtype: torch.dtype
    row_start: int | None
    """Where in its tensor it begins, of a tensor that is one run itself."""


class Source(Protocol):
    """Something that has tensors by name."""

    def fill(self, out: Tensor, name: str, where: Region) -> None:
        """Copy a rectangle to `out`, which has its sizes but for axes of size 1, in `out`'s dtype."""

    def prefetch(self, name: str, where: Region) -> None:
        """Let the disk begin to read a rectangle that will be asked for soon."""

    def run(self, name: str, where: Region) -> Run | None:
        """Where a rectangle is, as it is stored; None when its bytes do not lie in one run."""

    def read(self, run: Run, start: int, out: memoryview) -> None:
        """Fill `out` with the bytes of a run from its byte `start` on."""

    def checksum(self, run: Run) -> int:
        """The CRC-32 of a run."""


class HfSource:
    """Tensors of a Hugging Face folder; fp8 and mxfp4 ones with their scales are read as what they stand for."""

    def __init__(self, folder: HfFolder, block: int = 128) -> None:
        self._tensors = folder.tensors
        self._files = FileBytes(folder.path)
        self._block = block
        self._packed = mxfp4.packed(folder.tensors)

    def fill(self, out: Tensor, name: str, where: Region) -> None:
        """See Source."""
        if name in self._packed:
            self._unpack(out, name, where)
            return
        stored = self._tensors[name]
        run = self.run(name, where)
        if run is not None and stored.dtype == out.dtype and out.is_contiguous():
            self._files.read(run.file, run.start, as_bytes(out))
            return
        start, count = _rows(stored, where)
        with self._files.bytes_of(stored.file, start, count) as raw:
            rows = (where[0].stop - where[0].start, *stored.shape[1:]) if where else ()
            tensor = raw.view(stored.dtype).view(rows)
            if stored.dtype in FP8 and out.dtype not in FP8:
                tensor = self._dequantised(tensor, name, where[0].start, out.dtype)
            inside = (
                tuple(slice(*span) for span in ((0, rows[0], where[0].step), *where[1:])) if where else ()
            )
            out.copy_(tensor[inside].view(out.shape))
            del tensor, raw

    def prefetch(self, name: str, where: Region) -> None:
        """See Source."""
        if name in self._packed:
            name, where = name + mxfp4.BLOCKS, where[:1]
        stored = self._tensors[name]
        self._files.prefetch(stored.file, *_rows(stored, where))

    def run(self, name: str, where: Region) -> Run | None:
        """See Source."""
        if name in self._packed:
            return None
        stored = self._tensors[name]
        if not _is_run(stored, where):
            return None
        start, count = _rows(stored, where)
        return Run(stored.file, start, count, stored.dtype, start - stored.start)

    def read(self, run: Run, start: int, out: memoryview) -> None:
        """See Source."""
        self._files.read(run.file, run.start + start, out)

    def checksum(self, run: Run) -> int:
        """See Source."""
        return self._files.part(run.file, run.start, run.size).crc32(0, run.size)

    def _unpack(self, out: Tensor, name: str, where: Region) -> None:
        """Of each expert the rows that `where` asks for as columns; a row is one run of blocks."""
        experts, columns, rows = where
        out_ECR = out.view(sizes(where))
        for number, expert in enumerate(range(*experts)):
            parts = []
            for suffix in (mxfp4.BLOCKS, mxfp4.SCALES):
                stored = self._tensors[name + suffix]
                inside = tuple(AxisRange(0, size) for size in stored.shape[2:])
                part = torch.empty((1, rows.count, *stored.shape[2:]), dtype=stored.dtype)
                self.fill(part, name + suffix, (AxisRange(expert, expert + 1), rows, *inside))
                parts.append(part[0])
            whole_RC = torch.empty(rows.count, self._packed[name][1], dtype=out.dtype)
            mxfp4.unpack(whole_RC, *parts)
            out_ECR[number] = whole_RC[:, slice(*columns)].mT

    def _dequantised(self, rows: Tensor, name: str, first: int, dtype: torch.dtype) -> Tensor:
        """Each element times the scale of its block in fp32, rounded once; `first` is the first row's number."""
        scales = torch.empty(self._tensors[name + SCALE].shape)
        self.fill(scales, name + SCALE, whole(scales.shape))
        made = torch.empty(rows.shape, dtype=dtype)
        columns = torch.arange(rows.shape[1]) // self._block
        for start in range(0, len(rows), BAND_BLOCKS * self._block):
            band = rows[start : start + BAND_BLOCKS * self._block].float()
            blocks = torch.arange(first + start, first + start + len(band)) // self._block
            low, high = int(blocks[0]), int(blocks[-1]) + 1
            wide = scales[low:high].index_select(1, columns)
            band *= wide.index_select(0, blocks - low)
            made[start : start + len(band)] = band
        return made


class DistSource:
    """Tensors of a Megatron checkpoint, however they were cut."""

    def __init__(self, folder: DistFolder) -> None:
        self._tensors = folder.tensors
        self._files = FileBytes(folder.path)
        self._path = folder.path
        self._parts: dict[str, dict[AxisRange, list[Rectangle]]] = {}
        self._found: dict[Place, Saved] = {}

    def fill(self, out: Tensor, name: str, where: Region) -> None:
        """See Source."""
        whole_out = out.view(sizes(where))
        for part, common in self._meeting(name, where):
            self._copy(_at(whole_out, common, where), name, part, common)

    def prefetch(self, name: str, where: Region) -> None:
        """See Source."""
        for part, common in self._meeting(name, where):
            place = part.place
            run = self._run(name, part, common) if place in self._found else None
            start, size = (run.start, run.size) if run else (place.offset, place.length)
            self._files.prefetch(place.file, start, min(size, MOST_AHEAD_BYTES))

    def run(self, name: str, where: Region) -> Run | None:
        """See Source."""
        meeting = list(self._meeting(name, where))
        return self._run(name, *meeting[0]) if len(meeting) == 1 and meeting[0][1] == where else None

    def read(self, run: Run, start: int, out: memoryview) -> None:
        """See Source."""
        self._files.read(run.file, run.start + start, out)

    def checksum(self, run: Run) -> int:
        """See Source."""
        return self._files.part(run.file, run.start, run.size).crc32(0, run.size)

    def object_bytes(self, saved: Place) -> bytes:
        """What is stored at a place, as it is."""
        return self._files.part(saved.file, saved.offset, saved.length)[:]

    def _meeting(self, name: str, where: Region) -> Iterator[tuple[Rectangle, Region]]:
        """The parts that have something of a rectangle, and what."""
        for part in self._parts_near(name, where):
            common = tuple(
                AxisRange(max(a.start, b.start), min(a.stop, b.stop))
                for a, b in zip(where, part.where, strict=True)
            )
            if all(span.start < span.stop for span in common):
                yield part, common

    def _run(self, name: str, part: Rectangle, common: Region) -> Run | None:
        """A part of a part, if it is one run."""
        saved = self._saved(name, part)
        wanted = _at(torch.empty_strided(saved.shape, saved.stride, device="meta"), common, part.where)
        if not wanted.is_contiguous():
            return None
        first = saved.storage_offset + int(wanted.storage_offset())
        start, size = (count * saved.dtype.itemsize for count in (first, wanted.numel()))
        return Run(part.place.file, saved.start + start, size, saved.dtype, None)

    def _copy(self, out: Tensor, name: str, part: Rectangle, common: Region) -> None:
        run = self._run(name, part, common)
        if run is not None and run.dtype == out.dtype and out.is_contiguous():
            self._files.read(run.file, run.start, as_bytes(out))
            return
        saved = self._saved(name, part)
        with self._files.bytes_of(part.place.file, saved.start, saved.num_bytes) as raw:
            tensor = raw.view(saved.dtype).as_strided(saved.shape, saved.stride, saved.storage_offset)
            out.copy_(_at(tensor, common, part.where))
            del tensor, raw

    def _saved(self, name: str, part: Rectangle) -> Saved:
        """Where in its file a part is."""
        place = part.place
        saved = self._found.get(place)
        if saved is None:
            what = f"{name} in {self._path / place.file}"
            archive = self._files.part(place.file, place.offset, place.length)
            saved = self._found[place] = find_tensor(archive, place.offset, what)
        if saved.shape != sizes(part.where):
            raise CheckpointError(
                f"{self._path / place.file}: {name} has shape {saved.shape} there, {sizes(part.where)} in .metadata. "
                "Take another copy."
            )
        return saved

    def _parts_near(self, name: str, where: Region) -> list[Rectangle]:
        """The parts that can meet a rectangle, by the span of their first axis: a stacked tensor has thousands."""
        parts = self._parts.get(name)
        if parts is None:
            parts = self._parts[name] = {}
            for part in self._tensors[name].parts:
                parts.setdefault(part.where[0] if part.where else AxisRange(0, 1), []).append(part)
        if not where:
            return [part for group in parts.values() for part in group]
        return [
            part
            for span, group in parts.items()
            if span.start < where[0].stop and where[0].start < span.stop
            for part in group
        ]


def sizes(where: Region) -> Shape:
    """Of a rectangle."""
    return tuple(span.count for span in where)


def whole(shape: Shape) -> Region:
    """All of a tensor."""
    return tuple(AxisRange(0, size) for size in shape)


def _at(tensor: Tensor, where: Region, origin: Region) -> Tensor:
    """The rectangle `where` of a tensor whose own place is `origin`."""
    return tensor[
        tuple(slice(a.start - b.start, a.stop - b.start) for a, b in zip(where, origin, strict=True))
    ]


def _is_run(stored: Stored, where: Region) -> bool:
    """Whether a rectangle is whole rows without gaps."""
    return not where or (where[0].step == 1 and where[1:] == whole(stored.shape)[1:])


def _rows(stored: Stored, where: Region) -> tuple[int, int]:
    """First byte and number of bytes of the rows that a rectangle spans."""
    if not where:
        return stored.start, stored.num_bytes
    row = stored.num_bytes // stored.shape[0]
    return stored.start + where[0].start * row, (where[0].stop - where[0].start) * row
