"""RMSNorm in one pass over memory; on a CPU torch's is a dozen small operations."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mcore_rl.megatron.cpu.compiled import library
from mcore_rl.model.layers.norm import RMSNorm, ZeroCenteredRMSNorm


class CompiledRMSNorm(RMSNorm):
    """`RMSNorm` by the compiled library, in fp32."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized input with the same shape."""
        return _rms_norm(x, self.weight, self.eps)


class CompiledZeroCenteredRMSNorm(ZeroCenteredRMSNorm):
    """`ZeroCenteredRMSNorm` by the compiled library, in fp32."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized input with the same shape."""
        return _rms_norm(x, self.weight + 1, self.eps)


def _rms_norm(input: Tensor, weight: Tensor, eps: float) -> Tensor:
    if not torch.is_grad_enabled():
        # A decoding step has so few rows that recording for autograd would take longer than the norm.
        return _normalized(input, weight, eps)[0]
    normalized: Tensor = _RMSNorm.apply(input, weight, eps)  # type: ignore[no-untyped-call]
    return normalized


def _normalized(input: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the normalized input, the contiguous input, and 1 / rms of each row."""
    input, width = input.contiguous(), weight.shape[0]
    output, inverse = input.new_empty(input.shape), input.new_empty(*input.shape[:-1], 1)
    library().rms_norm_forward(input, weight, inverse.numel(), width, eps, output, inverse)
    return output, input, inverse


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, eps: float) -> Tensor:
        output, input, inverse = _normalized(input, weight, eps)
        ctx.save_for_backward(input, weight, inverse)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        input, weight, inverse = ctx.saved_tensors
        d_input, d_weight, part = (like.new_empty(like.shape) for like in (input, weight, weight))
        operands = gradient.contiguous(), input, weight, inverse
        results = d_input, d_weight, part
        library().rms_norm_backward(*operands, inverse.numel(), weight.shape[0], *results)
        return d_input, d_weight, None
