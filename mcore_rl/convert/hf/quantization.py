"""Quantized tensors of published checkpoints, and the values that they represent.

fp8 (DeepSeek): `X` `[rows, columns]` in e4m3, and `X_scale_inv` with a scale for each square block of `X`, in fp32, in
bf16, or as powers of two (e8m0: the exponent plus 127 in a byte).

mxfp4 (gpt-oss): 4-bit floats (e2m1) in blocks of 32 with a power of two each (e8m0). `X_blocks`
`[E, rows, columns / 32, 16]` has two values a byte, the first in its low half; `X_scales` `[E, rows, columns / 32]` the
exponents plus 127, where 255 is NaN. They represent `X` `[E, columns, rows]`.

int4 (Kimi-K2, the format pack-quantized of compressed-tensors): whole numbers from -8 to 7 in blocks of 32 with a scale
each. `X_packed` `[rows, columns / 8]` has eight numbers an int32, each plus 8, the first in the lowest four bits;
`X_scale` `[rows, columns / 32]` is a float; `X_shape` repeats the shape of `X` `[rows, columns]`.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from mcore_rl.convert.hf.folder import HfTensor
from mcore_rl.errors import CheckpointError
from mcore_rl.families.weight_map import FP8_BLOCK, Shape

FP8 = (torch.float8_e4m3fn,)
FP8_FORMATS = ("e4m3", "float8_e4m3fn")
"""Names of the format in config.json: DeepSeek's and MiniMax's."""
FP8_SCALE = "_scale_inv"
"""`X.weight_scale_inv` holds the scales of the fp8 blocks of `X.weight`."""
FP8_SCALE_TYPES = (torch.float32, torch.bfloat16, torch.float8_e8m0fnu)
POWERS = "ue8m0"
"""The `scale_fmt` in config.json of scales that are powers of two, whatever type they are stored in."""
FP8_LARGEST = 448.0
BAND_FP8_BLOCKS = 8
"""Rows of fp8 blocks that are dequantized at a time."""

MXFP4_BLOCKS, MXFP4_SCALES = "_blocks", "_scales"
MXFP4_BLOCK, MXFP4_BLOCK_BYTES = 32, 16
"""Values of a block, and its bytes."""
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_VALUES = torch.tensor([*MAGNITUDES, *(-value for value in MAGNITUDES)])
BYTE_VALUES = torch.stack([E2M1_VALUES.repeat(16), E2M1_VALUES.repeat_interleave(16)], dim=1)
"""`[256, 2]`: the two values of a byte, the low half first."""
E8M0_POWERS = torch.tensor([2.0**exponent for exponent in range(-127, 128)] + [float("nan")])
"""`[256]`: the power of two of a scale; 255 is NaN."""
BAND_BYTES = 1 << 20
"""Bytes of mxfp4 and int4 blocks that are unpacked at a time."""

INT4_PACKED, INT4_SCALE, INT4_SHAPE = "_packed", "_scale", "_shape"
INT4_BLOCK, INT4_PER_WORD = 32, 8
"""Numbers of a block, and of an int32."""
INT4_SHIFTS = torch.arange(0, 32, 4, dtype=torch.int32)
INT4_SCALE_TYPES = (torch.bfloat16, torch.float16, torch.float32)
INT4_SETTINGS: dict[str, Any] = {"num_bits": 4, "type": "int", "symmetric": True, "group_size": INT4_BLOCK}
"""Settings in config.json of each supported group of layers with int4 weights."""


def fp8_block_size(config: Mapping[str, Any]) -> int:
    """Return the rows and columns of an fp8 block; CheckpointError for unsupported quantizations."""
    quantization = config.get("quantization_config")
    if not quantization:
        return FP8_BLOCK
    method = quantization.get("quant_method")
    block = quantization.get("weight_block_size") or [FP8_BLOCK, FP8_BLOCK]
    if method == "mxfp4" or (method == "compressed-tensors" and _is_int4(quantization)):
        return FP8_BLOCK
    size = block[0] if isinstance(block, list) and isinstance(block[0], int) else 0
    is_read = quantization.get("fmt", "e4m3") in FP8_FORMATS
    if method != "fp8" or block != [size, size] or size < 1 or not is_read:
        raise CheckpointError(
            f"config.json has quantization_config {quantization}. Only fp8 (e4m3) in square blocks, mxfp4, and int4 in "
            "blocks of 32 (pack-quantized, symmetric) are read here: dequantize the weights first."
        )
    return int(size)


def _is_int4(quantization: Mapping[str, Any]) -> bool:
    groups = quantization.get("config_groups")
    if quantization.get("format") != "pack-quantized" or not isinstance(groups, Mapping) or not groups:
        return False
    weights = [group.get("weights") if isinstance(group, Mapping) else None for group in groups.values()]
    return all(
        isinstance(settings, Mapping)
        and {name: settings.get(name) for name in INT4_SETTINGS} == INT4_SETTINGS
        and not settings.get("actorder")
        for settings in weights
    )


def with_scale_types(tensors: Mapping[str, HfTensor], config: Mapping[str, Any]) -> dict[str, HfTensor]:
    """Return the tensors; scales stored as plain bytes get the type set by `scale_fmt` in config.json."""
    quantization = config.get("quantization_config") or {}
    if quantization.get("scale_fmt") != POWERS:
        return dict(tensors)
    return {
        name: replace(tensor, dtype=torch.float8_e8m0fnu)
        if name.endswith(FP8_SCALE) and tensor.dtype == torch.uint8
        else tensor
        for name, tensor in tensors.items()
    }


def fp8_faults(tensors: Mapping[str, HfTensor], block: int) -> Iterator[str]:
    """Yield a sentence for each fp8 tensor that does not fit its scales."""
    for name, tensor in tensors.items():
        scale = tensors.get(name + FP8_SCALE)
        if tensor.dtype in FP8 and scale is None:
            yield f"{name} is fp8, but {name + FP8_SCALE} is missing: without its scales it means nothing"
        elif scale is not None and tensor.dtype not in FP8:
            yield f"{name} is {tensor.dtype}, yet has scales {name + FP8_SCALE}"
        elif scale is not None:
            wanted = tuple(math.ceil(size / block) for size in tensor.shape)
            if len(wanted) != 2 or scale.shape != wanted or scale.dtype not in FP8_SCALE_TYPES:
                types = ", ".join(map(str, FP8_SCALE_TYPES))
                yield f"{name + FP8_SCALE} is {scale.dtype} {scale.shape}, wanted {wanted} in one of {types}"


def dequantize_fp8(rows: Tensor, scales: Tensor, first_row: int, block: int, dtype: torch.dtype) -> Tensor:
    """Return each fp8 element of `rows` `[n, columns]` times the scale of its block, rounded once to `dtype`. `scales`
    are fp32 `[blocks of rows, blocks of columns]` of the whole tensor; `first_row`, the index of the first of `rows`,
    need not begin a block.
    """
    values = torch.empty(rows.shape, dtype=dtype)
    column_blocks = torch.arange(rows.shape[1]) // block
    # In bands: the fp32 copies of a whole tensor would take four times its bytes, twice.
    for start in range(0, len(rows), BAND_FP8_BLOCKS * block):
        band = rows[start : start + BAND_FP8_BLOCKS * block].float()
        row_blocks = torch.arange(first_row + start, first_row + start + len(band)) // block
        low, high = int(row_blocks[0]), int(row_blocks[-1]) + 1
        wide = scales[low:high].index_select(1, column_blocks)
        band *= wide.index_select(0, row_blocks - low)
        values[start : start + len(band)] = band
    return values


def quantize_fp8(
    weights: Tensor, known: Tensor | None, block: int, scale_dtype: torch.dtype, *, in_powers: bool
) -> tuple[Tensor, Tensor]:
    """Return weights as numbers of fp8 blocks, and the blocks' scales.

    A block keeps its `known` scale if that gives back each of its weights bit for bit, as it does where no step has
    moved them. The scale of any other block is its largest magnitude / 448, as DeepSeek's.

    Args:
        weights: `[rows, columns]` in the type that they are trained in; the first row and column begin a block.
        known: Scales of an earlier version of the weights, fp32 `[blocks of rows, blocks of columns]`; None: none are.
        block: Rows and columns of a block.
        scale_dtype: New scales are rounded to this type before they are used.
        in_powers: New scales are rounded up to powers of two.

    Returns:
        The numbers in e4m3 `[rows, columns]`, and the scales, fp32 `[blocks of rows, blocks of columns]`. A scale is
        NaN or infinite where a weight of its block is.
    """
    rows, columns = weights.shape
    padded = pad(weights.float(), (0, -columns % block, 0, -rows % block))
    blocks = padded.unflatten(1, (-1, block)).unflatten(0, (-1, block))  # [row blocks, block, column blocks, block]
    made = fp8_scales(blocks.abs().amax((1, 3)))
    if in_powers:
        mantissa, exponent = torch.frexp(made)  # made = mantissa x 2^exponent, 0.5 <= mantissa < 1
        made = torch.where(made.isfinite(), torch.ldexp(torch.ones(()), exponent - (mantissa == 0.5).int()), made)
    scales = made.to(scale_dtype).float()
    if known is not None:
        known_back = _fp8_numbers(blocks, _each(known)).float().mul_(_each(known)).to(weights.dtype)
        scales = torch.where((known_back.float() == blocks).all(3).all(1), known, scales)
    return _fp8_numbers(blocks, _each(scales)).flatten(2).flatten(0, 1)[:rows, :columns], scales


def fp8_scales(largest: Tensor) -> Tensor:
    """Return the scales of blocks with these largest magnitudes, fp32."""
    # The smallest normal number: a block of zeros would have no scale.
    return (largest / FP8_LARGEST).clamp_(min=torch.finfo(torch.float32).tiny)


def fp8_rounded(values: Tensor, scales: Tensor) -> Tensor:
    """Return values as the fp8 numbers with these scales, one for each value, represent them."""
    return _fp8_numbers(values.float(), scales).float().mul_(scales).to(values.dtype)


def _fp8_numbers(values: Tensor, scales: Tensor) -> Tensor:
    """Return e4m3 numbers of fp32 values; a scale that was rounded down must not make the largest a NaN."""
    return (values / scales).clamp_(-FP8_LARGEST, FP8_LARGEST).to(torch.float8_e4m3fn)


def _each(scales: Tensor) -> Tensor:
    """Return scales of blocks so that each multiplies its block `[row blocks, block, column blocks, block]`."""
    return scales[:, None, :, None]


def mxfp4_shapes(tensors: Mapping[str, HfTensor]) -> dict[str, Shape]:
    """Return names and shapes of the tensors that mxfp4 blocks represent."""
    found: dict[str, Shape] = {}
    for name, tensor in tensors.items():
        if name.endswith(MXFP4_BLOCKS) and tensor.dtype == torch.uint8 and len(tensor.shape) == 4:
            experts, rows, blocks, _ = tensor.shape
            found[name.removesuffix(MXFP4_BLOCKS)] = (experts, blocks * MXFP4_BLOCK, rows)
    return found


def mxfp4_faults(tensors: Mapping[str, HfTensor]) -> Iterator[str]:
    """Yield a sentence for each mxfp4 tensor with blocks and scales that do not fit."""
    for name in mxfp4_shapes(tensors):
        blocks, scales = tensors[name + MXFP4_BLOCKS], tensors.get(name + MXFP4_SCALES)
        if blocks.shape[3] != MXFP4_BLOCK_BYTES:
            yield (f"{name + MXFP4_BLOCKS} has blocks of {blocks.shape[3]} bytes, wanted {MXFP4_BLOCK_BYTES}")
        if scales is None:
            yield (f"{name + MXFP4_BLOCKS} has no {name + MXFP4_SCALES}: without its scales it means nothing")
        elif scales.dtype != torch.uint8 or scales.shape != blocks.shape[:3]:
            yield (f"{name + MXFP4_SCALES} is {scales.dtype} {scales.shape}, wanted torch.uint8 {blocks.shape[:3]}")
        if name in tensors:
            yield f"{name} is there, and as {name + MXFP4_BLOCKS} too"


def unpack_mxfp4(out: Tensor, blocks: Tensor, scales: Tensor) -> None:
    """Fill `out` `[rows, columns]` from `blocks` `[rows, G, 16]` and `scales` `[rows, G]`: fp32, rounded once."""
    rows = max(1, BAND_BYTES // max(1, blocks[0].numel() if len(blocks) else 1))
    for start in range(0, len(blocks), rows):
        band = slice(start, start + rows)
        pairs = BYTE_VALUES[blocks[band].int()].flatten(-2)  # [rows, G, 32]
        out[band] = pairs.mul_(E8M0_POWERS[scales[band].int()].unsqueeze(-1)).flatten(-2)


def int4_shapes(tensors: Mapping[str, HfTensor]) -> dict[str, Shape]:
    """Return names and shapes of the tensors that int4 blocks represent."""
    found: dict[str, Shape] = {}
    for name, tensor in tensors.items():
        if name.endswith(INT4_PACKED) and tensor.dtype == torch.int32 and len(tensor.shape) == 2:
            rows, words = tensor.shape
            found[name.removesuffix(INT4_PACKED)] = (rows, words * INT4_PER_WORD)
    return found


def int4_faults(tensors: Mapping[str, HfTensor]) -> Iterator[str]:
    """Yield a sentence for each int4 tensor with blocks and scales that do not fit."""
    for name, (rows, columns) in int4_shapes(tensors).items():
        scales, wanted = tensors.get(name + INT4_SCALE), (rows, columns // INT4_BLOCK)
        if columns % INT4_BLOCK:
            yield f"{name + INT4_PACKED} has {columns} numbers a row, which are no whole blocks of {INT4_BLOCK}"
        elif scales is None:
            yield f"{name + INT4_PACKED} has no {name + INT4_SCALE}: without its scales it means nothing"
        elif scales.dtype not in INT4_SCALE_TYPES or scales.shape != wanted:
            types = ", ".join(map(str, INT4_SCALE_TYPES))
            yield f"{name + INT4_SCALE} is {scales.dtype} {scales.shape}, wanted {wanted} in one of {types}"
        if name in tensors:
            yield f"{name} is there, and as {name + INT4_PACKED} too"


def unpack_int4(out: Tensor, packed: Tensor, scales: Tensor) -> None:
    """Fill `out` `[rows, columns]` from `packed` `[rows, columns / 8]` and `scales` `[rows, columns / 32]`."""
    rows = max(1, BAND_BYTES // max(1, packed.shape[1] * packed.element_size()))
    for start in range(0, len(packed), rows):
        band = slice(start, start + rows)
        # The shift of a negative word copies its sign, which the mask takes off again.
        numbers = ((packed[band, :, None] >> INT4_SHIFTS & 15) - 8).flatten(1).unflatten(1, (-1, INT4_BLOCK))
        out[band] = (numbers.float() * scales[band, :, None].float()).flatten(1)


def pack_int4(weights: Tensor, scales: Tensor) -> Tensor:
    """Return `weights` `[rows, columns]` as words `[rows, columns / 8]` of whole numbers of steps of `scales`, clamped
    to -8 to 7: what was dequantized with these scales gives back the same words.
    """
    steps = weights.float().unflatten(1, (-1, INT4_BLOCK)) / scales.float()[..., None]
    numbers = steps.round().clamp(-8, 7).to(torch.int32) + 8
    parts = numbers.flatten(1).unflatten(1, (-1, INT4_PER_WORD)) << INT4_SHIFTS
    words: Tensor = parts.sum(-1, dtype=torch.int32)
    return words
