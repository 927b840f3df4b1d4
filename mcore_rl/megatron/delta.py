"""The gated delta rule by a kernel of the package flash-linear-attention, if it is installed, on GPUs."""

import importlib
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

HALF_TYPES = (torch.bfloat16, torch.float16)


@cache
def kernel_found() -> Callable[..., Any] | None:
    """Return the kernel for the GPU of this process; None if there is no kernel."""
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
    return kernel_found()


def gated_delta_by(
    kernel: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay_TH: Tensor,
    beta_TH: Tensor,
    lengths: tuple[int, ...],
    states: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return outputs and states as `mcore_rl.model.layers.delta.gated_delta` does, by a kernel.

    Args:
        kernel: The kernel.
        query: `[T, G, K]`.
        key: `[T, G, K]`.
        value: `[T, H, V]`.
        decay_TH: Logarithms of the decay, fp32.
        beta_TH: Shares of a value that are written.
        lengths: Tokens of each of the R sequences.
        states: State of each sequence before its first token `[R, H, K, V]`; None for zeros.
    """
    repeat = value.shape[1] // key.shape[1]
    bounds = torch.tensor((0, *lengths), device=value.device).cumsum(0)
    output, after = kernel(
        query.repeat_interleave(repeat, 1)[None],
        key.repeat_interleave(repeat, 1)[None],
        value[None],
        decay_TH[None],
        beta_TH[None].to(value.dtype),
        initial_state=states,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=bounds,
    )
    return output[0], after
