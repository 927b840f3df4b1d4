"""Positions of a sequence on each context-parallel rank."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mcore_rl.megatron.mesh import Axis


def zigzag(full: Tensor, cp: Axis, dim: int = 1) -> Tensor:
    """Return this rank's positions: chunks r and 2*cp-1-r of 2*cp along `dim`.

    An early chunk attends to few positions and a late one to many, so that every rank has the same causal work.
    Megatron and TransformerEngine divide sequences in the same way.
    """
    if cp.size == 1:
        return full
    chunks = full.chunk(2 * cp.size, dim=dim)
    return torch.cat([chunks[cp.rank], chunks[2 * cp.size - 1 - cp.rank]], dim=dim).contiguous()


def zigzag_spans(full: Tensor, lengths: Sequence[int], cp: Axis, dim: int = 1) -> Tensor:
    """Return this rank's positions of packed sequences of these lengths: `zigzag` of each, concatenated."""
    if cp.size == 1:
        return full
    return torch.cat([zigzag(span, cp, dim) for span in full.split(list(lengths), dim)], dim)
