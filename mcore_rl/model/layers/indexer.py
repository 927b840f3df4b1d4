"""The choice of keys in DeepSeek sparse attention (arXiv 2512.02556).

An indexer scores the key at position s for the query at position t by

    I[t, s] = sum over heads h of w[t, h] relu(q[t, h] . k[s]),

and the query attends to the `topk` earlier positions of largest score. Only the order of the scores counts, so that the
positive factors of the published code are left out. Training and the rollout engine make the choice by the same
function, and of equal scores, such as the zeros that relu makes, the earlier position comes first on every device.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from mcore_rl.config.model import IndexerConfig
from mcore_rl.model.layers.linear import ReplicatedLinear

BLOCK = 512
"""Number of queries with scores computed at a time."""
HEADS_AT_ONCE = 4
"""Number of heads with products in memory at a time; their sums are then added in order, for any number of keys."""
NORM_EPS = 1e-6
"""Epsilon of the norm of index keys, which no config has."""


class Indexed(NamedTuple):
    """Queries, keys and weights of an indexer."""

    query: Tensor
    """`[S, B, H, D]`."""
    key: Tensor
    """`[S, B, D]`, the same for all heads."""
    weight: Tensor
    """Weight of each head, fp32 `[S, B, H]`."""


class Segment(NamedTuple):
    """Consecutive queries of one sequence, and the keys up to the last of them."""

    begin: int
    """Index of the first query on this rank."""
    end: int
    first: int
    """Index of the sequence's first key in the keys of all ranks, which are in the order of positions."""
    stop: int
    """Index behind the last key that a query of the segment sees."""


class Block(NamedTuple):
    """Queries of a segment that see more keys than are chosen."""

    begin: int
    """Index of the first query in its segment."""
    end: int
    stop: int
    """Number of the segment's keys up to the last of these queries."""


class Indexer(nn.Module):
    """The indexer of a layer, whole on every tensor-parallel rank: all ranks attend to the same keys, with other heads.

    It is not trained: a choice has no gradient, and an optimizer would only let its weights decay.
    """

    def __init__(self, config: TransformerConfig, tp_group: torch.distributed.ProcessGroup) -> None:
        super().__init__()
        shape: IndexerConfig = config.indexer
        self._heads, self._in_pairs = shape.heads, config.index_in_pairs
        hidden, rank = config.hidden_size, config.q_lora_rank

        def linear(inputs: int, outputs: int) -> ReplicatedLinear:
            return ReplicatedLinear(
                inputs, outputs, config=config, init_method=config.init_method, tp_group=tp_group
            )

        self.linear_wq_b = linear(rank, shape.heads * shape.width)
        self.linear_wk = linear(hidden, shape.width)
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.k_norm = nn.LayerNorm(shape.width, NORM_EPS, device=device, dtype=config.params_dtype)
        self.linear_weights_proj = linear(hidden, shape.heads)
        self.requires_grad_(False)

    def keys_and_weights(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return index keys `[s, B, D]`, not turned yet, and the weights of heads, fp32 `[s, B, H]`, of hidden states
        `[s, B, hidden]`.
        """
        # In fp32, as in the published code: the weights' signs decide which keys rank behind keys of score zero.
        weights = nn.functional.linear(hidden.float(), self.linear_weights_proj.weight.float())
        return self.k_norm(self.linear_wk(hidden)[0]), weights

    def forward(
        self, latent: Tensor, keys: Tensor, weights: Tensor, angles: Tensor, factor: float
    ) -> Indexed:
        """Return queries, keys and weights of tokens.

        Args:
            latent: The latents of the attention's queries `[S, B, R]`.
            keys: Index keys that are not turned yet `[S, B, D]`.
            weights: Weights of heads `[S, B, H]`.
            angles: Angles of each token's position, `[S, 1, 1, turned]`, each twice, in halves.
            factor: Factor on the turned numbers, of YaRN.
        """
        query = self.linear_wq_b(latent)[0].unflatten(-1, (self._heads, -1))
        query, key = (
            _turned(part, angles, factor, in_pairs=self._in_pairs) for part in (query, keys[:, :, None])
        )
        return Indexed(query, key[:, :, 0], weights)


def _turned(heads: Tensor, angles: Tensor, factor: float, *, in_pairs: bool) -> Tensor:
    """Return heads `[S, B, H, D]` with their first numbers turned.

    Numbers that are neighbours as pairs come out as halves: products of queries and keys do not depend on the order.
    """
    wide, width = heads.float(), angles.shape[-1]
    front, rest = wide[..., :width], wide[..., width:]
    first, second = (front[..., 0::2], front[..., 1::2]) if in_pairs else front.chunk(2, -1)
    cosine, sine = (part * factor for part in (angles.cos(), angles.sin()))
    swapped = torch.cat([-second, first], -1)
    turned = torch.cat([first, second], -1) * cosine + swapped * sine
    return torch.cat([turned, rest], -1).to(heads.dtype)


def segments(lengths: Sequence[int], rank: int, ranks: int) -> Iterator[Segment]:
    """Yield the segments of a row's sequences: each sequence, or with context parallelism its two chunks on this rank.

    Rank r has chunks r and 2 * ranks - 1 - r of the 2 * ranks chunks of a sequence.
    """
    begin = first = 0
    for length in lengths:
        if ranks == 1:
            yield Segment(begin, begin + length, first, first + length)
        else:
            chunk = length // (2 * ranks)
            yield Segment(begin, begin + chunk, first, first + (rank + 1) * chunk)
            yield Segment(begin + chunk, begin + 2 * chunk, first, first + (2 * ranks - rank) * chunk)
        begin, first = begin + length // ranks, first + length


def blocks(num_queries: int, num_keys: int, topk: int) -> Iterator[Block]:
    """Yield the blocks of a segment's queries, which are at the last of its keys' positions.

    Left out are the first queries, which see at most `topk` keys and attend to all of them.
    """
    before = num_keys - num_queries
    for begin in range(max(0, topk - before), num_queries, BLOCK):
        end = min(begin + BLOCK, num_queries)
        yield Block(begin, end, before + end)


def choose(indexed: Indexed, keys: Tensor, parts: Sequence[Segment], topk: int) -> Tensor:
    """Return the positions in its segment of the keys that each query attends to, int32 `[s, B, topk]`.

    The choice of a query that sees at most `topk` keys is left out: zeros.

    Args:
        indexed: This rank's queries and weights.
        keys: Index keys of all ranks `[S, B, D]`, in the order of positions.
        parts: The segments.
        topk: Number of keys of a query.
    """
    query, _, weight = indexed
    chosen = torch.zeros(*query.shape[:2], topk, dtype=torch.int32, device=query.device)
    for begin, end, first, stop in parts:
        for block in blocks(end - begin, stop - first, topk):
            here = slice(begin + block.begin, begin + block.end)
            of_segment = keys[first : first + block.stop]
            visible = causal(block.end - block.begin, block.stop, query.device)
            chosen[here] = best(query[here], of_segment, weight[here], visible[:, None], topk)
    return chosen


def best(query: Tensor, keys: Tensor, weight: Tensor, visible: Tensor, topk: int) -> Tensor:
    """Return the positions of the `topk` visible keys of largest score, int32 `[Q, B, topk]`.

    Where fewer are visible, positions of keys that are not follow them.

    Args:
        query: Index queries `[Q, B, H, D]`.
        keys: Index keys `[K, B, D]`.
        weight: Weights of the heads `[Q, B, H]`.
        visible: True where a query may attend to a key, `[Q, B or 1, K]`.
        topk: Number of keys, at most K.
    """
    keys_BDK = keys.float().permute(1, 2, 0)
    scores_BQK = torch.zeros((), device=query.device)
    for heads in range(0, query.shape[2], HEADS_AT_ONCE):
        part = slice(heads, heads + HEADS_AT_ONCE)
        products_BHQK = query[:, :, part].float().permute(1, 2, 0, 3) @ keys_BDK[:, None]
        weight_BHQ1 = weight[:, :, part].permute(1, 2, 0)[..., None]
        scores_BQK = scores_BQK + (products_BHQK.relu() * weight_BHQ1).sum(1)
    scores_QBK = scores_BQK.transpose(0, 1).masked_fill(~visible, -torch.inf)
    # Stable: torch.topk takes any of equal scores, and many are zero.
    order_QBK = scores_QBK.sort(dim=-1, descending=True, stable=True).indices
    return order_QBK[..., :topk].int()


def chosen_mask(chosen: Tensor, visible: Tensor) -> Tensor:
    """Return a mask `[B, 1, Q, K]` that is true at the chosen positions `[Q, B, topk]` that are visible.

    `visible` is `[Q, B or 1, K]`.
    """
    mask_QBK = torch.zeros(*chosen.shape[:2], visible.shape[-1], dtype=torch.bool, device=chosen.device)
    mask_QBK.scatter_(-1, chosen.long(), True)
    return (mask_QBK & visible).transpose(0, 1)[:, None]


def causal(num_queries: int, num_keys: int, device: torch.device) -> Tensor:
    """Return which keys queries at the last of their positions may attend to, bool `[Q, K]`."""
    positions = torch.arange(num_keys, device=device)
    return positions <= positions[num_keys - num_queries :, None]
