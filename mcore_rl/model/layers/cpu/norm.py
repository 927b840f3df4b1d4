"""RMSNorm on a CPU, in fewer passes over memory than torch's, which is a dozen small operations there."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def rms_norm(input: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return input / rms(input) * weight over the last axis, computed in fp32 and rounded once."""
    normalized: Tensor = _RMSNorm.apply(input, weight, eps)  # type: ignore[no-untyped-call]
    return normalized


class _RMSNorm(torch.autograd.Function):
    """`rms_norm` with its gradient."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = input.float()
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        inverse = norm.square_().div_(wide.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(input, weight, inverse)
        output: Tensor = (wide * inverse).mul_(weight).to(input.dtype)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        input, weight, inverse = ctx.saved_tensors
        size = weight.shape[0]
        normalized = input.float() * inverse
        product = normalized * gradient
        rows = product.view(-1, size)
        # d_input = inverse * (g * w - normalized * mean(g * w * normalized)), g the gradient and w the weight.
        mean = torch.mv(rows, weight.float()).div_(size).view_as(inverse)
        d_input = torch.mul(gradient, weight.float()).addcmul_(normalized, mean, value=-1).mul_(inverse)
        return d_input.to(input.dtype), rows.sum(0).to(weight.dtype), None
