"""Kernels of a GPU and its packages: torch's attention over packed sequences, flash-linear-attention's delta rule."""

import importlib
import inspect
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

KERNEL = "torch's varlen_attn"
"""Name of the kernel in the log and in `mcore-rl doctor`."""
HALF_TYPES = (torch.bfloat16, torch.float16)
WIDTH_MULTIPLE, WIDEST = 8, 256
"""Widths of heads that the kernel takes."""
LEAST_CAPABILITY = 8
"""Minimum major compute capability for the kernel: Ampere."""
TORCH_ARGUMENTS = ("scale", "window_size", "enable_gqa", "return_aux")
"""Required arguments of torch's function; releases before 2.13 lack some."""


class Bounds(NamedTuple):
    """Bounds of the sequences in a packed row; for keys, of the keys that belong to each sequence of queries."""

    cumulative: Tensor
    """Cumulative lengths, int32 `[sequences + 1]`, on the device."""
    longest: int
    """Positions of the longest sequence."""


@cache
def has_kernel() -> bool:
    """Return whether the GPU of this process and its torch have the kernel."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] < LEAST_CAPABILITY:
        return False
    try:
        function = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    except ImportError:
        return False
    return set(TORCH_ARGUMENTS) <= set(inspect.signature(function).parameters)


def kernel_takes(query: Tensor, value_width: int) -> bool:
    """Return whether the kernel, if there is one, takes these queries `[T, N, D]` and values of that width."""
    width = query.shape[-1]
    fits = width % WIDTH_MULTIPLE == 0 and value_width <= width <= WIDEST
    return query.is_cuda and query.dtype in HALF_TYPES and fits


def attend_packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Bounds,
    scale: float,
    window: int | None,
    *,
    key_bounds: Bounds | None = None,
    sinks_N: Tensor | None = None,
) -> Tensor:
    """Return causal attention `[T, N, Dv]` of `[T, N, D]`, `[U, G, D]`, `[U, G, Dv]` within each packed sequence, in a
    single call of a kernel that `kernel_takes` accepts.

    G divides N. `window` counts the positions to the left of a query that it sees. `key_bounds` are each sequence's
    keys, which end with its queries; None for `bounds`. A head's sink only takes part in the softmax.
    """
    width, value_width = query.shape[-1], value.shape[-1]
    # Zeros, which the output drops again: the kernel needs values as wide as queries.
    wide_value = pad(value, (0, width - value_width)) if value_width < width else value
    operands = query, key, wide_value, bounds, key_bounds or bounds, scale, window
    mixed: Tensor
    if sinks_N is None:
        mixed = _attended(*operands)
    else:
        mixed = _WithSinks.apply(sinks_N, *operands)  # type: ignore[no-untyped-call]
    return mixed[..., :value_width]


def _attended(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Bounds,
    key_bounds: Bounds,
    scale: float,
    window: int | None,
    **more: Any,
) -> Any:
    varlen: Any = importlib.import_module("torch.nn.attention.varlen")
    return varlen.varlen_attn(
        query,
        key,
        value,
        bounds.cumulative,
        key_bounds.cumulative,
        bounds.longest,
        key_bounds.longest,
        scale=scale,
        # No position to the right of a query: that makes it causal.
        window_size=(-1 if window is None else window, 0),
        enable_gqa=query.shape[1] != key.shape[1],
        **more,
    )


class _WithSinks(torch.autograd.Function):
    """Attention with sinks, by torch's kernel without them.

    Of the softmax without a sink a sink s leaves exp(l - l') = sigmoid(l - s), where l is the log-sum-exp of a
    query's scores and l' the log-sum-exp of its scores and s. The kernel's backward pass computes the probabilities
    from a log-sum-exp and the gradient of the scores, P (dP - sum(dO O)), from the output: given l' and the output
    with sinks it computes theirs. The sink's is -exp(s - l') sum(dO O).
    """

    @staticmethod
    def forward(
        ctx: Any,
        sinks_N: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bounds: Bounds,
        key_bounds: Bounds,
        scale: float,
        window: int | None,
    ) -> Tensor:
        request = importlib.import_module("torch.nn.attention.varlen").AuxRequest(lse=True)
        plain_TND, lse_NT = _attended(query, key, value, bounds, key_bounds, scale, window, return_aux=request)
        assert lse_NT.shape == plain_TND.shape[1::-1], f"log-sum-exp {tuple(lse_NT.shape)}"
        with_sinks_NT = torch.logaddexp(lse_NT, sinks_N.float()[:, None])
        mixed_TND: Tensor = (plain_TND * (lse_NT - with_sinks_NT).exp().t()[..., None]).to(plain_TND.dtype)
        ctx.save_for_backward(sinks_N, query, key, value, mixed_TND, with_sinks_NT)
        ctx.bounds, ctx.key_bounds, ctx.scale, ctx.window = bounds, key_bounds, scale, window
        return mixed_TND

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TND: Tensor) -> tuple[Tensor | None, ...]:
        sinks_N, query, key, value, mixed_TND, lse_NT = ctx.saved_tensors
        grad_TND = grad_TND.contiguous()
        gradients = torch.ops.aten._flash_attention_backward(
            grad_TND,
            query,
            key,
            value,
            mixed_TND,
            lse_NT,
            ctx.bounds.cumulative,
            ctx.key_bounds.cumulative,
            ctx.bounds.longest,
            ctx.key_bounds.longest,
            0.0,
            # Whether it is causal; a window is causal by its right end, 0.
            ctx.window is None,
            # The random state of dropout, which is not used.
            torch.zeros(2, dtype=torch.uint64, device=query.device),
            torch.empty(0, device=query.device),
            scale=ctx.scale,
            window_size_left=-1 if ctx.window is None else ctx.window,
            window_size_right=0,
        )
        share_NT = (sinks_N.float()[:, None] - lse_NT).exp()
        grad_sinks_N = -(share_NT * (grad_TND.float() * mixed_TND).sum(-1).t()).sum(1)
        return grad_sinks_N.to(sinks_N.dtype), *gradients, None, None, None, None


@cache
def _found_delta_kernel() -> Callable[..., Any] | None:
    # The kernel of flash-linear-attention for the GPU of this process, if there is one.
    if not torch.cuda.is_available() or find_spec("fla") is None:
        return None
    try:
        kernel: Callable[..., Any] = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    except (ImportError, OSError, AttributeError):
        return None
    return kernel


def delta_kernel(value: Tensor, *, deterministic: bool) -> Callable[..., Any] | None:
    """Return the kernel for these values; None on a CPU, in fp32 and fp64, and if sums must have a fixed order."""
    if not value.is_cuda or value.dtype not in HALF_TYPES or deterministic:
        return None
    return _found_delta_kernel()


def gated_delta_by(
    kernel: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay_TH: Tensor,
    beta_TH: Tensor,
    bounds_R1: Tensor,
    states: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return outputs and states as `mcore_rl.model.layers.delta.gated_delta` does, for sequences with these bounds."""
    repeat = value.shape[1] // key.shape[1]
    output, after = kernel(
        query.repeat_interleave(repeat, 1)[None],
        key.repeat_interleave(repeat, 1)[None],
        value[None],
        decay_TH[None],
        beta_TH[None].to(value.dtype),
        initial_state=states,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=bounds_R1,
    )
    return output[0], after
