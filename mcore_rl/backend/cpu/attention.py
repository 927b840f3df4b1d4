"""Causal attention in fp32 on a CPU, faster than torch's where oneDNN's products are faster than MKL's.

The queries of a block, of all heads that share a key, are multiplied with every earlier key at once: their scores fit
into the cache, and matrix products by oneDNN and a softmax remain. The backward pass of long sequences computes the
scores again, so that memory grows with the length, not with its square.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mcore_rl.backend.cpu.products import product

BLOCK = 256
"""Number of positions of a block of queries, whose scores are `[heads of a group * BLOCK, keys]`."""
KEPT_LENGTH = 512
"""Number of keys up to which the backward pass reads the forward's weights, which is faster than recomputing them."""
LENGTH_MULTIPLE = 64
"""Multiple of the lengths that are computed here: each new shape costs oneDNN a compilation."""


def is_supported(query: Tensor, key: Tensor) -> bool:
    """Return whether `causal_attention` can compute these `[S, B, heads, width]`; torch computes the others."""
    lengths = query.shape[0], key.shape[0]
    return (
        query.device.type == "cpu"
        and query.dtype == torch.float32
        and all(length % LENGTH_MULTIPLE == 0 for length in lengths)
    )


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Return the output `[s, B, N, Dv]` of queries `[s, B, N, D]`, keys `[S, B, G, D]` and values `[S, B, G, Dv]`.

    Query i is at position S - s + i and attends to the keys up to there.
    """
    mixed: Tensor = _CausalAttention.apply(query, key, value, scale)  # type: ignore[no-untyped-call]
    return mixed


class _CausalAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        groups = key.shape[2]
        keys, values = _by_group(key, groups), _by_group(value, groups)
        # Not in place: with one row and one group it is the caller's tensor.
        queries = _by_group(query, groups) * scale
        ctx.shapes, ctx.scale = (query.shape, key.shape, value.shape), scale
        output = queries.new_empty(*queries.shape[:2], value.shape[3])
        blocks = _blocks(query.shape, key.shape)
        saved_weights = []
        for query_g, key_g, value_g, output_g in zip(queries, keys, values, output, strict=True):
            for rows, seen, hidden in blocks:
                weights = _attend(query_g[rows], key_g[:seen], hidden)
                output_g[rows] = product(weights, value_g[:seen].t())
                if key.shape[0] <= KEPT_LENGTH:
                    saved_weights.append(weights)
        ctx.save_for_backward(queries, keys, values, *saved_weights)
        return _by_head(output, (*query.shape[:3], value.shape[3]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        queries, keys, values, *saved_weights = ctx.saved_tensors
        query_shape, key_shape, value_shape = ctx.shapes
        wanted = _by_group(gradient, key_shape[2])
        d_queries, d_keys, d_values = (
            torch.empty_like(queries),
            torch.empty_like(keys),
            torch.empty_like(values),
        )
        blocks = _blocks(query_shape, key_shape)
        next_weights = iter(saved_weights)
        for g in range(queries.shape[0]):
            query, key, value = queries[g], keys[g], values[g]
            d_key, d_value = torch.zeros_like(key.t()), torch.zeros_like(value.t())
            for rows, seen, hidden in blocks:
                weights = next(next_weights) if saved_weights else _attend(query[rows], key[:seen], hidden)
                d_output = wanted[g, rows]
                d_value[:, :seen] += product(d_output.t().contiguous(), weights.t())
                d_weights = product(d_output, value[:seen])
                d_scores = torch._softmax_backward_data(d_weights, weights, -1, weights.dtype)
                d_key[:, :seen] += product(query[rows].t().contiguous(), d_scores.t())
                d_queries[g, rows] = product(d_scores, key[:seen].t())
            d_keys[g], d_values[g] = d_key.t(), d_value.t()
        d_queries *= ctx.scale
        return (
            _by_head(d_queries, query_shape),
            _by_head(d_keys, key_shape),
            _by_head(d_values, value_shape),
            None,
        )


def _by_group(heads: Tensor, groups: int) -> Tensor:
    """Return `[S, B, N, D]` as `[B * G, S * heads of a group, D]`, contiguous."""
    length, batch, _, width = heads.shape
    split = heads.reshape(length, batch, groups, -1, width).permute(1, 2, 0, 3, 4)
    return split.contiguous().view(batch * groups, -1, width)


def _by_head(grouped: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return `[B * G, S * heads of a group, D]` as `[S, B, N, D]`."""
    length, batch, _, width = shape
    split = grouped.view(batch, -1, length, grouped.shape[1] // length, width).permute(2, 0, 1, 3, 4)
    heads = grouped.new_empty(shape)
    heads.view(split.shape).copy_(split)
    return heads


def _blocks(query_shape: torch.Size, key_shape: torch.Size) -> list[tuple[slice, int, Tensor]]:
    """Return blocks of query rows, each with the number of keys up to its last query and the mask of its own keys.

    The mask is added to the scores of the last keys: zeros, and -inf behind each query's own position.
    """
    heads_of_group = query_shape[2] // key_shape[2]
    num_queries, offset = query_shape[0], key_shape[0] - query_shape[0]
    blocks = []
    for begin in range(0, num_queries, BLOCK):
        end = min(begin + BLOCK, num_queries)
        hidden = torch.full((end - begin, end - begin), float("-inf")).triu_(1)
        rows = slice(begin * heads_of_group, end * heads_of_group)
        blocks.append((rows, offset + end, hidden.repeat_interleave(heads_of_group, 0)))
    return blocks


def _attend(query: Tensor, key: Tensor, hidden: Tensor) -> Tensor:
    scores = product(query, key)
    scores[:, -hidden.shape[1] :] += hidden
    return torch.softmax(scores, -1)
