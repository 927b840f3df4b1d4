"""The heads of a mixed projection on a CPU, split, normalized and rotated in one pass by the compiled file."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mcore_rl.backend.cpu.compiled import Library


class Angles(NamedTuple):
    """Angles of a rotary embedding."""

    cos: Tensor
    """Cosines `[angles, width]`, float32, contiguous."""
    sin: Tensor
    """Sines of the same."""
    positions_S: Tensor | None
    """The row of each position's angle, int64 `[S]`, contiguous; None where position s has row s."""


class HeadNorms(NamedTuple):
    """RMSNorms over the width of a head."""

    query: Tensor
    """Weight of the queries' norm, `[width]`."""
    key: Tensor
    """Weight of the keys' norm, `[width]`."""
    eps: float
    """Epsilon of both."""


def split_heads(
    library: Library, mixed: Tensor, width: int, norms: HeadNorms | None, angles: Angles | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries `[S, B, groups * queries, width]`, keys and values `[S, B, groups, width]`.

    Args:
        library: The compiled file.
        mixed: Mixed projection `[S, B, groups, (queries + 2) * width]`: in each group its queries, then the key and the
            value. In another format than float32 heads are computed in it and rounded once.
        width: Width of a head.
        norms: Norms of queries and keys; None without.
        angles: Angles that turn queries and keys behind their norms; None without.
    """
    weights = (None, None) if norms is None else (norms.query.float(), norms.key.float())
    eps = 0.0 if norms is None else norms.eps
    operands = mixed.float(), *weights, *(angles or (None, None, None)), width, eps, library
    split = _SplitHeads.apply if torch.is_grad_enabled() else _split
    query, key, value, *_ = split(*operands)
    return query.to(mixed.dtype), key.to(mixed.dtype), value.to(mixed.dtype)


def _split(
    mixed: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    positions_S: Tensor | None,
    width: int,
    eps: float,
    library: Library,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return queries, keys, values, 1 / rms of each head, and the projection as it was read."""
    mixed = mixed.contiguous()
    *rows, groups, columns = mixed.shape
    queries = columns // width - 2
    query = mixed.new_empty(*rows, groups * queries, width)
    key, value = (mixed.new_empty(*rows, groups, width) for _ in range(2))
    inverse = mixed.new_empty(*rows, groups, queries + 1)
    operands = mixed, query_weight, key_weight, cos, sin, positions_S, *rows, groups, queries, width, eps
    library.call("split_heads", *operands, query, key, value, inverse)
    return query, key, value, inverse, mixed


class _SplitHeads(torch.autograd.Function):
    """`split_heads` with its gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        mixed: Tensor,
        query_weight: Tensor | None,
        key_weight: Tensor | None,
        cos: Tensor | None,
        sin: Tensor | None,
        positions_S: Tensor | None,
        width: int,
        eps: float,
        library: Library,
    ) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, inverse, mixed = _split(
            mixed, query_weight, key_weight, cos, sin, positions_S, width, eps, library
        )
        ctx.save_for_backward(mixed, query_weight, key_weight, cos, sin, positions_S, inverse)
        ctx.width, ctx.library = width, library
        return query, key, value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        mixed, query_weight, key_weight, cos, sin, positions_S, inverse = ctx.saved_tensors
        *rows, groups, columns = mixed.shape
        sizes = *rows, groups, columns // ctx.width - 2, ctx.width
        # Attention gives its gradients in a layout of its own, which is read as it is.
        heads = [gradient if gradient.stride(3) == 1 else gradient.contiguous() for gradient in gradients]
        strides = torch.tensor([gradient.stride()[:3] for gradient in heads])
        d_mixed, d_weights = torch.empty_like(mixed), mixed.new_empty(2, ctx.width)
        operands = *heads, strides, mixed, query_weight, key_weight, cos, sin, positions_S, *sizes, inverse
        ctx.library.call("join_heads", *operands, d_mixed, d_weights, mixed.new_empty(3, ctx.width))
        d_query_weight, d_key_weight = d_weights if query_weight is not None else (None, None)
        return d_mixed, d_query_weight, d_key_weight, *[None] * 6
