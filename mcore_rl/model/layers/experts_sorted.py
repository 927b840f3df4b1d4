"""Sort the tokens of a rank that has all experts by expert, and sum them again, without reading numbers on the host."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class SortedRoutes(NamedTuple):
    """K rows of every token, sorted by expert, then by token; all tensors are on the device."""

    experts_TK: Tensor
    """Experts of each token, ascending."""
    order_N: Tensor
    """Index in `experts_TK` (flat) of each of the T * K rows."""
    row_TK: Tensor
    """Row of each index in `experts_TK`: the inverse of `order_N`."""
    counts_E: Tensor
    """Number of rows of each expert."""


def sort_routes(probs_TE: Tensor, routed_TE: Tensor, top_k: int) -> SortedRoutes:
    """Return the rows for a router's choice of `top_k` experts per token.

    A token with fewer experts, which damaged routes can cause, gets additional experts with a gate of zero: the number
    of rows must not depend on the routes, or the host would have to read it.

    Args:
        probs_TE: gates, zero for experts that are not chosen.
        routed_TE: the choice, bool.
        top_k: number of experts per token, K.
    """
    num_tokens, num_experts = routed_TE.shape
    gates_TE = probs_TE.detach().float().masked_fill(~routed_TE, -1.0)
    experts_TK = gates_TE.topk(top_k).indices.sort(1).values
    flat_N = experts_TK.flatten()
    order_N = flat_N.argsort(stable=True)
    rows_N = torch.arange(len(order_N), device=order_N.device)
    row_TK = torch.empty_like(order_N).scatter_(0, order_N, rows_N).view(num_tokens, top_k)
    experts_E = torch.arange(num_experts, device=order_N.device)
    # torch.bincount would read the largest expert on the host.
    ends_E = torch.searchsorted(flat_N[order_N], experts_E, right=True)
    return SortedRoutes(experts_TK, order_N, row_TK, ends_E.diff(prepend=ends_E.new_zeros(1)))


def routed_experts(
    input_TD: Tensor,
    probs_TE: Tensor,
    routed_TE: Tensor,
    top_k: int,
    compute: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> Tensor:
    """Return every token's sum over its experts, `[T, D]`.

    Args:
        input_TD: hidden states.
        probs_TE: gates.
        routed_TE: the router's choice, bool.
        top_k: number of experts per token.
        compute: function of rows `[N, D]` sorted by expert, their gates `[N]` and the number of rows of each expert
            `[E]`; returns the experts' output times the gates, `[N, D]`.
    """
    routes = sort_routes(probs_TE, routed_TE, top_k)
    rows_ND: Tensor = _Spread.apply(input_TD, routes.order_N, routes.row_TK)  # type: ignore[no-untyped-call]
    gates_NK: Tensor = probs_TE.gather(1, routes.experts_TK).view(-1, 1)
    gates_N1: Tensor = _Spread.apply(gates_NK, routes.order_N, routes.row_TK.view(-1, 1))  # type: ignore[no-untyped-call]
    output_ND = compute(rows_ND, gates_N1[:, 0], routes.counts_E)
    summed_TD: Tensor = _Summed.apply(output_ND, routes.order_N, routes.row_TK)  # type: ignore[no-untyped-call]
    return summed_TD


class _Spread(torch.autograd.Function):
    """K rows of each token, in the order of the experts. The gradient is deterministic: it reads rows by index instead
    of adding to them.
    """

    @staticmethod
    def forward(ctx: Any, input_TD: Tensor, order_N: Tensor, row_TK: Tensor) -> Tensor:
        ctx.save_for_backward(row_TK)
        return input_TD.index_select(0, order_N // row_TK.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor, None, None]:
        (row_TK,) = ctx.saved_tensors
        return _sum_of_rows(grad_ND, row_TK), None, None


class _Summed(torch.autograd.Function):
    """The inverse direction: each token's sum over its rows."""

    @staticmethod
    def forward(ctx: Any, rows_ND: Tensor, order_N: Tensor, row_TK: Tensor) -> Tensor:
        ctx.save_for_backward(order_N)
        ctx.top_k = row_TK.shape[1]
        return _sum_of_rows(rows_ND, row_TK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, None, None]:
        (order_N,) = ctx.saved_tensors
        return grad_TD.index_select(0, order_N // ctx.top_k), None, None


def _sum_of_rows(rows_ND: Tensor, row_TK: Tensor) -> Tensor:
    rows_TKD = rows_ND.index_select(0, row_TK.flatten()).view(*row_TK.shape, -1)
    return rows_TKD.sum(1)
