"""A Hugging Face folder as one of the families: its config understood, its tensors paired, all from headers."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from mcore_rl.checks.model import checked_model_from_hf
from mcore_rl.config.model import ModelConfig
from mcore_rl.convert.copying.content import fill
from mcore_rl.convert.copying.plan import Pair, Target, chunks_of
from mcore_rl.convert.copying.sources import FP8, SCALE, HfSource, whole
from mcore_rl.convert.hf import mxfp4
from mcore_rl.convert.hf.folder import HfFolder, open_hf
from mcore_rl.errors import CheckpointError
from mcore_rl.families import weight_map
from mcore_rl.families.rules import ExpertLayout
from mcore_rl.families.weight_map import WeightMap, listed

Mtp = Literal["keep", "drop"]
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True, slots=True)
class HfModel:
    """A folder whose tensors are exactly those of `model`."""

    folder: HfFolder
    model: ModelConfig
    weights: WeightMap
    block: int
    """Rows and columns of an fp8 block."""
    dropped: tuple[str, ...]
    """Tensors that are left out because the user said so."""

    def dtype(self, name: str) -> torch.dtype:
        """The type that a tensor is read as: of blocks with scales that of the model."""
        stored = self.folder.tensors.get(name)
        if stored is None or stored.dtype in FP8:
            return _model_dtype(self.folder.config or {})
        return stored.dtype

    def source(self) -> HfSource:
        """To read it."""
        return HfSource(self.folder, self.block)


def open_hf_model(path: Path, *, mtp: Mtp = "keep", vocab_multiple: int = 0) -> HfModel:
    """The model in a folder; `vocab_multiple` 0: as our config has it. CheckpointError or ConfigError by name."""
    folder = open_hf(path)
    if folder.config is None:
        raise CheckpointError(
            f"{path} has no config.json: what model is it? Take the one that belongs to the weights."
        )
    model, layout = _model(folder.config, vocab_multiple), expert_layout(folder)
    kept = model.model_copy(update={"mtp_layers": 0}) if mtp == "drop" else model
    weights = weight_map(kept, layout)
    dropped: set[str] = set()
    if kept != model:
        every = weight_map(model, layout)
        names = every.hf_shapes.keys() | {copy.name for copy in every.copies}
        dropped = names - weights.hf_shapes.keys() - {copy.name for copy in weights.copies}
    found = HfModel(
        folder=folder,
        model=kept,
        weights=weights,
        block=_block(folder.config),
        dropped=tuple(sorted(dropped & folder.tensors.keys())),
    )
    weights.prove()
    _check_names(found, dropped)
    _check_types(found)
    return found


def check_copies(found: HfModel) -> None:
    """Reads the tensors that repeat others; CheckpointError when they differ."""
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


def expert_layout(folder: HfFolder) -> ExpertLayout:
    """Whether the experts of a layer are one tensor."""
    return "fused" if any(name.endswith(".experts.gate_up_proj") for name in folder.tensors) else "each"


def _model(config: dict[str, Any], vocab_multiple: int) -> ModelConfig:
    model = checked_model_from_hf(config)
    return model.model_copy(update={"vocab_multiple": vocab_multiple}) if vocab_multiple else model


def _model_dtype(config: dict[str, Any]) -> torch.dtype:
    name = config.get("dtype") or config.get("torch_dtype")
    return {"float32": torch.float32, "float16": torch.float16}.get(str(name), torch.bfloat16)


def _block(config: dict[str, Any]) -> int:
    """128, or what the config says of fp8 blocks; quantizations other than these and mxfp4 are refused."""
    quantization = config.get("quantization_config")
    if not quantization:
        return 128
    method, block = quantization.get("quant_method"), quantization.get("weight_block_size") or [128, 128]
    if method == "mxfp4":
        return 128
    if method != "fp8" or block[0] != block[1] or quantization.get("fmt", "e4m3") != "e4m3":
        raise CheckpointError(
            f"config.json has quantization_config {quantization}. Only fp8 (e4m3) in square blocks and mxfp4 are "
            "read here: dequantize the weights first."
        )
    return int(block[0])


def _check_names(found: HfModel, dropped: set[str]) -> None:
    ours = {
        name: shape
        for name, shape in found.folder.shapes.items()
        if name not in dropped
        and not (name.endswith(SCALE) and name.removesuffix(SCALE) in found.folder.tensors)
    }
    for name, shape in mxfp4.packed(found.folder.tensors).items():
        ours.pop(name + mxfp4.BLOCKS)
        ours.pop(name + mxfp4.SCALES, None)
        ours[name] = shape
    count = found.model.num_layers
    mtp = tuple(f"model.layers.{count + i}." for i in range(found.model.mtp_layers))
    if mtp and not any(name.startswith(mtp) for name in ours):
        raise CheckpointError(
            f"config.json tells of {found.model.mtp_layers} MTP layers, but there is no tensor {mtp[0]}*. Take the "
            "shard that has them, or import without them: --mtp drop."
        )
    found.weights.check_hf(ours)


def _check_types(found: HfModel) -> None:
    tensors = found.folder.tensors
    faults = [*_scale_faults(found), *mxfp4.faults(tensors)]
    for name in found.weights.hf_shapes:
        dtype = found.dtype(name) if name not in tensors else tensors[name].dtype
        if dtype not in (*FLOATS, *FP8):
            faults.append(f"{name} is {dtype}, wanted fp32, bf16, fp16, or fp8 with scales")
    if faults:
        raise CheckpointError(
            f"{found.folder.path} has tensors of types that cannot be converted:\n{listed(faults)}"
        )


def _scale_faults(found: HfModel) -> Iterator[str]:
    tensors, block = found.folder.tensors, found.block
    for name, stored in tensors.items():
        scale = tensors.get(name + SCALE)
        if stored.dtype in FP8 and scale is None:
            yield f"{name} is fp8, but {name + SCALE} is missing: without its scales it means nothing"
        elif scale is not None and stored.dtype not in FP8:
            yield f"{name} is {stored.dtype}, yet has scales {name + SCALE}"
        elif scale is not None:
            wanted = tuple(math.ceil(size / block) for size in stored.shape)
            if len(wanted) != 2 or scale.shape != wanted or scale.dtype != torch.float32:
                yield f"{name + SCALE} is {scale.dtype} {scale.shape}, wanted torch.float32 {wanted}"


def _equal(found: HfModel, one: str, other: str) -> bool:
    """Bit for bit, a chunk at a time."""
    source, shape = found.source(), found.folder.tensors[one].shape
    if found.dtype(one) != found.dtype(other):
        return False
    sides = [
        chunks_of(
            Target(
                name=name,
                shape=shape,
                dtype=found.dtype(name),
                pairs=(Pair(whole(shape), name, whole(shape)),),
            )
        )
        for name in (one, other)
    ]
    return all(
        torch.equal(fill(a, source).view(torch.uint8), fill(b, source).view(torch.uint8))
        for a, b in zip(*sides, strict=True)
    )
