"""Match a Hugging Face folder to a model family, by the tensors' headers, and read its tensors."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from mcore_rl.checks.model import checked_model_from_hf
from mcore_rl.config.model import ModelConfig
from mcore_rl.convert.copying.conversion import RecordedTask
from mcore_rl.convert.copying.tensors import ByteRun, FileBytes, TargetTensor, as_bytes, chunks_of, fill
from mcore_rl.convert.hf import quantization
from mcore_rl.convert.hf.folder import HfFolder, HfTensor, open_hf
from mcore_rl.errors import CheckpointError
from mcore_rl.families import family_of, weight_map
from mcore_rl.families.config_json import OBJECT, check_types
from mcore_rl.families.rules import ExpertLayout
from mcore_rl.families.shells import shell_of, text_config
from mcore_rl.families.weight_map import (
    FP8_BLOCK,
    AxisRange,
    Copies,
    Region,
    RegionCopy,
    WeightMap,
    listed,
    sizes,
    whole,
)
from mcore_rl.storage.checksums import PartChecksum, as_hex, joined


class HfSource:
    """Tensors of a Hugging Face folder; fp8, mxfp4 and int4 tensors are dequantized."""

    def __init__(self, folder: HfFolder, fp8_block: int = FP8_BLOCK) -> None:
        self._tensors = folder.tensors
        self._files = FileBytes(folder.path)
        self._fp8_block = fp8_block
        self._mxfp4_shapes = quantization.mxfp4_shapes(folder.tensors)
        self._int4_shapes = quantization.int4_shapes(folder.tensors)

    def has(self, name: str) -> bool:
        """Return whether the folder has a tensor of this name."""
        return name in self._tensors

    def fill(self, out: Tensor, name: str, where: Region) -> None:
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
            if tensor.dtype in quantization.FP8 and out.dtype not in quantization.FP8:
                scales = torch.empty(self._tensors[name + quantization.FP8_SCALE].shape)
                self.fill(scales, name + quantization.FP8_SCALE, whole(scales.shape))
                rows = quantization.dequantize_fp8(rows, scales, where[0].start, self._fp8_block, out.dtype)
            # `rows` begins with the region's first row, so the first axis counts from 0.
            inside = tuple(slice(*axis) for axis in ((0, shape[0], where[0].step), *where[1:])) if where else ()
            out.copy_(rows[inside].view(out.shape))
            # No view of the mapped file may outlive the block.
            del rows, raw

    def prefetch(self, name: str, where: Region) -> None:
        if name in self._mxfp4_shapes:
            name, where = name + quantization.MXFP4_BLOCKS, where[:1]
        if name in self._int4_shapes:
            name, where = name + quantization.INT4_PACKED, where[:1]
        tensor = self._tensors[name]
        self._files.prefetch(tensor.file, *_bytes_of_rows(tensor, where))

    def run(self, name: str, where: Region) -> ByteRun | None:
        if name in self._mxfp4_shapes or name in self._int4_shapes:
            return None
        tensor = self._tensors[name]
        if where and (where[0].step != 1 or where[1:] != whole(tensor.shape)[1:]):
            return None
        start, count = _bytes_of_rows(tensor, where)
        return ByteRun(tensor.file, start, count, tensor.dtype, start - tensor.start)

    def read(self, run: ByteRun, start: int, out: memoryview) -> None:
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
            for suffix in (quantization.MXFP4_BLOCKS, quantization.MXFP4_SCALES):
                tensor = self._tensors[name + suffix]
                inside = tuple(AxisRange(0, size) for size in tensor.shape[2:])
                part = torch.empty((1, rows.count, *tensor.shape[2:]), dtype=tensor.dtype)
                self.fill(part, name + suffix, (AxisRange(expert, expert + 1), rows, *inside))
                parts.append(part[0])
            values_RC = torch.empty(rows.count, self._mxfp4_shapes[name][1], dtype=out.dtype)
            quantization.unpack_mxfp4(values_RC, *parts)
            out_ECR[index] = values_RC[:, slice(*columns)].mT

    def _fill_from_int4(self, out: Tensor, name: str, where: Region) -> None:
        rows, columns = where
        parts = []
        for suffix in (quantization.INT4_PACKED, quantization.INT4_SCALE):
            tensor = self._tensors[name + suffix]
            part = torch.empty((rows.count, tensor.shape[1]), dtype=tensor.dtype)
            self.fill(part, name + suffix, (rows, AxisRange(0, tensor.shape[1])))
            parts.append(part)
        values_RC = torch.empty(rows.count, self._int4_shapes[name][1], dtype=out.dtype)
        quantization.unpack_int4(values_RC, *parts)
        out.copy_(values_RC[:, slice(*columns)].view(out.shape))


def source_checksums(folder: HfFolder, done: Iterable[RecordedTask]) -> dict[str, Any]:
    """Return, for the manifest, the files read and each tensor's CRC-32, which may take one more reading."""
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
    files = {name: {"bytes": size, "header_sha256": folder.headers[name]} for name, size in folder.files.items()}
    layouts = {name: f"{tensor.dtype} {tensor.shape}" for name, tensor in sorted(folder.tensors.items())}
    return {"files": files, "config": folder.config, "tensors": checksums, "layouts": layouts}


def _bytes_of_rows(tensor: HfTensor, where: Region) -> tuple[int, int]:
    """Return the first byte in the file, and the number of bytes, of the rows that a region spans."""
    if not where:
        return tensor.start, tensor.num_bytes
    row_bytes = tensor.num_bytes // tensor.shape[0]
    return tensor.start + where[0].start * row_bytes, (where[0].stop - where[0].start) * row_bytes


MtpLayers = Literal["keep", "drop"]
QUANTIZATION = "quantization_config"
"""Key in config.json of a quantization that is supported."""
CONSOLIDATED_REMEDY = "Take the files model*.safetensors of the same model"
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True, slots=True)
class HfModel:
    """A folder with exactly the tensors of `model`."""

    folder: HfFolder
    model: ModelConfig
    weights: WeightMap
    fp8_block: int
    """Rows and columns of an fp8 block."""
    dropped: tuple[str, ...]
    """Tensors that are left out because of `--mtp drop`."""
    passing: tuple[str, ...]
    """Tensors outside the text model: conversions do not open them, and an export copies them."""

    def dtype(self, name: str) -> torch.dtype:
        """Return the type that a tensor is read as; a quantized tensor is read as the model's type."""
        tensor = self.folder.tensors.get(name)
        # mxfp4 and int4 tensors are absent: the folder has their blocks and scales, under other names.
        if tensor is None or tensor.dtype in quantization.FP8:
            config = self.folder.config or {}
            name = str(config.get("dtype") or config.get("torch_dtype"))
            return {"float32": torch.float32, "float16": torch.float16}.get(name, torch.bfloat16)
        return tensor.dtype

    def source(self) -> HfSource:
        """Open the folder's tensors for reading."""
        return HfSource(self.folder, self.fp8_block)


def open_hf_model(
    path: Path, *, mtp: MtpLayers = "keep", vocab_multiple: int | None = None, family: str | None = None
) -> HfModel:
    """Return the model in a folder, padded to `vocab_multiple` tokens, of the user's own `family` (module:name) if one
    is given. Raises CheckpointError naming tensors that are missing, left over, or of wrong shape or type; ConfigError
    for models not supported.
    """
    folder = open_hf(path)
    if folder.config is None:
        raise CheckpointError(f"{path} has no config.json: what model is it? Take the one that belongs to the weights.")
    _refuse_consolidated(folder)
    config = folder.config
    quantized = with_quantization(config)
    folder = replace(folder, tensors=quantization.with_scale_types(folder.tensors, quantized))
    folder, passing = in_text_names(folder)
    model, layout = checked_model_from_hf(config, family), expert_layout(folder)
    prefix = family_of(model).mtp_prefix
    if prefix is not None and not model.mtp_layers and any(name.startswith(prefix) for name in folder.tensors):
        # Qwen3-Next's config.json has no key for the layer that its folder has; some programs save none of it.
        model = model.model_copy(update={"mtp_layers": 1})
    if vocab_multiple is not None:
        model = model.model_copy(update={"vocab_multiple": vocab_multiple})
    converted = model.model_copy(update={"mtp_layers": 0}) if mtp == "drop" else model
    weights = weight_map(converted, layout)
    dropped: set[str] = set()
    if converted != model:
        every = weight_map(model, layout)
        names = every.hf_shapes.keys() | {copy.name for copy in every.copies}
        dropped = names - weights.hf_shapes.keys() - {copy.name for copy in weights.copies}
    found = HfModel(
        folder=folder,
        model=converted,
        weights=weights,
        fp8_block=quantization.fp8_block_size(quantized),
        dropped=tuple(sorted(dropped & folder.tensors.keys())),
        passing=passing,
    )
    weights.prove()
    _check_names(found, dropped)
    _check_types(found)
    return found


def with_quantization(config: dict[str, Any]) -> dict[str, Any]:
    """Return the text model's config with the quantization of either; ConfigError if that is no object."""
    outer = {QUANTIZATION: config[QUANTIZATION]} if config.get(QUANTIZATION) else {}
    quantized = {**text_config(config), **outer}
    check_types(quantized, {QUANTIZATION: OBJECT})
    return quantized


def check_copies(found: HfModel) -> None:
    """Read the tensors that repeat another tensor. Raises CheckpointError if they differ."""
    differ = [
        f"{copy.name} differs from {copy.original}"
        for copy in found.weights.copies
        if copy.name in found.folder.tensors and not _equal(found, copy.name, copy.original)
    ]
    if differ:
        raise CheckpointError(
            f"Megatron shares tensors that these weights have in different versions:\n{listed(differ)}\n"
            "Is tie_word_embeddings in config.json right? An MTP layer can be left out with --mtp drop."
        )


def in_text_names(folder: HfFolder) -> tuple[HfFolder, tuple[str, ...]]:
    """Return a folder with its text model's tensors under their family's names, and the other names."""
    shell = shell_of(folder.config or {})
    if shell is None:
        return folder, ()
    names = {name: shell.text_name(name) for name in folder.tensors}
    tensors = {names[name] or name: tensor for name, tensor in folder.tensors.items()}
    return replace(folder, tensors=tensors), tuple(name for name, text in names.items() if text is None)


def as_stored(folder: HfFolder, name: str) -> TargetTensor:
    """Return a target with the name, shape and type of a tensor of the folder."""
    tensor = folder.tensors[name]
    copies = Copies([RegionCopy(whole(tensor.shape), name, whole(tensor.shape))])
    return TargetTensor(name=name, shape=tensor.shape, dtype=tensor.dtype, copies=copies)


def expert_layout(folder: HfFolder) -> ExpertLayout:
    """Return whether each expert of a layer is a tensor, or all experts are in a single tensor, transposed or not."""
    fused = next((t for name, t in folder.tensors.items() if name.endswith(".experts.gate_up_proj")), None)
    if fused is None:
        return "each"
    shell = shell_of(folder.config or {})
    if shell is None or not shell.has_transposed_experts:
        return "fused"
    # Some programs write experts in the usual layout; if square matrices fit both, assume the published layout.
    hidden = text_config(folder.config or {}).get("hidden_size")
    return "transposed" if fused.shape[1:2] == (hidden,) else "fused"


def _refuse_consolidated(folder: HfFolder) -> None:
    """Raise a CheckpointError for weights under the names of Mistral's own programs, which are not transformers'."""
    files = sorted(folder.files)
    consolidated = [name for name in files if name.startswith("consolidated")]
    if consolidated:
        is_copy = len(consolidated) < len(files)
        raise CheckpointError(
            f"{folder.path}/{consolidated[0]} has weights under the names of Mistral's own programs, which are not "
            f"read here. {'Move it away: the other files have the same weights' if is_copy else CONSOLIDATED_REMEDY}."
        )


def _check_names(found: HfModel, dropped: set[str]) -> None:
    left = dropped.union(found.passing)
    shapes = {
        name: shape
        for name, shape in found.folder.shapes.items()
        if name not in left
        and not (
            name.endswith(quantization.FP8_SCALE) and name.removesuffix(quantization.FP8_SCALE) in found.folder.tensors
        )
    }
    for name, shape in quantization.mxfp4_shapes(found.folder.tensors).items():
        shapes.pop(name + quantization.MXFP4_BLOCKS)
        shapes.pop(name + quantization.MXFP4_SCALES, None)
        shapes[name] = shape
    for name, shape in quantization.int4_shapes(found.folder.tensors).items():
        for suffix in (quantization.INT4_PACKED, quantization.INT4_SCALE, quantization.INT4_SHAPE):
            shapes.pop(name + suffix, None)
        shapes[name] = shape
    # Without a prefix of their own, MTP layers are numbered after the model's layers.
    count, prefix = found.model.num_layers, family_of(found.model).mtp_prefix
    mtp = tuple(prefix or f"model.layers.{count + i}." for i in range(found.model.mtp_layers))
    if mtp and not any(name.startswith(mtp) for name in shapes):
        raise CheckpointError(
            f"config.json has {found.model.mtp_layers} MTP layers, but there is no tensor {mtp[0]}*. Take the "
            "shard that has them, or import without them: --mtp drop."
        )
    found.weights.check_hf(shapes)


def _check_types(found: HfModel) -> None:
    tensors = found.folder.tensors
    faults = [
        *quantization.fp8_faults(tensors, found.fp8_block),
        *quantization.mxfp4_faults(tensors),
        *quantization.int4_faults(tensors),
    ]
    for name in found.weights.hf_shapes:
        dtype = found.dtype(name) if name not in tensors else tensors[name].dtype
        if dtype not in (*FLOATS, *quantization.FP8):
            faults.append(f"{name} is {dtype}, wanted fp64, fp32, bf16, fp16, or fp8 with scales")
    if faults:
        raise CheckpointError(f"{found.folder.path} has tensors of types that cannot be converted:\n{listed(faults)}")


def _equal(found: HfModel, one: str, other: str) -> bool:
    source = found.source()
    if found.dtype(one) != found.dtype(other):
        return False
    sides = [chunks_of(replace(as_stored(found.folder, name), dtype=found.dtype(name))) for name in (one, other)]
    return all(
        torch.equal(fill(a, source).view(torch.uint8), fill(b, source).view(torch.uint8))
        for a, b in zip(*sides, strict=True)
    )
