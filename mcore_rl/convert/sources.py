"""Rectangles of stored tensors, by mmap: a process never holds more of a file than the rectangle at hand."""

import mmap
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from mcore_rl.convert.archive import Saved, find_tensor
from mcore_rl.convert.checksums import Part
from mcore_rl.convert.dist_folder import DistFolder, Place, Rectangle
from mcore_rl.convert.hf_folder import HfFolder, Stored
from mcore_rl.errors import CheckpointError
from mcore_rl.model.weight_map import Shape, Span, Where

FP8 = (torch.float8_e4m3fn,)
SCALE = "_scale_inv"
"""`X.weight_scale_inv` holds the scales of the fp8 blocks of `X.weight`."""
MOST_AHEAD_BYTES = 64 << 20
"""Of a part, that is read before it is asked for."""
BAND_BLOCKS = 8
"""Rows of fp8 blocks that are dequantised at a time."""


class Source(Protocol):
    """Something that has tensors by name."""

    def fill(self, out: Tensor, name: str, where: Where) -> None:
        """Copy a rectangle to `out`, which has its sizes but for axes of size 1, in `out`'s dtype."""

    def prefetch(self, name: str, where: Where) -> None:
        """Let the disk begin to read a rectangle that will be asked for soon."""

    def checksum(self, name: str, where: Where) -> Part | None:
        """Of the rectangle's bytes as they are stored; None when they are not one run."""


class Mapped:
    """Files of a folder in this process's address space, mapped when first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, mmap.mmap] = {}

    def __getitem__(self, name: str) -> mmap.mmap:
        found = self._files.get(name)
        if found is None:
            with (self._folder / name).open("rb") as file:
                found = self._files[name] = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        return found

    def prefetch(self, name: str, start: int, count: int) -> None:
        """Have these bytes read while something else is done."""
        if count:
            page = start // mmap.PAGESIZE * mmap.PAGESIZE
            self[name].madvise(mmap.MADV_WILLNEED, page, start + count - page)

    @contextmanager
    def bytes_of(self, name: str, start: int, count: int) -> Iterator[Tensor]:
        """uint8 `[count]`, a view of the file; its pages are given back on leaving."""
        mapped = self[name]
        if not count:
            yield torch.empty(0, dtype=torch.uint8)
            return
        page = start // mmap.PAGESIZE * mmap.PAGESIZE
        self.prefetch(name, start, count)
        yield _view(mapped, start, count)
        mapped.madvise(mmap.MADV_DONTNEED, page, start + count - page)


class HfSource:
    """Tensors of a Hugging Face folder; fp8 ones with block scales are read as what they stand for."""

    def __init__(self, folder: HfFolder, block: int = 128) -> None:
        self._tensors = folder.tensors
        self._files = Mapped(folder.path)
        self._block = block

    def fill(self, out: Tensor, name: str, where: Where) -> None:
        """See Source."""
        stored = self._tensors[name]
        start, count = _run(stored, where)
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

    def prefetch(self, name: str, where: Where) -> None:
        """See Source."""
        stored = self._tensors[name]
        self._files.prefetch(stored.file, *_run(stored, where))

    def checksum(self, name: str, where: Where) -> Part | None:
        """See Source."""
        stored = self._tensors[name]
        whole_rows = whole((0, *stored.shape[1:]))[1:]
        if where and (where[0].step != 1 or where[1:] != whole_rows):
            return None
        start, count = _run(stored, where)
        with self._files.bytes_of(stored.file, start, count) as raw:
            crc = zlib.crc32(raw.numpy().data)
            del raw
        return Part(start - stored.start, count, crc)

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
        self._files = Mapped(folder.path)
        self._path = folder.path
        self._parts: dict[str, dict[Span, list[Rectangle]]] = {}
        self._found: dict[Place, Saved] = {}

    def fill(self, out: Tensor, name: str, where: Where) -> None:
        """See Source."""
        whole_out = out.view(sizes(where))
        for part in self._parts_near(name, where):
            common = tuple(
                Span(max(a.start, b.start), min(a.stop, b.stop))
                for a, b in zip(where, part.where, strict=True)
            )
            if all(span.start < span.stop for span in common):
                self._copy(_at(whole_out, common, where), name, part, common)

    def prefetch(self, name: str, where: Where) -> None:
        """See Source."""
        for part in self._parts_near(name, where):
            if all(a.start < b.stop and b.start < a.stop for a, b in zip(where, part.where, strict=True)):
                self._files.prefetch(
                    part.place.file, part.place.offset, min(part.place.length, MOST_AHEAD_BYTES)
                )

    def checksum(self, name: str, where: Where) -> Part | None:
        """Not known: the parts may be any rectangles."""
        return None

    def object_bytes(self, saved: Place) -> bytes:
        """What is stored at a place, as it is."""
        return bytes(self._files[saved.file][saved.offset : saved.offset + saved.length])

    def _copy(self, out: Tensor, name: str, part: Rectangle, common: Where) -> None:
        place = part.place
        file = self._files[place.file]
        saved = self._found.get(place)
        if saved is None:
            what = f"{name} in {self._path / place.file}"
            saved = self._found[place] = find_tensor(file, place.offset, place.length, what)
        if saved.shape != sizes(part.where):
            raise CheckpointError(
                f"{self._path / place.file}: {name} has shape {saved.shape} there, {sizes(part.where)} in .metadata. "
                "Take another copy."
            )
        with self._files.bytes_of(place.file, saved.start, saved.num_bytes) as raw:
            tensor = raw.view(saved.dtype).as_strided(saved.shape, saved.stride, saved.storage_offset)
            out.copy_(_at(tensor, common, part.where))
            del tensor, raw

    def _parts_near(self, name: str, where: Where) -> list[Rectangle]:
        """The parts that can meet a rectangle, by the span of their first axis: a stacked tensor has thousands."""
        parts = self._parts.get(name)
        if parts is None:
            parts = self._parts[name] = {}
            for part in self._tensors[name].parts:
                parts.setdefault(part.where[0] if part.where else Span(0, 1), []).append(part)
        if not where:
            return [part for group in parts.values() for part in group]
        return [
            part
            for span, group in parts.items()
            if span.start < where[0].stop and where[0].start < span.stop
            for part in group
        ]


def sizes(where: Where) -> Shape:
    """Of a rectangle."""
    return tuple(span.count for span in where)


def whole(shape: Shape) -> Where:
    """All of a tensor."""
    return tuple(Span(0, size) for size in shape)


def _at(tensor: Tensor, where: Where, origin: Where) -> Tensor:
    """The rectangle `where` of a tensor whose own place is `origin`."""
    return tensor[
        tuple(slice(a.start - b.start, a.stop - b.start) for a, b in zip(where, origin, strict=True))
    ]


def _run(stored: Stored, where: Where) -> tuple[int, int]:
    """First byte and number of bytes of the rows that a rectangle spans."""
    if not where:
        return stored.start, stored.num_bytes
    row = stored.num_bytes // stored.shape[0]
    return stored.start + where[0].start * row, (where[0].stop - where[0].start) * row


def _view(mapped: mmap.mmap, start: int, count: int) -> Tensor:
    with warnings.catch_warnings():
        # The file is opened for reading only, and nothing writes to the view.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(mapped, dtype=torch.uint8, offset=start, count=count)
