"""Tensors of a Hugging Face folder as a source of a conversion, and the checksums of the bytes read."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from mcore_rl.convert.copying.conversion import RecordedTask
from mcore_rl.convert.copying.source import ByteRun, FileBytes, as_bytes
from mcore_rl.convert.hf.folder import HfFolder, HfTensor
from mcore_rl.convert.hf.quantization import (
    FP8,
    FP8_BLOCK,
    FP8_SCALE,
    INT4_PACKED,
    INT4_SCALE,
    MXFP4_BLOCKS,
    MXFP4_SCALES,
    dequantize_fp8,
    int4_shapes,
    mxfp4_shapes,
    unpack_int4,
    unpack_mxfp4,
)
from mcore_rl.families.regions import sizes, whole
from mcore_rl.families.weight_map import AxisRange, Region
from mcore_rl.storage.checksums import PartChecksum, as_hex, joined


class HfSource:
    """Tensors of a Hugging Face folder; fp8, mxfp4 and int4 tensors are dequantized."""

    def __init__(self, folder: HfFolder, fp8_block: int = FP8_BLOCK) -> None:
        self._tensors = folder.tensors
        self._files = FileBytes(folder.path)
        self._fp8_block = fp8_block
        self._mxfp4_shapes = mxfp4_shapes(folder.tensors)
        self._int4_shapes = int4_shapes(folder.tensors)

    def has(self, name: str) -> bool:
        """Return whether the folder has a tensor of this name."""
        return name in self._tensors

    def fill(self, out: Tensor, name: str, where: Region) -> None:
        """Copy a region to `out` (see TensorSource)."""
        if name in self._mxfp4_shapes:
            self._fill_from_mxfp4(out, name, where)
            return
        if name in self._int4_shapes:
            self._fill_from_int4(out, name, where)
            return
        tensor = self._tensors[name]
        run = self.run(name, where)
        if run is not None and tensor.dtype == out.dtype and out.is_contiguous():
            self._files.read(run.file, run.start, as_bytes(out))
            return
        start, count = _bytes_of_rows(tensor, where)
        with self._files.bytes_of(tensor.file, start, count) as raw:
            shape = (where[0].stop - where[0].start, *tensor.shape[1:]) if where else ()
            rows = raw.view(tensor.dtype).view(shape)
            # A target in fp8 takes the stored bytes: `verify` compares quantized folders as they are.
            if tensor.dtype in FP8 and out.dtype not in FP8:
                scales = torch.empty(self._tensors[name + FP8_SCALE].shape)
                self.fill(scales, name + FP8_SCALE, whole(scales.shape))
                rows = dequantize_fp8(rows, scales, where[0].start, self._fp8_block, out.dtype)
            # `rows` begins with the region's first row, so the first axis counts from 0.
            inside = (
                tuple(slice(*axis) for axis in ((0, shape[0], where[0].step), *where[1:])) if where else ()
            )
            out.copy_(rows[inside].view(out.shape))
            # No view of the mapped file may outlive the block.
            del rows, raw

    def prefetch(self, name: str, where: Region) -> None:
        """Let the disk begin to read a region (see TensorSource)."""
        if name in self._mxfp4_shapes:
            name, where = name + MXFP4_BLOCKS, where[:1]
        if name in self._int4_shapes:
            name, where = name + INT4_PACKED, where[:1]
        tensor = self._tensors[name]
        self._files.prefetch(tensor.file, *_bytes_of_rows(tensor, where))

    def run(self, name: str, where: Region) -> ByteRun | None:
        """Return where a region is stored (see TensorSource)."""
        if name in self._mxfp4_shapes or name in self._int4_shapes:
            return None
        tensor = self._tensors[name]
        if not _is_one_run(tensor, where):
            return None
        start, count = _bytes_of_rows(tensor, where)
        return ByteRun(tensor.file, start, count, tensor.dtype, start - tensor.start)

    def read(self, run: ByteRun, start: int, out: memoryview) -> None:
        """Fill `out` with bytes of a run (see TensorSource)."""
        self._files.read(run.file, run.start + start, out)

    def checksum(self, name: str) -> int:
        """Return the CRC-32 of the bytes of a tensor."""
        tensor = self._tensors[name]
        return self._files.part(tensor.file, tensor.start, tensor.num_bytes).crc32(0, tensor.num_bytes)

    def _fill_from_mxfp4(self, out: Tensor, name: str, where: Region) -> None:
        """Fill `out` expert by expert. The columns in `where` are rows of blocks, each stored contiguously."""
        experts, columns, rows = where
        out_ECR = out.view(sizes(where))
        for index, expert in enumerate(range(*experts)):
            parts = []
            for suffix in (MXFP4_BLOCKS, MXFP4_SCALES):
                tensor = self._tensors[name + suffix]
                inside = tuple(AxisRange(0, size) for size in tensor.shape[2:])
                part = torch.empty((1, rows.count, *tensor.shape[2:]), dtype=tensor.dtype)
                self.fill(part, name + suffix, (AxisRange(expert, expert + 1), rows, *inside))
                parts.append(part[0])
            values_RC = torch.empty(rows.count, self._mxfp4_shapes[name][1], dtype=out.dtype)
            unpack_mxfp4(values_RC, *parts)
            out_ECR[index] = values_RC[:, slice(*columns)].mT

    def _fill_from_int4(self, out: Tensor, name: str, where: Region) -> None:
        """Fill `out` from the rows of blocks in `where`, each stored contiguously."""
        rows, columns = where
        parts = []
        for suffix in (INT4_PACKED, INT4_SCALE):
            tensor = self._tensors[name + suffix]
            part = torch.empty((rows.count, tensor.shape[1]), dtype=tensor.dtype)
            self.fill(part, name + suffix, (rows, AxisRange(0, tensor.shape[1])))
            parts.append(part)
        values_RC = torch.empty(rows.count, self._int4_shapes[name][1], dtype=out.dtype)
        unpack_int4(values_RC, *parts)
        out.copy_(values_RC[:, slice(*columns)].view(out.shape))


def source_checksums(folder: HfFolder, done: Iterable[RecordedTask]) -> dict[str, Any]:
    """Return, for the manifest, the files that were read and the CRC-32 of each tensor.

    Tensors that were not read by whole rows, such as transposed tensors, are read once more for it.
    """
    parts: dict[str, list[PartChecksum]] = {}
    for _, records in done:
        for record in records:
            for name, part in record.sources:
                parts.setdefault(name, []).append(part)
    source = HfSource(folder)
    checksums = {}
    for name, tensor in sorted(folder.tensors.items()):
        crc = joined(parts.get(name, ()), tensor.num_bytes)
        checksums[name] = as_hex(source.checksum(name) if crc is None else crc)
    files = {
        name: {"bytes": size, "header_sha256": folder.headers[name]} for name, size in folder.files.items()
    }
    layouts = {name: f"{tensor.dtype} {tensor.shape}" for name, tensor in sorted(folder.tensors.items())}
    return {"files": files, "config": folder.config, "tensors": checksums, "layouts": layouts}


def _is_one_run(tensor: HfTensor, where: Region) -> bool:
    """Return whether a region is whole rows without gaps."""
    return not where or (where[0].step == 1 and where[1:] == whole(tensor.shape)[1:])


def _bytes_of_rows(tensor: HfTensor, where: Region) -> tuple[int, int]:
    """Return the first byte in the file, and the number of bytes, of the rows that a region spans."""
    if not where:
        return tensor.start, tensor.num_bytes
    row_bytes = tensor.num_bytes // tensor.shape[0]
    return tensor.start + where[0].start * row_bytes, (where[0].stop - where[0].start) * row_bytes
