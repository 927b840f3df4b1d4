"""Positions of a sequence on each context-parallel rank."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mcore_rl.parallel.mesh import Axis


def zigzag(full: Tensor, cp: Axis, dim: int = 1) -> Tensor:
    """Return this rank's positions: chunks r and 2*cp-1-r of 2*cp along `dim`.

    An early chunk attends to few positions and a late one to many, so that every rank has the same causal work.
    Megatron and TransformerEngine divide sequences in the same way. `unzigzag` is the inverse.
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


def unzigzag(shards: list[Tensor], dim: int = 1) -> Tensor:
    """Return the full sequence from the shards of all context-parallel ranks, in rank order."""
    # Rank r has chunks r and 2*cp-1-r: the second chunks come in descending order of ranks.
    first, second = zip(*(shard.chunk(2, dim=dim) for shard in shards), strict=True)
    return torch.cat([*first, *reversed(second)], dim=dim) if len(shards) > 1 else shards[0]
