"""Causal attention in fp32 on a CPU by the compiled file: no scores in memory, no copies of the caller's layout.

The forward pass keeps the log-sum-exp of each query's scores, and the backward pass computes the weights again. A
query's result depends only on its own keys, bit for bit: not on other rows, sequences or later positions.
"""

from ctypes import Array, c_int64
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mcore_rl.megatron.cpu.compiled import library

BoundArrays = tuple["Array[c_int64]", "Array[c_int64]"]
"""Bounds of each sequence in the queries, and in the keys."""
LANES, KEYS, ROWS, WIDTH = 48, 64, 8, 16
"""Maximum of each that the file uses, for the size of its scratch memory."""


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, lengths: tuple[int, ...] | None = None
) -> Tensor:
    """Return the output `[s, B, N, Dv]` of queries `[s, B, N, D]`, keys `[S, B, G, D]` and values `[S, B, G, Dv]`.

    Query i is at position S - s + i and attends to the keys up to there.

    Args:
        query: Queries, with any strides but along D; so are keys and values.
        key: Keys, of G heads; G divides N.
        value: Values.
        scale: Factor of the scores.
        lengths: Lengths of packed sequences, which do not see one another; they add up to s, which is S.
    """
    if lengths is None:
        bounds = _numbers(0, query.shape[0]), _numbers(0, key.shape[0])
    else:
        assert sum(lengths) == query.shape[0] == key.shape[0]
        bounds = (_numbers(0, *accumulate(lengths)),) * 2
    operands = query, key, value
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in operands):
        mixed: Tensor = _CausalAttention.apply(*operands, scale, bounds)  # type: ignore[no-untyped-call]
        return mixed
    query, key, value = _dense(*operands)
    return _forward(query, key, value, scale, bounds)[0]


def _forward(query: Tensor, key: Tensor, value: Tensor, scale: float, bounds: BoundArrays) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp `[B, N, s]` of each query's scores."""
    length, batch, heads, width = query.shape
    output, lse = query.new_empty(length, batch, heads, value.shape[3]), query.new_empty(batch, heads, length)
    width, value_width = (-(-w // WIDTH) * WIDTH for w in (width, value.shape[3]))
    rows = _longest(bounds[1]) + ROWS + LANES
    scratch = query.new_empty(rows * (width + value_width) + LANES * (KEYS + 3))
    sequences = len(bounds[0]) - 1, _sizes(query, key, value, output)
    library().attention_forward(query, key, value, *bounds, *sequences, scale, output, lse, scratch)
    return output, lse


class _CausalAttention(torch.autograd.Function):
    """`causal_attention` with its gradient."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, bounds: BoundArrays) -> Tensor:
        ctx.scale, ctx.bounds = scale, bounds
        query, key, value = _dense(query, key, value)
        output, lse = _forward(query, key, value, scale, bounds)
        ctx.save_for_backward(query, key, value, output, lse)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value, output, lse = ctx.saved_tensors
        (gradient,) = _dense(gradient)
        d_query, d_key, d_value = (operand.new_empty(operand.shape) for operand in (query, key, value))
        width, value_width = (-(-w // WIDTH) * WIDTH for w in (query.shape[3], value.shape[3]))
        rows = _longest(ctx.bounds[1]) + ROWS + LANES
        scratch = query.new_empty((2 * rows + LANES) * (width + value_width) + LANES * (2 * KEYS + 3))
        operands = gradient, query, key, value, output, lse
        sequences = len(ctx.bounds[0]) - 1, _sizes(query, key, value, gradient)
        results = d_query, d_key, d_value, scratch
        library().attention_backward(*operands, *ctx.bounds, *sequences, ctx.scale, *results)
        return d_query, d_key, d_value, None, None


def _dense(*operands: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors, copied where the last axis is not dense: the file reads any other strides."""
    return tuple(tensor if tensor.stride(3) == 1 else tensor.contiguous() for tensor in operands)


def _sizes(query: Tensor, key: Tensor, value: Tensor, gradient: Tensor) -> "Array[c_int64]":
    """Return the numbers that the file calls Sizes."""
    strides = [stride for tensor in (query, key, value, gradient) for stride in tensor.stride()[:3]]
    return _numbers(*query.shape[1:3], key.shape[2], query.shape[3], value.shape[3], *strides)


def _longest(bounds: "Array[c_int64]") -> int:
    return max((end - begin for begin, end in pairwise(bounds)), default=0)


def _numbers(*numbers: int) -> "Array[c_int64]":
    return (c_int64 * len(numbers))(*numbers)
