"""Which tokens of which samples stand where in a microbatch, and which of them the routers of this rank see."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_rl.parallel.mesh import Mesh
from mcore_rl.parallel.sequence import zigzag, zigzag_spans


@dataclass(frozen=True, slots=True)
class Span:
    """The first `num_tokens` tokens of a sample, padded to `padded` positions; sample < 0: nobody's padding."""

    sample: int
    num_tokens: int
    padded: int


@dataclass(frozen=True, slots=True)
class Layout:
    """One microbatch: rows of spans, each row `row_length` positions.

    Packed: the rows are laid end to end in one, and each span is cut for context parallelism by itself, as
    model/inputs does; else a row is one span, and the row is cut.
    """

    rows: tuple[tuple[Span, ...], ...]
    row_length: int
    packed: bool

    def __post_init__(self) -> None:
        samples = [span.sample for span in self.spans if span.sample >= 0]
        assert len(set(samples)) == len(samples), f"samples {samples}: one is in the microbatch twice"
        for row in self.rows:
            assert sum(span.padded for span in row) == self.row_length, (row, self.row_length)
            assert self.packed or len(row) == 1, row

    @property
    def spans(self) -> list[Span]:
        """Of all rows."""
        return [span for row in self.rows for span in row]


@dataclass(frozen=True, slots=True)
class LocalTokens:
    """The `t` tokens of a microbatch that this rank's routers see, in their order; on the CPU.

    owner_t is an index into `samples`, -1 for padding; position_t counts within the sample, 0 for padding.
    """

    samples: tuple[int, ...]
    lengths: tuple[int, ...]
    """Tokens of each whole sample."""
    owner_t: Tensor
    position_t: Tensor

    @property
    def is_real_t(self) -> Tensor:
        """False for padding."""
        return self.owner_t >= 0

    def positions_of(self, owner: int) -> Tensor:
        """This rank's positions of one sample, rising."""
        return self.position_t[self.owner_t == owner].sort().values


def local_tokens(layout: Layout, mesh: Mesh) -> LocalTokens:
    """This rank's part of `layout`."""
    spans = [span for span in layout.spans if span.padded]
    real = [span for span in spans if span.sample >= 0]
    place = {span.sample: index for index, span in enumerate(real)}
    padded_n = torch.tensor([span.padded for span in spans])
    count_n = torch.tensor([span.num_tokens if span.sample >= 0 else 0 for span in spans])
    owner_n = torch.tensor([place.get(span.sample, -1) for span in spans])
    begin_n = padded_n.cumsum(0) - padded_n
    position_T = torch.arange(int(padded_n.sum())) - begin_n.repeat_interleave(padded_n)
    is_real_T = position_T < count_n.repeat_interleave(padded_n)
    owner_T = owner_n.repeat_interleave(padded_n)
    rows = 1 if layout.packed else len(layout.rows)
    both_2BS = torch.stack([owner_T.where(is_real_T, -1), position_T * is_real_T]).view(2, rows, -1)
    if layout.packed:
        cut_2Bs = [zigzag_spans(full_BS, padded_n.tolist(), mesh.cp) for full_BS in both_2BS]
    else:
        cut_2Bs = [zigzag(full_BS, mesh.cp) for full_BS in both_2BS]
    owner_t, position_t = (router_order(cut_Bs, mesh) for cut_Bs in cut_2Bs)
    return LocalTokens(
        samples=tuple(place),
        lengths=tuple(span.num_tokens for span in real),
        owner_t=owner_t,
        position_t=position_t,
    )


def router_order(cut_Bs: Tensor, mesh: Mesh) -> Tensor:
    """`[B, s]` after context parallelism as a router has its tokens: position by position, of this rank's positions
    under sequence parallelism.
    """
    whole_sB = cut_Bs.t()
    mine_sB = whole_sB.chunk(mesh.tp.size)[mesh.tp.rank] if mesh.sequence_parallel else whole_sB
    return mine_sB.reshape(-1)
