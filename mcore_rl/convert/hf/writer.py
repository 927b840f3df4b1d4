"""Safetensors files of an export, and weights in the int4 or fp8 blocks in which a reference folder has them."""

import json
import math
import os
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from mcore_rl.convert.copying import tensors as regions
from mcore_rl.convert.copying.conversion import WrittenRange
from mcore_rl.convert.hf import quantization
from mcore_rl.convert.hf.folder import DTYPE_NAMES, HfFolder
from mcore_rl.convert.hf.model import QUANTIZATION, HfSource, as_stored, with_quantization
from mcore_rl.errors import CheckpointError
from mcore_rl.families.weight_map import AxisRange, Region, listed, sizes


class SafetensorsWriter:
    """Writes shards: any worker writes any chunk, in any order, twice if need be, as each has its bytes in a file."""

    def __init__(self, shards: Mapping[str, Sequence[regions.TargetTensor]]) -> None:
        self._starts: dict[str, int] = {}
        self._headers: dict[str, bytes] = {}
        self._sizes: dict[str, int] = {}
        for file, targets in shards.items():
            entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
            end = 0
            for target in targets:
                start, end = end, end + target.num_bytes
                dtype, shape = DTYPE_NAMES[target.dtype], list(target.shape)
                entries[target.name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
            text = json.dumps(entries, separators=(",", ":")).encode()
            # Spaces until the data begins at a multiple of 8 bytes, as the format's own library has it.
            text += b" " * (-len(text) % 8)
            # "<Q": the length of the header as a little-endian number of 8 bytes.
            header = struct.pack("<Q", len(text)) + text
            position = len(header)
            for target in targets:
                self._starts[target.name] = position
                position += target.num_bytes
            self._headers[file], self._sizes[file] = header, position

    def prepare(self, folder: Path) -> None:
        """Make the files in full length, unless an earlier run did: a full disk refuses at once, not hours later."""
        for file, header in self._headers.items():
            path = folder / file
            if path.exists() and path.stat().st_size == self._sizes[file]:
                continue
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            try:
                os.posix_fallocate(descriptor, 0, self._sizes[file])
                os.pwrite(descriptor, header, 0)
                # A resumed run trusts a file of full length to have its header.
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def write(self, folder: Path, task: regions.CopyTask, contents: Iterator[regions.ChunkBytes]) -> list[WrittenRange]:
        """Write a task's chunks to where they belong in its file."""
        ranges = []
        descriptor = os.open(folder / task.file, os.O_WRONLY)
        try:
            for content in contents:
                offset = self._starts[content.chunk.target.name] + content.chunk.start
                ranges.append(WrittenRange(offset, content.chunk.num_bytes))
                for block in content.blocks():
                    while block:  # one call of the system may write less than all
                        count = os.pwrite(descriptor, block, offset)
                        block, offset = block[count:], offset + count
        finally:
            os.close(descriptor)
        return ranges


def shards_of(targets: Sequence[regions.TargetTensor], max_bytes: int) -> dict[str, list[regions.TargetTensor]]:
    """Return the targets by file, in their order, as many a file as fit in `max_bytes`; named as transformers does."""
    groups: list[list[regions.TargetTensor]] = [[]]
    size = 0
    for target in targets:
        if groups[-1] and size + target.num_bytes > max_bytes:
            groups.append([])
            size = 0
        groups[-1].append(target)
        size += target.num_bytes
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    total = len(groups)
    return {f"model-{i:05d}-of-{total:05d}.safetensors": group for i, group in enumerate(groups, 1)}


BlockKind = Literal["int4", "fp8"]
Quantization = Literal["none", BlockKind]
METHODS: dict[BlockKind, str] = {"int4": "compressed-tensors", "fp8": "fp8"}
"""`quant_method` in config.json."""
PARTS: dict[BlockKind, tuple[str, ...]] = {
    "int4": (quantization.INT4_PACKED, quantization.INT4_SCALE, quantization.INT4_SHAPE),
    "fp8": ("", quantization.FP8_SCALE),
}
"""Suffixes of the names of the tensors that a weight is stored as."""
COMPUTED: dict[BlockKind, tuple[str, ...]] = {"int4": (quantization.INT4_PACKED,), "fp8": PARTS["fp8"]}
"""The parts that follow from the checkpoint's weights; all others are the reference's."""
SCALES: dict[BlockKind, str] = {
    "int4": "the reference's scales",
    "fp8": "the reference's scales where these give back every weight of a block, else the largest weight / 448",
}
UNQUANTIZED = ("embedding.word_embeddings.weight", "output_layer.weight", "router.weight")
"""Ends of Megatron's keys of the matrices that servers never read in fp8."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Blocks:
    """The weights that an export writes in blocks, as its reference has them."""

    kind: BlockKind
    reference: HfFolder
    weights: Mapping[str, regions.TargetTensor]
    """By name, as they would be written without blocks."""

    @property
    def note(self) -> str:
        """A sentence about the output for its user."""
        count = len(self.weights)
        return f"{count} tensors are {self.kind} ({SCALES[self.kind]}): servers compute with rounded weights"

    @property
    def copied(self) -> list[str]:
        """Names of the reference's tensors that are copied."""
        parts = set(PARTS[self.kind]).difference(COMPUTED[self.kind])
        return [name + part for name in self.weights for part in parts]

    def targets(self, plain: Sequence[regions.TargetTensor]) -> list[regions.TargetTensor]:
        """Return the tensors to write instead of `plain`, which has no blocks."""
        others = [target for target in plain if target.name not in self.weights]
        # The parts of a weight side by side: what is computed from it reads it while it is in memory.
        parts = [as_stored(self.reference, name + part) for name in self.weights for part in PARTS[self.kind]]
        return others + parts

    def source(self, checkpoint: regions.TensorSource) -> regions.TensorSource:
        """Return a source of all tensors of the export."""
        computed = {name + part: target for name, target in self.weights.items() for part in COMPUTED[self.kind]}
        if self.kind == "int4":
            return WithInt4(checkpoint, self.reference, computed)
        return WithFp8(checkpoint, self.reference, computed)


def blocks_like(
    kind: Quantization, reference: HfFolder | None, path: Path | None, plain: Sequence[regions.TargetTensor]
) -> Blocks | None:
    """Return which of the tensors `plain` are written in blocks, as the reference has them; None if none shall be."""
    if kind == "none":
        return None
    tensors = reference.tensors if reference else {}
    shapes = (
        quantization.int4_shapes(tensors)
        if kind == "int4"
        else {name: tensor.shape for name, tensor in tensors.items() if tensor.dtype in quantization.FP8}
    )
    if reference is None or not shapes:
        raise CheckpointError(
            f"--quantize {kind} writes what a folder of the same model has in {kind} blocks, and --reference {path} "
            "has none. Name one that has, or leave out --quantize."
        )
    config = with_quantization(reference.config or {})
    declared = config.get(QUANTIZATION) or {}
    if declared.get("quant_method") != METHODS[kind]:
        raise CheckpointError(
            f"--reference {path} has tensors in {kind} blocks, and its config.json has quantization_config "
            f"{declared or None}, so that no server would read the output. Take the config.json of those weights."
        )
    weights = {target.name: target for target in plain if target.name in shapes}
    typed = replace(reference, tensors=quantization.with_scale_types(tensors, config))
    size = quantization.fp8_block_size(config)
    faults = [*(quantization.int4_faults(tensors) if kind == "int4" else quantization.fp8_faults(typed.tensors, size))]
    faults += [
        f"{name} has shape {shapes[name]}, the model wants {target.shape}"
        for name, target in weights.items()
        if shapes[name] != target.shape
    ]
    if kind == "fp8":
        faults += _exceptions(weights, declared.get("modules_to_not_convert") or ())
    if faults:
        raise CheckpointError(f"--quantize {kind} cannot follow the blocks of --reference {path}:\n{listed(faults)}")
    return Blocks(kind=kind, reference=reference, weights=weights)


class WithReference:
    """A checkpoint's tensors, and tensors that only the reference folder has."""

    def __init__(self, source: regions.TensorSource, folder: HfFolder) -> None:
        self._source, self._folder, self._reference = source, folder, HfSource(folder)

    def _of(self, name: str) -> regions.TensorSource:
        return self._reference if self._reference.has(name) else self._source

    def fill(self, out: Tensor, name: str, where: Region) -> None:
        self._of(name).fill(out, name, where)

    def prefetch(self, name: str, where: Region) -> None:
        self._of(name).prefetch(name, where)

    def run(self, name: str, where: Region) -> regions.ByteRun | None:
        """Return where a region of the checkpoint is stored (see TensorSource); copied tensors are filled."""
        return None if self._reference.has(name) else self._source.run(name, where)

    def read(self, run: regions.ByteRun, start: int, out: memoryview) -> None:
        self._source.read(run, start, out)


class WithBlocks(WithReference, ABC):
    """The tensors of an export, including quantized blocks computed from the checkpoint's weights."""

    def __init__(
        self, source: regions.TensorSource, folder: HfFolder, computed: Mapping[str, regions.TargetTensor]
    ) -> None:
        """`computed` has, by the name of a part, the weight that it is computed from."""
        super().__init__(source, folder)
        self._computed = computed

    def fill(self, out: Tensor, name: str, where: Region) -> None:
        if name in self._computed:
            self._compute(out, self._computed[name], name, where)
        else:
            super().fill(out, name, where)

    def prefetch(self, name: str, where: Region) -> None:
        if name not in self._computed:
            super().prefetch(name, where)
            return
        for copy in self._computed[name].copies:
            self._source.prefetch(copy.source, copy.where)

    @abstractmethod
    def _compute(self, out: Tensor, weight: regions.TargetTensor, name: str, where: Region) -> None:
        """Fill `out` with a region of the part `name` of a weight."""

    def _weights(self, weight: regions.TargetTensor, rows: AxisRange) -> Tensor:
        """Return rows of a weight of the checkpoint `[rows, columns]`, in the type that it has without blocks."""
        chunk = regions.chunk_at(weight, (rows, AxisRange(0, weight.shape[1])))
        weights = regions.fill(chunk, self._source)
        regions.refuse_not_finite(weights, chunk, self._source)
        return weights

    def _scales(self, name: str, rows: AxisRange) -> Tensor:
        """Return rows of scales of the reference, fp32 `[rows, column blocks]`."""
        columns = AxisRange(0, self._folder.tensors[name].shape[1])
        scales = torch.empty(rows.count, columns.count)
        self._reference.fill(scales, name, (rows, columns))
        return scales


class WithInt4(WithBlocks):
    """The tensors of an export with int4 blocks; only words of numbers are computed."""

    def _compute(self, out: Tensor, weight: regions.TargetTensor, name: str, where: Region) -> None:
        scales = self._scales(weight.name + quantization.INT4_SCALE, where[0])
        words = quantization.pack_int4(self._weights(weight, where[0]), scales)
        out.copy_(words[:, slice(*where[1])].view(out.shape))


class WithFp8(WithBlocks):
    """The tensors of an export with fp8 blocks; numbers and scales are computed, a row of blocks at a time."""

    def __init__(
        self, source: regions.TensorSource, folder: HfFolder, computed: Mapping[str, regions.TargetTensor]
    ) -> None:
        config = with_quantization(folder.config or {})
        self._block = quantization.fp8_block_size(config)
        self._in_powers = (config.get(QUANTIZATION) or {}).get("scale_fmt") == quantization.POWERS
        super().__init__(
            source, replace(folder, tensors=quantization.with_scale_types(folder.tensors, config)), computed
        )

    def _compute(self, out: Tensor, weight: regions.TargetTensor, name: str, where: Region) -> None:
        (rows, columns), is_scale = where, name != weight.name
        # Scales that are stored as plain bytes are the bytes of powers of two.
        out_RC = (out.view(torch.float8_e8m0fnu) if out.dtype == torch.uint8 else out).view(sizes(where))
        height = 1 if is_scale else self._block
        scale_name = weight.name + quantization.FP8_SCALE
        scale_dtype = self._folder.tensors[scale_name].dtype
        in_powers = self._in_powers or scale_dtype == torch.float8_e8m0fnu
        for index in range(rows.start // height, math.ceil(rows.stop / height)):
            of_weight = AxisRange(index * self._block, min((index + 1) * self._block, weight.shape[0]))
            weights, known = self._weights(weight, of_weight), self._scales(scale_name, AxisRange(index, index + 1))
            made = quantization.quantize_fp8(weights, known, self._block, scale_dtype, in_powers=in_powers)
            part, first = made[is_scale], index * height
            low, high = max(rows.start, first), min(rows.stop, first + len(part))
            out_RC[low - rows.start : high - rows.start] = part[low - first : high - first, slice(*columns)]


def _exceptions(weights: Mapping[str, regions.TargetTensor], modules: Sequence[str]) -> Iterator[str]:
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        named = [key for key in modules if f".{module}.".endswith(f".{key}.") or module.startswith(f"{key}.")]
        if named:
            yield f"{name} is fp8, and modules_to_not_convert of config.json has {named[0]}"
        elif any(copy.source.endswith(UNQUANTIZED) for copy in weight.copies):
            yield f"{name} is fp8, which servers do not read as embedding, router or output layer"
