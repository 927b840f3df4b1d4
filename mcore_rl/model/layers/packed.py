"""Sequences packed into a row (Megatron's "thd"), with their lengths known on the host."""

from dataclasses import dataclass, field

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from mcore_rl.megatron.transfer import to_device
from mcore_rl.megatron.varlen import Bounds

SHORT = 64
"""Sequences up to this length are padded to a multiple of WIDTH_MULTIPLE, so that more of them share a batch."""
WIDTH_MULTIPLE = 8
"""The widths of batches of short sequences are multiples of this."""


@dataclass(frozen=True, slots=True)
class SideBySide:
    """Batches of rows of equal width that hold the sequences of a packed row.

    A row of a batch is a sequence, padded by repeating its last position, which causal attention ignores.
    """

    shapes: tuple[tuple[int, int], ...]
    """Number of rows and width of each batch."""
    positions_N: Tensor
    """Index in the packed row of each position of the concatenated batches."""
    back_T: Tensor
    """Index in the batches of each position of the packed row."""


@dataclass(frozen=True, slots=True)
class RankChunks:
    """The chunks of a packed row that a context-parallel rank computes: two of every sequence, each with the keys of
    its sequence up to its own end.
    """

    queries: Bounds
    """Bounds of the chunks in this rank's queries."""
    keys: Bounds
    """Bounds of each chunk's keys."""
    order_U: Tensor
    """Index of each of these keys in the concatenated parts of the ranks; U is (2 * ranks + 1) / (2 * ranks) times the
    length of the row."""


@dataclass
class PackedParams(PackedSeqParams):
    """Megatron's description of a packed row, plus its lengths on the host, where reading them does not synchronize."""

    lengths: tuple[int, ...] = ()
    """Number of positions of each sequence, including padding, over all context-parallel ranks."""
    _bounds: list[Bounds] = field(default_factory=list, repr=False)
    _orders: dict[int, Tensor] = field(default_factory=dict, repr=False)
    _batches: list[SideBySide | None] = field(default_factory=list, repr=False)
    _chunks: dict[tuple[int, int], RankChunks] = field(default_factory=dict, repr=False)

    def bounds(self, device: torch.device) -> Bounds:
        """Return the bounds of the sequences, computed once for all layers."""
        if not self._bounds:
            cumulative = torch.tensor((0, *self.lengths), dtype=torch.int32).cumsum(0, dtype=torch.int32)
            self._bounds.append(Bounds(to_device(cumulative, device), max(self.lengths)))
        return self._bounds[0]

    def order(self, ranks: int, device: torch.device) -> Tensor:
        """Return `gathered_order(self.lengths, ranks)`, computed once for all layers."""
        if ranks not in self._orders:
            self._orders[ranks] = to_device(gathered_order(self.lengths, ranks), device)
        return self._orders[ranks]

    def chunks(self, rank: int, ranks: int, device: torch.device) -> RankChunks:
        """Return `rank_chunks(self.lengths, rank, ranks, device)`, computed once for all layers."""
        if (rank, ranks) not in self._chunks:
            self._chunks[rank, ranks] = rank_chunks(self.lengths, rank, ranks, device)
        return self._chunks[rank, ranks]

    def batches(self, device: torch.device) -> SideBySide | None:
        """Return `side_by_side(self.lengths, device)`, computed once for all layers."""
        if not self._batches:
            self._batches.append(side_by_side(self.lengths, device))
        return self._batches[0]


def packed_params(lengths: tuple[int, ...], device: torch.device) -> PackedParams:
    """Return the description of a row of sequences with these lengths."""
    packed = PackedParams(qkv_format="thd", lengths=lengths)
    cumulative, longest = packed.bounds(device)
    packed.cu_seqlens_q = packed.cu_seqlens_kv = cumulative
    packed.max_seqlen_q = packed.max_seqlen_kv = longest
    return packed


def gathered_order(lengths: tuple[int, ...], ranks: int) -> Tensor:
    """Return the index of each position of the full row in the concatenated zig-zag parts of the ranks.

    Each sequence is split into 2 * ranks chunks; rank r has chunk r, followed by chunk 2 * ranks - 1 - r.
    """
    tokens_of_rank = sum(lengths) // ranks
    parts, begin = [], 0
    for length in lengths:
        chunk = length // (2 * ranks)
        first = torch.arange(ranks)[:, None] * tokens_of_rank + begin + torch.arange(chunk)
        # The second chunks are in reverse order of the ranks.
        parts += [first.flatten(), (first + chunk).flip(0).flatten()]
        begin += 2 * chunk
    return torch.cat(parts)


def rank_chunks(lengths: tuple[int, ...], rank: int, ranks: int, device: torch.device) -> RankChunks:
    """Return the chunks of a context-parallel rank, `rank` and then `2 * ranks - 1 - rank` of each sequence."""
    order_T = gathered_order(lengths, ranks)
    sizes: list[int] = []
    ends: list[int] = []
    parts, begin = [], 0
    for length in lengths:
        size = length // (2 * ranks)
        of_chunks = (rank + 1) * size, (2 * ranks - rank) * size
        sizes += [size, size]
        ends += of_chunks
        parts += [order_T[begin : begin + end] for end in of_chunks]
        begin += length
    queries, keys = (
        Bounds(to_device(torch.tensor((0, *counts)).cumsum(0).to(torch.int32), device), max(counts))
        for counts in (sizes, ends)
    )
    return RankChunks(queries, keys, to_device(torch.cat(parts), device))


def side_by_side(lengths: tuple[int, ...], device: torch.device) -> SideBySide | None:
    """Return the sequences in fewer batches than there are sequences; None if no two have the same width."""
    members: dict[int, list[int]] = {}
    for index, length in enumerate(lengths):
        width = -(-length // WIDTH_MULTIPLE) * WIDTH_MULTIPLE if length <= SHORT else length
        members.setdefault(width, []).append(index)
    if len(members) == len(lengths):
        return None
    lengths_R = torch.tensor(lengths)
    begins_R = lengths_R.cumsum(0) - lengths_R
    parts, back_T, begin = [], torch.empty(sum(lengths), dtype=torch.int64), 0
    for width, sequences in members.items():
        inside_W = torch.arange(width)
        positions_BW = begins_R[sequences, None] + torch.minimum(inside_W, lengths_R[sequences, None] - 1)
        is_real_BW = inside_W < lengths_R[sequences, None]
        back_T[positions_BW[is_real_BW]] = begin + is_real_BW.flatten().nonzero().flatten()
        parts.append(positions_BW.flatten())
        begin += positions_BW.numel()
    shapes = tuple((len(sequences), width) for width, sequences in members.items())
    positions_N = to_device(torch.cat(parts), device)
    return SideBySide(shapes, positions_N, to_device(back_T, device))
