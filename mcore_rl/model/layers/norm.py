"""RMSNorm."""

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last axis, computed in fp32 and rounded once.

    The weight is one plus the parameter when the config asks for a gamma centered at zero.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.hidden_size, self.eps = hidden_size, eps
        self.zero_centered = config.layernorm_zero_centered_gamma
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        start = torch.zeros if self.zero_centered else torch.ones
        self.weight = nn.Parameter(start(hidden_size, dtype=config.params_dtype, device=device))
        # Each tensor-parallel rank sees its part of the sequence only: Megatron sums the gradients of marked weights.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, input: Tensor) -> Tensor:
        """The normalized input, in its shape and dtype."""
        weight = self.weight + 1 if self.zero_centered else self.weight
        if input.is_cuda:
            return nn.functional.rms_norm(input, (self.hidden_size,), weight, self.eps)
        normalized: Tensor = _RMSNorm.apply(input, weight, self.eps)  # type: ignore[no-untyped-call]
        return normalized

    def extra_repr(self) -> str:
        """Size and epsilon."""
        return f"{self.hidden_size}, eps={self.eps}"


class _RMSNorm(torch.autograd.Function):
    """`rms_norm` on a CPU, where torch makes it of a dozen small operations."""

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
        # d = inverse * (g * w - normalized * mean(g * w * normalized))
        mean = torch.mv(rows, weight.float()).div_(size).view_as(inverse)
        d_input = torch.mul(gradient, weight.float()).addcmul_(normalized, mean, value=-1).mul_(inverse)
        return d_input.to(input.dtype), rows.sum(0).to(weight.dtype), None
