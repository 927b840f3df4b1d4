"""Which positions of a sequence a context-parallel rank holds."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mcore_rl.parallel.mesh import Axis


def zigzag(full: Tensor, cp: Axis, dim: int = 1) -> Tensor:
    """This rank's positions: chunks r and 2*cp-1-r of 2*cp along `dim`, so that causal work is even.

    The law of Megatron's and TransformerEngine's context parallelism; `unzigzag` undoes it.
    """
    if cp.size == 1:
        return full
    chunks = full.chunk(2 * cp.size, dim=dim)
    return torch.cat([chunks[cp.rank], chunks[2 * cp.size - 1 - cp.rank]], dim=dim).contiguous()


def zigzag_spans(full: Tensor, lengths: Sequence[int], cp: Axis, dim: int = 1) -> Tensor:
    """This rank's positions of spans of these lengths, one behind the other: `zigzag` of each."""
    if cp.size == 1:
        return full
    return torch.cat([zigzag(span, cp, dim) for span in full.split(list(lengths), dim)], dim)


def unzigzag(shards: list[Tensor], dim: int = 1) -> Tensor:
    """The full sequence from the shards of all context-parallel ranks, in rank order."""
    first, second = zip(*(shard.chunk(2, dim=dim) for shard in shards), strict=True)
    return torch.cat([*first, *reversed(second)], dim=dim) if len(shards) > 1 else shards[0]
