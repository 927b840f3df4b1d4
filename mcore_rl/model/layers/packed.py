"""Sequences packed one behind the other into a row ("thd"), with their lengths known to the host."""

from dataclasses import dataclass, field

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor


@dataclass
class PackedParams(PackedSeqParams):
    """Megatron's description of a packed row, and what attention needs of it without waiting for the device."""

    lengths: tuple[int, ...] = ()
    """Positions of each sequence, padding included, over all context-parallel ranks."""
    _orders: dict[int, Tensor] = field(default_factory=dict, repr=False)

    def order(self, ranks: int, device: torch.device) -> Tensor:
        """`gathered_order(self.lengths, ranks)`, made once for all layers."""
        if ranks not in self._orders:
            self._orders[ranks] = gathered_order(self.lengths, ranks).to(device, non_blocking=True)
        return self._orders[ranks]


def packed_params(lengths: tuple[int, ...], device: torch.device) -> PackedParams:
    """The description of a row of sequences of `lengths` positions."""
    bounds = torch.tensor((0, *lengths), dtype=torch.int32).cumsum(0, dtype=torch.int32)
    bounds = bounds.to(device, non_blocking=True)
    return PackedParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
        lengths=lengths,
    )


def gathered_order(lengths: tuple[int, ...], ranks: int) -> Tensor:
    """For each position of the full row, where it lies in the ranks' zig-zag parts put one behind the other.

    Each sequence is cut into 2 * ranks chunks, of which rank r holds chunk r and then chunk 2 * ranks - 1 - r.
    """
    tokens_of_rank = sum(lengths) // ranks
    places, begin = [], 0
    for length in lengths:
        chunk = length // (2 * ranks)
        first = torch.arange(ranks)[:, None] * tokens_of_rank + begin + torch.arange(chunk)
        places += [first.flatten(), (first + chunk).flip(0).flatten()]
        begin += 2 * chunk
    return torch.cat(places)
