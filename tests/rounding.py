"""Bounds for results in fp32, from the number of roundings and from float64, not from one machine's kernels."""

import math

import torch
from torch import nn


def fp32_rounding(largest: float, summands: int) -> float:
    """Return four standard deviations of the error of a sum in fp32, whatever the order in which it is taken.

    Each addition rounds by at most 2**-24 of a partial sum, independently of the others: the errors grow with the root
    of their number (Higham and Mary 2019, doi 10.1137/18M1226312).

    Args:
        largest: of the partial sums, in absolute value.
        summands: number of them.
    """
    return 4 * 2**-24 * largest * math.sqrt(summands)


def change_by_an_ulp(module: nn.Module, seed: int) -> None:
    """Multiply each weight of a model in float64 by 1 + 2**-24 N(0, 1), which is what rounding it to fp32 does."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in module.parameters():
            weight.mul_(1 + 2**-24 * torch.randn(weight.shape, generator=generator, dtype=torch.float64))
