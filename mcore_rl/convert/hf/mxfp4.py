"""The experts of published gpt-oss checkpoints: 4-bit floats (e2m1) in blocks of 32 with a power of two each (e8m0).

`X_blocks` `[E, rows, columns / 32, 16]` has two values a byte, the first in its low half; `X_scales`
`[E, rows, columns / 32]` the exponents plus 127, where 255 is no number. They stand for `X` `[E, columns, rows]`.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from mcore_rl.convert.hf.folder import Stored
from mcore_rl.families.weight_map import Shape

BLOCKS, SCALES = "_blocks", "_scales"
BLOCK, BYTES = 32, 16
"""Values, and bytes, of a block."""
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = torch.tensor([*MAGNITUDES, *(-value for value in MAGNITUDES)])
PAIRS = torch.stack([VALUES.repeat(16), VALUES.repeat_interleave(16)], dim=1)
"""`[256, 2]`: what a byte stands for."""
POWERS = torch.tensor([2.0**exponent for exponent in range(-127, 128)] + [float("nan")])
BAND_BYTES = 1 << 20
"""Blocks that are unpacked at a time."""


def packed(tensors: Mapping[str, Stored]) -> dict[str, Shape]:
    """Names and shapes of what blocks stand for."""
    found: dict[str, Shape] = {}
    for name, stored in tensors.items():
        if name.endswith(BLOCKS) and stored.dtype == torch.uint8 and len(stored.shape) == 4:
            experts, rows, blocks, _ = stored.shape
            found[name.removesuffix(BLOCKS)] = (experts, blocks * BLOCK, rows)
    return found


def faults(tensors: Mapping[str, Stored]) -> Iterator[str]:
    """What is wrong with the blocks and their scales."""
    for name in packed(tensors):
        blocks, scales = tensors[name + BLOCKS], tensors.get(name + SCALES)
        if blocks.shape[3] != BYTES:
            yield f"{name + BLOCKS} has blocks of {blocks.shape[3]} bytes, wanted {BYTES}"
        if scales is None:
            yield f"{name + BLOCKS} has no {name + SCALES}: without its scales it means nothing"
        elif scales.dtype != torch.uint8 or scales.shape != blocks.shape[:3]:
            yield f"{name + SCALES} is {scales.dtype} {scales.shape}, wanted torch.uint8 {blocks.shape[:3]}"
        if name in tensors:
            yield f"{name} is there, and as {name + BLOCKS} too"


def unpack(out: Tensor, blocks: Tensor, scales: Tensor) -> None:
    """Fill `out` `[rows, columns]` with what `blocks` `[rows, G, 16]` and `scales` `[rows, G]` stand for.

    The product is exact in fp32, and rounded once, to the type of `out`.
    """
    rows = max(1, BAND_BYTES // max(1, blocks[0].numel() if len(blocks) else 1))
    for start in range(0, len(blocks), rows):
        band = slice(start, start + rows)
        pairs = PAIRS[blocks[band].int()].flatten(-2)  # [rows, G, 32]
        out[band] = pairs.mul_(POWERS[scales[band].int()].unsqueeze(-1)).flatten(-2)
