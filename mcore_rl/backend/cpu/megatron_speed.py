"""Replacements of parts of Megatron that cost a CPU far more than they must.

Each function takes Megatron's and returns ours; backend/patches/table.py puts it in. The numbers stay the same up to
the order of summation.
"""

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from mcore_rl.backend.cpu.kernels import compiled_for, is_widened
from mcore_rl.backend.cpu.products import by_onednn, gated_by_onednn


def rotated_in_halves(rotate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Megatron's rotary embedding of `[S, B, N, D]`, without the tensors of two halves swapped and negated."""

    @functools.wraps(rotate)
    def call(heads: Tensor, freqs: Tensor, *args: Any, **options: Any) -> Tensor:
        if args or not _is_plain(heads, freqs, options):
            return rotate(heads, freqs, *args, **options)
        return _rotation(heads, freqs.cos(), freqs.sin())

    return call


def rotated_by_position(rotate_packed: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Megatron's rotary embedding of packed sequences `[T, N, D]`, without a slice of angles for each of them."""
    rope_utils = importlib.import_module("megatron.core.models.common.embeddings.rope_utils")

    @functools.wraps(rotate_packed)
    def call(heads: Tensor, cu_seqlens: Tensor, freqs: Tensor, *args: Any, **options: Any) -> Tensor:
        group = options.get("cp_group")
        # With as many angles as positions, each position has its own.
        if args or group is None or group.size() > 1 or len(freqs) == len(heads):
            return rotate_packed(heads, cu_seqlens, freqs, *args, **options)
        positions_T = positions_in_sequences(cu_seqlens, len(heads))
        heads = heads.unsqueeze(1)
        others = {name: value for name, value in options.items() if name != "cp_group" and value is not None}
        if _is_plain(heads, freqs, others):
            # The longest sequence has far fewer positions than all together.
            cos, sin = (angles.index_select(0, positions_T) for angles in (freqs.cos(), freqs.sin()))
            return _rotation(heads, cos, sin).squeeze(1)
        by_row: Tensor = rope_utils._apply_rotary_pos_emb_bshd(
            heads, freqs.index_select(0, positions_T), **others
        )
        return by_row.squeeze(1)

    return call


def positions_in_sequences(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """Return the position of each token in its sequence, int64 `[T]`.

    Args:
        cu_seqlens: Where the sequences of a packed row begin, and where the last one ends.
        num_tokens: T, the number of tokens in all of them.
    """
    begins_T = cu_seqlens[:-1].long().repeat_interleave(cu_seqlens.diff(), output_size=num_tokens)
    return torch.arange(num_tokens) - begins_T


def _is_plain(heads: Tensor, freqs: Tensor, options: Mapping[str, Any]) -> bool:
    """Return whether `_Rotation` computes this: of whole heads, with Megatron's options all off, whatever
    their names are in either version.
    """
    return (
        all(value in (False, None) or (name, value) == ("mscale", 1.0) for name, value in options.items())
        and (heads.dtype == torch.float32 or is_widened(heads))
        and heads.shape[-1] == freqs.shape[-1]
    )


def _rotation(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    if not torch.is_grad_enabled():
        return _rotated(heads.float(), cos, sin, 1).to(heads.dtype)
    rotated: Tensor = _Rotation.apply(heads.float(), cos, sin)  # type: ignore[no-untyped-call]
    return rotated.to(heads.dtype)


class _Rotation(torch.autograd.Function):
    """(a, b) -> (a cos - b sin, b cos + a sin), the halves of the last axis; its gradient is the way back."""

    @staticmethod
    def forward(ctx: Any, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(heads, cos, sin, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(gradient, cos, sin, -1), None, None


def _rotated(heads: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    """Return the rotation of heads `[S, B, N, D]` by angles `[S, 1, 1, D]`; with sign -1 its transpose."""
    length, batch, num_heads, width = heads.shape
    compiled = compiled_for(heads, cos, sin)
    if compiled is not None and cos.shape == (length, 1, 1, width) and heads.is_contiguous():
        rotated = torch.empty_like(heads)
        operands = heads, cos.contiguous(), sin.contiguous()
        compiled.rotate(*operands, length * batch, batch, num_heads, width, sign, rotated)
        return rotated
    rotated = torch.empty_like(heads)
    (first, second), (out_first, out_second) = heads.chunk(2, -1), rotated.chunk(2, -1)
    (cos_first, cos_second), (sin_first, sin_second) = cos.chunk(2, -1), sin.chunk(2, -1)
    # The way back multiplies by the sine of the half that a value went to.
    back_first, back_second = (sin_first, sin_second) if sign > 0 else (sin_second, sin_first)
    torch.mul(first, cos_first, out=out_first).addcmul_(second, back_first, value=-sign)
    torch.mul(second, cos_second, out=out_second).addcmul_(first, back_second, value=sign)
    return rotated


def scaled_in_place(scale_tensors: Callable[..., None]) -> Callable[..., None]:
    """`local_multi_tensor_scale`, which makes a copy of every gradient that it clips."""

    def scale(
        chunk_size: int, noop_flag: Tensor, tensor_lists: Sequence[list[Tensor]], factor: float
    ) -> None:
        sources, targets = tensor_lists
        if all(source is target for source, target in zip(sources, targets, strict=True)):
            torch._foreach_mul_(targets, factor)
        else:
            scale_tensors(chunk_size, noop_flag, tensor_lists, factor)

    return scale


def unless_alone(collective: Callable[..., Any]) -> Callable[..., Any]:
    """`all_gather_into_tensor` or `reduce_scatter_tensor`, without gloo's copies for a rank that is alone."""

    @functools.wraps(collective)
    def call(output: Tensor, input: Tensor, *, group: Any = None, **options: Any) -> Any:
        if dist.get_world_size(group) > 1:
            return collective(output, input, group=group, **options)
        if output.data_ptr() != input.data_ptr():
            output.copy_(input)
        return None

    return call


LINEAR = "torch gives fp32 products to MKL, which does not use AVX-512 on AMD"
ALONE = "gloo copies the parameters and gradients twice although there is no other rank"
ROTARY = "it writes and reads five tensors of the size of the queries, and four more in the backward pass"

REPLACEMENTS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "tensor_parallel.layers:linear_with_grad_accumulation_and_async_allreduce": (by_onednn, LINEAR),
    "distributed.param_and_grad_buffer:dist_all_gather_func": (unless_alone, ALONE),
    "distributed.param_and_grad_buffer:dist_reduce_scatter_func": (unless_alone, ALONE),
    "transformer.moe.router:router_gating_linear": (gated_by_onednn, LINEAR),
    "models.common.embeddings.rope_utils:_apply_rotary_pos_emb_bshd": (rotated_in_halves, ROTARY),
}
"""Symbol under `megatron.core` -> what makes its replacement, and why."""
