"""RMSNorm on a CPU, in fewer passes over memory than torch's, which is a dozen small operations there: one pass by
the compiled file, else a few.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mcore_rl.backend.cpu.kernels import Process, compiled_for, is_widened


def rms_norm(input: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return input / rms(input) * weight over the last axis, computed in fp32 and rounded once."""
    if input.dtype == torch.bfloat16 and is_widened(input):
        return rms_norm(input.float(), weight.float(), eps).to(input.dtype)
    if not torch.is_grad_enabled():
        # The rows of a decoding step are so few that the record of a gradient would take longer than the norm.
        return _normalized(input, weight, eps)[0]
    normalized: Tensor = _RMSNorm.apply(input, weight, eps)  # type: ignore[no-untyped-call]
    return normalized


def _normalized(input: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the result of `rms_norm`, the input as it was read, and 1 / rms of each row."""
    library = Process.library
    # A fake tensor has no numbers at its address.
    if library is not None and type(input) is Tensor and input.dtype == weight.dtype == torch.float32:
        input, width = input.contiguous(), weight.shape[0]
        output, inverse = input.new_empty(input.shape), input.new_empty(*input.shape[:-1], 1)
        rows = inverse.numel()
        library.rms_norm_forward(input, weight, rows, width, eps, output, inverse)
        return output, input, inverse
    wide = input.float()
    norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    inverse = norm.square_().div_(wide.shape[-1]).add_(eps).rsqrt_()
    return (wide * inverse).mul_(weight).to(input.dtype), input, inverse


class _RMSNorm(torch.autograd.Function):
    """`rms_norm` with its gradient."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, eps: float) -> Tensor:
        output, input, inverse = _normalized(input, weight, eps)
        ctx.save_for_backward(input, weight, inverse)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        input, weight, inverse = ctx.saved_tensors
        size = weight.shape[0]
        compiled = compiled_for(gradient, input, weight)
        if compiled is not None and input.is_contiguous():
            d_input, d_weight, part = (like.new_empty(like.shape) for like in (input, weight, weight))
            operands = gradient.contiguous(), input, weight, inverse
            results = d_input, d_weight, part
            compiled.rms_norm_backward(*operands, inverse.numel(), size, *results)
            return d_input, d_weight, None
        normalized = input.float() * inverse
        product = normalized * gradient
        rows = product.reshape(-1, size)
        # d_input = inverse * (g * w - normalized * mean(g * w * normalized)), g the gradient and w the weight.
        mean = torch.mv(rows, weight.float()).div_(size).view_as(inverse)
        d_input = torch.mul(gradient, weight.float()).addcmul_(normalized, mean, value=-1).mul_(inverse)
        return d_input.to(input.dtype), rows.sum(0).to(weight.dtype), None
