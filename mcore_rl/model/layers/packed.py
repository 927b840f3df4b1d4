"""Sequences packed one behind the other into a row ("thd"), with their lengths known to the host."""

from dataclasses import dataclass, field

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

SHORT = 64
"""Sequences of so many positions at the most are filled up to a common width, a multiple of WIDTH_MULTIPLE."""
WIDTH_MULTIPLE = 8


@dataclass(frozen=True, slots=True)
class SideBySide:
    """The sequences of a packed row as a few batches of equally wide rows, one behind the other.

    A row of a batch is a sequence with its last position repeated behind it: causal attention does not see that.
    """

    shapes: tuple[tuple[int, int], ...]
    """Rows and width of each batch."""
    places_N: Tensor
    """Of the batches' positions in the packed row."""
    back_T: Tensor
    """Of the packed row's positions in the batches."""


@dataclass
class PackedParams(PackedSeqParams):
    """Megatron's description of a packed row, and what attention needs of it without waiting for the device."""

    lengths: tuple[int, ...] = ()
    """Positions of each sequence, padding included, over all context-parallel ranks."""
    _orders: dict[int, Tensor] = field(default_factory=dict, repr=False)
    _batches: list[SideBySide | None] = field(default_factory=list, repr=False)

    def order(self, ranks: int, device: torch.device) -> Tensor:
        """`gathered_order(self.lengths, ranks)`, made once for all layers."""
        if ranks not in self._orders:
            self._orders[ranks] = gathered_order(self.lengths, ranks).to(device, non_blocking=True)
        return self._orders[ranks]

    def batches(self, device: torch.device) -> SideBySide | None:
        """`side_by_side(self.lengths, device)`, made once for all layers."""
        if not self._batches:
            self._batches.append(side_by_side(self.lengths, device))
        return self._batches[0]


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


def side_by_side(lengths: tuple[int, ...], device: torch.device) -> SideBySide | None:
    """The sequences of `lengths` in fewer batches than there are sequences; None when that is not possible."""
    members: dict[int, list[int]] = {}
    for number, length in enumerate(lengths):
        width = -(-length // WIDTH_MULTIPLE) * WIDTH_MULTIPLE if length <= SHORT else length
        members.setdefault(width, []).append(number)
    if len(members) == len(lengths):
        return None
    lengths_R = torch.tensor(lengths)
    begins_R = lengths_R.cumsum(0) - lengths_R
    places, back_T, begin = [], torch.empty(sum(lengths), dtype=torch.int64), 0
    for width, numbers in members.items():
        inside_W = torch.arange(width)
        places_BW = begins_R[numbers, None] + torch.minimum(inside_W, lengths_R[numbers, None] - 1)
        is_own_BW = inside_W < lengths_R[numbers, None]
        back_T[places_BW[is_own_BW]] = begin + is_own_BW.flatten().nonzero().flatten()
        places.append(places_BW.flatten())
        begin += places_BW.numel()
    shapes = tuple((len(numbers), width) for width, numbers in members.items())
    places_N = torch.cat(places).to(device, non_blocking=True)
    return SideBySide(shapes, places_N, back_T.to(device, non_blocking=True))
