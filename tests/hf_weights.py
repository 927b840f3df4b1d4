"""Conversion of a whole model's weights in memory: Hugging Face's tensors to Megatron's global ones, and back.

Conversions of files are compared with it: the same rules, without chunks, files or workers.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from mcore_rl.config.model import ModelConfig
from mcore_rl.errors import CheckpointError
from mcore_rl.families import weight_map
from mcore_rl.families.weight_map import Region, Shape, WeightBlock, WeightMap, listed


@torch.no_grad()
def to_global(tensors: Mapping[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    """Return Megatron's global tensors of `model` from those of a Hugging Face checkpoint, in the same dtype.

    Experts may be a tensor each or fused. `copy_in` fills the model of any mesh from the result.

    Raises:
        CheckpointError: tensors, which the message names, are missing, left over, of another shape, or duplicates
            that differ.
    """
    fused = any(name.endswith(".experts.gate_up_proj") for name in tensors)
    weights = weight_map(model, "fused" if fused else "each")
    weights.check_hf(_shapes(tensors))
    _check_copies(tensors, weights)
    converted: dict[str, Tensor] = {}
    for block in weights.blocks:
        source = tensors[block.hf_name]
        dtype = torch.float32 if block.mcore_key in weights.fp32_keys else source.dtype
        target = converted.get(block.mcore_key)
        if target is None:
            target = source.new_zeros(weights.mcore_shapes[block.mcore_key], dtype=dtype)
            converted[block.mcore_key] = target
        if target.dtype != dtype:
            raise CheckpointError(f"{block.hf_name} is {dtype}, other parts of {block.mcore_key} {target.dtype}.")
        _at(target, block.mcore_where).copy_(_hf_side(source, block))
    return converted


@torch.no_grad()
def to_hf(global_tensors: Mapping[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    """Return the tensors of a Hugging Face checkpoint, one for each expert: `to_global` undone, bit for bit.

    The padding of the vocabulary is left out.

    Raises:
        CheckpointError: tensors, which the message names, are missing or left over.
    """
    weights = weight_map(model)
    weights.check_mcore(_shapes(global_tensors))
    converted: dict[str, Tensor] = {}
    for block in weights.blocks:
        source = global_tensors[block.mcore_key]
        target = converted.get(block.hf_name)
        if target is None:
            target = converted[block.hf_name] = source.new_empty(weights.hf_shapes[block.hf_name])
        part = _hf_side(target, block)
        part.copy_(_at(source, block.mcore_where).reshape(part.shape))
    return converted | {copy.name: converted[copy.original].clone() for copy in weights.copies if copy.written}


def _check_copies(tensors: Mapping[str, Tensor], weights: WeightMap) -> None:
    differ = [
        f"{copy.name} differs from {copy.original}"
        for copy in weights.copies
        if copy.name in tensors and not torch.equal(tensors[copy.name], tensors[copy.original])
    ]
    if differ:
        raise CheckpointError(
            f"Megatron shares tensors that these weights have in different versions:\n{listed(differ)}"
        )


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, Shape]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _at(tensor: Tensor, where: Region) -> Tensor:
    """Return a view of the region."""
    return tensor[tuple(slice(*span) for span in where)]


def _hf_side(tensor: Tensor, block: WeightBlock) -> Tensor:
    """Return a view of the block's region of its Hugging Face tensor, with Megatron's order of axes."""
    part = _at(tensor, block.hf_where)
    return part.mT if block.transposed else part
