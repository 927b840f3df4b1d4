"""Tensors of a Megatron checkpoint as a source of a conversion."""

from collections.abc import Iterator

import torch
from torch import Tensor

from mcore_rl.convert.copying.source import ByteRun, FileBytes, as_bytes
from mcore_rl.convert.megatron.folder import DistFolder, DistPart
from mcore_rl.convert.megatron.saved_tensor import SavedTensor, find_tensor
from mcore_rl.errors import CheckpointError
from mcore_rl.families.regions import sizes
from mcore_rl.families.weight_map import AxisRange, Region
from mcore_rl.storage.checkpoints.integrity import check_part
from mcore_rl.storage.foreign.archives import FileRange

MAX_PREFETCH_BYTES = 64 << 20
"""Largest number of bytes of a part to read ahead."""


class DistSource:
    """Tensors of a Megatron checkpoint, independent of how its mesh split them into parts.

    Each part is compared with its checksum before any of its elements is used; damage raises CheckpointError.
    """

    def __init__(self, folder: DistFolder) -> None:
        self._tensors = folder.tensors
        self._files = FileBytes(folder.path)
        self._path = folder.path
        self._parts: dict[str, dict[AxisRange, list[DistPart]]] = {}
        self._saved: dict[FileRange, SavedTensor] = {}

    def fill(self, out: Tensor, name: str, where: Region) -> None:
        """Copy a region to `out` (see TensorSource)."""
        region_out = out.view(sizes(where))
        for part, common in self._overlapping(name, where):
            self._copy(_region_of(region_out, common, where), name, part, common)

    def prefetch(self, name: str, where: Region) -> None:
        """Let the disk begin to read a region (see TensorSource)."""
        for part, common in self._overlapping(name, where):
            saved = part.saved
            # Before the archive is first opened, the elements' position inside it is unknown.
            run = self._run_of_part(name, part, common) if saved in self._saved else None
            start, size = (run.start, run.size) if run else (saved.start, saved.length)
            self._files.prefetch(saved.file, start, min(size, MAX_PREFETCH_BYTES))

    def run(self, name: str, where: Region) -> ByteRun | None:
        """Return where a region is stored (see TensorSource)."""
        overlapping = list(self._overlapping(name, where))
        if len(overlapping) != 1 or overlapping[0][1] != where:
            return None
        return self._run_of_part(name, *overlapping[0])

    def read(self, run: ByteRun, start: int, out: memoryview) -> None:
        """Fill `out` with bytes of a run (see TensorSource)."""
        self._files.read(run.file, run.start + start, out)

    def object_bytes(self, key: str, saved: FileRange) -> bytes:
        """Return the bytes of an object as torch.save wrote them; CheckpointError when they are damaged."""
        check_part(self._path, key, saved)
        return self._files.part(saved.file, saved.start, saved.length)[:]

    def _overlapping(self, name: str, where: Region) -> Iterator[tuple[DistPart, Region]]:
        """Yield the parts that overlap a region, and their overlaps."""
        for part in self._parts_near(name, where):
            common = tuple(
                AxisRange(max(a.start, b.start), min(a.stop, b.stop))
                for a, b in zip(where, part.where, strict=True)
            )
            if all(axis.start < axis.stop for axis in common):
                yield part, common

    def _run_of_part(self, name: str, part: DistPart, common: Region) -> ByteRun | None:
        """Return where a region of a part is stored; None if its bytes are not contiguous."""
        saved = self._saved_tensor(name, part)
        wanted = _region_of(torch.empty_strided(saved.shape, saved.stride, device="meta"), common, part.where)
        if not wanted.is_contiguous():
            return None
        first = saved.storage_offset + int(wanted.storage_offset())
        start, size = (count * saved.dtype.itemsize for count in (first, wanted.numel()))
        return ByteRun(part.saved.file, saved.start + start, size, saved.dtype, None)

    def _copy(self, out: Tensor, name: str, part: DistPart, common: Region) -> None:
        """Copy a region of a part to `out`."""
        run = self._run_of_part(name, part, common)
        if run is not None and run.dtype == out.dtype and out.is_contiguous():
            self._files.read(run.file, run.start, as_bytes(out))
            return
        saved = self._saved_tensor(name, part)
        with self._files.bytes_of(part.saved.file, saved.start, saved.num_bytes) as raw:
            tensor = raw.view(saved.dtype).as_strided(saved.shape, saved.stride, saved.storage_offset)
            out.copy_(_region_of(tensor, common, part.where))
            # No view of the mapped file may outlive the block.
            del tensor, raw

    def _saved_tensor(self, name: str, part: DistPart) -> SavedTensor:
        """Return where the elements of a part are in its file."""
        saved = self._saved.get(part.saved)
        if saved is None:
            check_part(self._path, name, part.saved)
            what = f"{name} in {self._path / part.saved.file}"
            archive = self._files.part(*part.saved)
            saved = self._saved[part.saved] = find_tensor(archive, part.saved.start, what)
        if saved.shape != sizes(part.where):
            raise CheckpointError(
                f"{self._path / part.saved.file}: {name} has shape {saved.shape} there, {sizes(part.where)} in "
                ".metadata. Take another copy."
            )
        return saved

    def _parts_near(self, name: str, where: Region) -> list[DistPart]:
        """Return the parts that can overlap a region, by their first axis: a stacked tensor has thousands of parts."""
        parts = self._parts.get(name)
        if parts is None:
            parts = self._parts[name] = {}
            for part in self._tensors[name].parts:
                parts.setdefault(part.where[0] if part.where else AxisRange(0, 1), []).append(part)
        if not where:
            return [part for group in parts.values() for part in group]
        return [
            part
            for axis, group in parts.items()
            if axis.start < where[0].stop and where[0].start < axis.stop
            for part in group
        ]


def _region_of(tensor: Tensor, where: Region, origin: Region) -> Tensor:
    """Return the region `where` of a whole tensor; `tensor` is the whole tensor's region `origin`."""
    return tensor[
        tuple(slice(a.start - b.start, a.stop - b.start) for a, b in zip(where, origin, strict=True))
    ]
