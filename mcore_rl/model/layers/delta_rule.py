"""The gated delta rule (arXiv 2412.06464) in torch: packed sequences in chunks, single tokens, and the convolution.

A head has a state S `[K, V]`, which each token decays and corrects before its query reads it:

    S_t = exp(g_t) (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T,    o_t = S_t^T q_t / sqrt(K)

A chunk of tokens takes a triangular solve. The chunks of a sequence are computed in order, but different sequences in
parallel: there are as many steps as the longest sequence has chunks, each over all sequences that are long enough.
Everything is computed in fp32.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import silu

from mcore_rl.megatron.transfer import to_device

CHUNK = 64
"""Largest number of positions in a chunk."""
UNIT_EPSILON = 1e-6
"""Epsilon under the square root when queries and keys are normalized, as in the published models."""


class ChunkGrid(NamedTuple):
    """Where a packed row's tokens are in a grid of chunks `[N, C]`, ordered by depth, then by descending length."""

    lengths: tuple[int, ...]
    """Number of tokens of each of the R sequences."""
    chunk: int
    """Positions per chunk, C."""
    num_chunks: int
    """Number of chunks, N."""
    active: tuple[int, ...]
    """Number of sequences with a chunk at each depth."""
    cells_T: Tensor
    """Index of each token in the flattened grid."""
    order_R: Tensor
    """Indices of the sequences, by descending number of chunks."""
    rows_T: Tensor
    """Index of each token's sequence."""

    def scatter(self, tokens: Tensor) -> Tensor:
        """Arrange `[T, H, ...]` as `[N, H, C, ...]`; cells without a token are zero, which does not change states."""
        cells = tokens.new_zeros(self.num_chunks * self.chunk, *tokens.shape[1:])
        filled = cells.index_copy(0, self.cells_T, tokens)
        return filled.view(-1, self.chunk, *tokens.shape[1:]).transpose(1, 2)

    def gather(self, cells: Tensor) -> Tensor:
        """Arrange `[N, H, C, D]` as `[T, H, D]`; the inverse of `scatter`."""
        return cells.transpose(1, 2).flatten(0, 1).index_select(0, self.cells_T)


@lru_cache(8)
def chunk_grid(lengths: tuple[int, ...], device: torch.device) -> ChunkGrid:
    """Return the grid for sequences of these lengths; it is cached, as all layers of a pass share it."""
    chunk = min(CHUNK, max(lengths))
    lengths_R = torch.tensor(lengths)
    counts_R = (lengths_R + chunk - 1) // chunk
    order_R = counts_R.argsort(descending=True, stable=True)
    active = tuple(int((counts_R > depth).sum()) for depth in range(int(counts_R.max())))
    first_of_depth = torch.tensor((0, *active)).cumsum(0)
    rank_R = torch.empty_like(order_R)
    rank_R[order_R] = torch.arange(len(lengths))
    rows_T = torch.arange(len(lengths)).repeat_interleave(lengths_R)
    places_T = torch.arange(len(rows_T)) - (lengths_R.cumsum(0) - lengths_R)[rows_T]
    cells_T = (first_of_depth[places_T // chunk] + rank_R[rows_T]) * chunk + places_T % chunk
    return ChunkGrid(
        lengths=lengths,
        chunk=chunk,
        num_chunks=int(first_of_depth[-1]),
        active=active,
        cells_T=to_device(cells_T, device),
        order_R=to_device(order_R, device),
        rows_T=to_device(rows_T, device),
    )


def gated_delta(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay_TH: Tensor,
    beta_TH: Tensor,
    grid: ChunkGrid,
    states: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the outputs `[T, H, V]` in the values' dtype, and the states `[R, H, K, V]` after the last tokens, fp32.

    Args:
        query: `[T, G, K]`, not normalized; H is a multiple of G.
        key: `[T, G, K]`, not normalized.
        value: `[T, H, V]`.
        decay_TH: Logarithm of the decay, at most 0.
        beta_TH: Written share of the value, between 0 and 1.
        grid: The sequences.
        states: State of each sequence before its first token `[R, H, K, V]`; None for zeros.
    """
    dtype, repeat = value.dtype, value.shape[1] // key.shape[1]
    query, key = (unit(heads.float()).repeat_interleave(repeat, 1) for heads in (query, key))
    query = query * query.shape[-1] ** -0.5
    operands = query, key, value.float(), decay_TH.float(), beta_TH.float()
    query, key, value, decay, beta = map(grid.scatter, operands)
    total = decay.cumsum(-1)  # since the chunk's beginning
    seen_CC = torch.ones(grid.chunk, grid.chunk, dtype=torch.bool, device=query.device).tril()
    # Mask before exp: differences above the diagonal are positive and may overflow, and the gradient of inf * 0 is NaN.
    between = (total[..., :, None] - total[..., None, :]).masked_fill(~seen_CC, -torch.inf).exp()
    written_keys = beta[..., None] * key
    system = (written_keys @ key.mT) * between
    # Solve for two right-hand sides at once: writes into an empty state, and reads from the state before the chunk.
    sides = torch.cat([beta[..., None] * value, written_keys * total.exp()[..., None]], -1)
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    wrote, read = solved.split([value.shape[-1], key.shape[-1]], -1)
    inside, query = (query @ key.mT) * between, query * total.exp()[..., None]
    key = key * (total[..., -1:] - total).exp()[..., None]
    left = total[..., -1].exp()[..., None, None]
    if states is None:
        states = value.new_zeros(len(grid.lengths), value.shape[1], key.shape[-1], value.shape[-1])
    state, outputs, ended, begin = states.float().index_select(0, grid.order_R), [], [], 0
    for count in grid.active:
        if count < len(state):
            ended.append(state[count:])
            state = state[:count]
        at = slice(begin, begin + count)
        new = wrote[at] - read[at] @ state
        outputs.append(query[at] @ state + inside[at] @ new)
        state = left[at] * state + key[at].mT @ new
        begin += count
    after = torch.cat([state, *reversed(ended)])
    after = after.index_select(0, grid.order_R.argsort())
    return grid.gather(torch.cat(outputs)).to(dtype), after


def gated_delta_step(
    query: Tensor, key: Tensor, value: Tensor, decay_BH: Tensor, beta_BH: Tensor, states: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the outputs `[B, H, V]` of one token for each of B states, and the states after it, fp32.

    Args:
        query: `[B, G, K]`, not normalized; H is a multiple of G.
        key: `[B, G, K]`, not normalized.
        value: `[B, H, V]`.
        decay_BH: Logarithm of the decay.
        beta_BH: Written share of the value.
        states: States before the tokens `[B, H, K, V]`, fp32.
    """
    repeat = value.shape[1] // key.shape[1]
    query, key = (unit(heads.float()).repeat_interleave(repeat, 1) for heads in (query, key))
    states = decay_BH.float().exp()[..., None, None] * states
    new = beta_BH.float()[..., None] * (value.float() - (key[..., None, :] @ states)[..., 0, :])
    states = states + key[..., None] * new[..., None, :]
    query = query * query.shape[-1] ** -0.5
    return (query[..., None, :] @ states)[..., 0, :].to(value.dtype), states


def unit(heads: Tensor) -> Tensor:
    """Normalize heads to unit length, with an epsilon under the square root."""
    return heads * (heads.square().sum(-1, keepdim=True) + UNIT_EPSILON).rsqrt()


def causal_conv(
    inputs_TC: Tensor, weight_CW: Tensor, grid: ChunkGrid, before: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return silu of a depthwise causal convolution `[T, C]` of each sequence, and its last inputs `[R, W - 1, C]`.

    Args:
        inputs_TC: The packed sequences.
        weight_CW: The taps of each channel; the last tap applies to the current token.
        grid: The sequences.
        before: Inputs before the first token of each sequence `[R, W - 1, C]`; None for zeros.
    """
    (num_tokens, channels), back = inputs_TC.shape, weight_CW.shape[1] - 1
    # Put W - 1 rows before each sequence.
    places_T = torch.arange(num_tokens, device=inputs_TC.device) + back * (grid.rows_T + 1)
    wide = inputs_TC.new_zeros(num_tokens + back * len(grid.lengths), channels).index_copy(
        0, places_T, inputs_TC
    )
    ends_R = torch.tensor(grid.lengths, device=wide.device).cumsum(0) + back * torch.arange(
        1, len(grid.lengths) + 1, device=wide.device
    )
    last_RW = ends_R[:, None] + torch.arange(-back, 0, device=wide.device)
    if before is not None:
        lengths_R = torch.tensor(grid.lengths, device=wide.device)
        wide = wide.index_copy(0, (last_RW - lengths_R[:, None]).flatten(), before.flatten(0, 1))
    length = num_tokens + back * (len(grid.lengths) - 1)
    total = wide[back : back + length] * weight_CW[:, back]
    for tap in range(back):
        total = total + wide[tap : tap + length] * weight_CW[:, tap]
    return silu(total.index_select(0, places_T - back)), wide[last_RW]


def causal_conv_step(inputs_BC: Tensor, weight_CW: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """Return `causal_conv` for one token of each of B sequences, given their last inputs `[B, W - 1, C]`."""
    window = torch.cat([before, inputs_BC[:, None]], 1)
    return silu((window * weight_CW.T).sum(1)), window[:, 1:]
