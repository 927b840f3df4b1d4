"""Layout of a microbatch: where each sample's tokens are, and which of them this rank's routers see."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_rl.megatron.mesh import Mesh
from mcore_rl.megatron.sequence import zigzag_spans


@dataclass(frozen=True, slots=True)
class SampleSpan:
    """Consecutive positions of a microbatch that hold one sample, or only padding."""

    sample: int
    """Index of the sample in the rollout batch; -1 for padding."""
    num_tokens: int
    """Number of tokens in the sample; they come first."""
    num_positions: int
    """Number of positions in the span: the tokens and the padding after them."""
    first_current: int = 0
    """First position with routes cached from the weights in training; earlier positions have older weights' routes."""


@dataclass(frozen=True, slots=True)
class MicrobatchLayout:
    """Layout of one microbatch before context and sequence parallelism divide it.

    Packed rows are concatenated into one sequence, and context parallelism divides each span separately, as
    model/inputs.py does. A padded row holds a single span, and context parallelism divides the row.
    """

    rows: tuple[tuple[SampleSpan, ...], ...]
    row_length: int
    """Number of positions in each row."""
    packed: bool

    def __post_init__(self) -> None:
        samples = [span.sample for span in self.spans if span.sample >= 0]
        assert len(set(samples)) == len(samples), f"a sample is in the microbatch twice: {samples}"
        for row in self.rows:
            assert sum(span.num_positions for span in row) == self.row_length, (row, self.row_length)
            assert self.packed or len(row) == 1, row

    @property
    def spans(self) -> list[SampleSpan]:
        """Spans of all rows, in order."""
        return [span for row in self.rows for span in row]


@dataclass(frozen=True, slots=True)
class LocalTokens:
    """The `t` tokens of a microbatch that this rank's routers see, in the routers' order; tensors are on the CPU."""

    samples: tuple[int, ...]
    """Samples of the whole microbatch; some of them may have no token on this rank."""
    lengths: tuple[int, ...]
    """Number of tokens of each whole sample."""
    sample_index_t: Tensor
    """Index into `samples` of each token's sample, int64; -1 for padding."""
    position_t: Tensor
    """Position of each token in its sample, int64; 0 for padding."""
    is_current_t: Tensor
    """Mask of the tokens with routes cached from the weights in training, bool `[t]`."""

    @property
    def is_real_t(self) -> Tensor:
        """Mask of the tokens that belong to a sample, bool `[t]`; False for padding."""
        return self.sample_index_t >= 0

    def positions_of(self, index: int) -> Tensor:
        """Return the positions of `samples[index]` on this rank, in ascending order."""
        return self.position_t[self.sample_index_t == index].sort().values


def local_tokens(layout: MicrobatchLayout, mesh: Mesh) -> LocalTokens:
    """Return the tokens of `layout` that this rank's routers see."""
    spans = [span for span in layout.spans if span.num_positions]
    real = [span for span in spans if span.sample >= 0]
    index_of = {span.sample: index for index, span in enumerate(real)}
    positions_N = torch.tensor([span.num_positions for span in spans])
    tokens_N = torch.tensor([span.num_tokens if span.sample >= 0 else 0 for span in spans])
    index_N = torch.tensor([index_of.get(span.sample, -1) for span in spans])
    begin_N = positions_N.cumsum(0) - positions_N
    position_T = torch.arange(int(positions_N.sum())) - begin_N.repeat_interleave(positions_N)
    is_real_T = position_T < tokens_N.repeat_interleave(positions_N)
    index_T = index_N.repeat_interleave(positions_N)
    num_rows = 1 if layout.packed else len(layout.rows)
    # Sample indices and positions are divided by context and sequence parallelism just like token ids.
    both_2BS = torch.stack([index_T.where(is_real_T, -1), position_T * is_real_T]).view(2, num_rows, -1)
    both_2Bs = [*both_2BS]
    if mesh.cp.size > 1:
        lengths = positions_N.tolist() if layout.packed else [layout.row_length]
        both_2Bs = [zigzag_spans(full_BS, lengths, mesh.cp) for full_BS in both_2BS]
    index_t, position_t = (router_order(part_Bs, mesh) for part_Bs in both_2Bs)
    # Index -1 (padding) reads the 0 at the end.
    first_current_N1 = torch.tensor([*(span.first_current for span in real), 0])
    return LocalTokens(
        samples=tuple(index_of),
        lengths=tuple(span.num_tokens for span in real),
        sample_index_t=index_t,
        position_t=position_t,
        is_current_t=position_t >= first_current_N1[index_t],
    )


def router_order(values_Bs: Tensor, mesh: Mesh) -> Tensor:
    """Flatten `[B, s]`, already divided by context parallelism, in the order in which a router sees its tokens.

    Megatron's hidden states are `[s, B, D]`, so position comes before row; with sequence parallelism each
    tensor-parallel rank has a contiguous chunk of the positions.
    """
    all_sB = values_Bs.t()
    local_sB = all_sB.chunk(mesh.tp.size)[mesh.tp.rank] if mesh.sequence_parallel else all_sB
    return local_sB.reshape(-1)
