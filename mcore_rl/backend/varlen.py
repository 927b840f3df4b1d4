"""Attention of packed sequences by one call of a kernel for sequences of many lengths, where a GPU has one."""

import importlib
import inspect
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

HALF_TYPES = (torch.bfloat16, torch.float16)
WIDTH_MULTIPLE, WIDEST = 8, 256
"""Widths of heads that the kernels take."""
LEAST_CAPABILITY = 8
"""Major compute capability from which on the kernels run: Ampere."""
TORCH_ARGUMENTS = ("scale", "window_size", "enable_gqa")
"""Arguments of torch's function that are needed; releases before 2.13 lack some."""


class Bounds(NamedTuple):
    """Where the sequences of a packed row begin and end."""

    cumulative: Tensor
    """Cumulative lengths, int32 `[sequences + 1]`, on the device."""
    longest: int
    """Positions of the longest sequence."""


class VarlenKernel(NamedTuple):
    """A kernel, by the name that the log and `mcore-rl doctor` give it."""

    name: str
    attend: Callable[[Tensor, Tensor, Tensor, Bounds, float, int | None], Tensor]
    """Causal attention `[T, N, D]` of queries `[T, N, D]` and keys and values `[T, G, D]` within each sequence, with
    the factor of the scores, and the positions that a query sees to its left (None: all)."""


@cache
def kernel_found() -> VarlenKernel | None:
    """Return the kernel that packed sequences take on the GPU of this process; None without one."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] < LEAST_CAPABILITY:
        return None
    function = _import("torch.nn.attention.varlen", "varlen_attn")
    if function is not None and set(TORCH_ARGUMENTS) <= set(inspect.signature(function).parameters):
        return VarlenKernel("torch's varlen_attn", _by_torch)
    if _import("flash_attn", "flash_attn_varlen_func") is not None:
        return VarlenKernel("flash_attn_varlen_func", _by_flash_attn)
    return None


def attend_packed(
    query: Tensor, key: Tensor, value: Tensor, bounds: Bounds, scale: float, window: int | None
) -> Tensor | None:
    """Return causal attention `[T, N, Dv]` within each packed sequence by one call; None where there is no kernel.

    Args:
        query: `[T, N, D]`.
        key: `[T, G, D]`, G a divisor of N.
        value: `[T, G, Dv]`.
        bounds: the sequences, which fill the row.
        scale: factor of the scores.
        window: positions that a query sees to its left; None: all.
    """
    width, value_width = query.shape[-1], value.shape[-1]
    fits = width % WIDTH_MULTIPLE == 0 and value_width <= width <= WIDEST
    if not query.is_cuda or query.dtype not in HALF_TYPES or not fits:
        return None
    kernel = kernel_found()
    if kernel is None:
        return None
    # Zeros, which the output drops again: the kernels have one width.
    wide_value = pad(value, (0, width - value_width)) if value_width < width else value
    return kernel.attend(query, key, wide_value, bounds, scale, window)[..., :value_width]


def _by_torch(
    query: Tensor, key: Tensor, value: Tensor, bounds: Bounds, scale: float, window: int | None
) -> Tensor:
    function: Any = _import("torch.nn.attention.varlen", "varlen_attn")
    output: Tensor = function(
        query,
        key,
        value,
        bounds.cumulative,
        bounds.cumulative,
        bounds.longest,
        bounds.longest,
        scale=scale,
        window_size=(-1 if window is None else window, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output


def _by_flash_attn(
    query: Tensor, key: Tensor, value: Tensor, bounds: Bounds, scale: float, window: int | None
) -> Tensor:
    function: Any = _import("flash_attn", "flash_attn_varlen_func")
    output: Tensor = function(
        query,
        key,
        value,
        bounds.cumulative,
        bounds.cumulative,
        bounds.longest,
        bounds.longest,
        softmax_scale=scale,
        causal=True,
        window_size=(-1 if window is None else window, 0),
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return output


def _import(module: str, name: str) -> Any:
    """Return an attribute of a module, or None without the module or where it was built for another torch."""
    if find_spec(module.partition(".")[0]) is None:
        return None
    try:
        return getattr(importlib.import_module(module), name, None)
    except (ImportError, OSError):
        return None
