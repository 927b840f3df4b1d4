"""Matrix products in fp32 of operands that the compiled file rounds to bf16, with sums in fp32.

By AMX they are four times as fast as products in fp32, by AVX-512's instruction for bf16 twice as fast on AMD. On
other processors they save nothing: rounded operands are multiplied in fp32, which is exact.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mcore_rl.megatron.cpu.compiled import library


def rounded_product(left_MK: Tensor, right_NK: Tensor) -> Tensor:
    """Return `left_MK @ right_NK.T`, fp32, of operands rounded to bf16. No gradient is recorded."""
    product_MN = left_MK.new_empty(len(left_MK), len(right_NK))
    left, is_left_by_column, left_stride = _stored(left_MK)
    right, is_right_by_column, right_stride = _stored(right_NK)
    # The C++ file calls the right operand transposed where it is stored by rows of the left operand's width.
    sizes = is_left_by_column, not is_right_by_column, *product_MN.shape, left_MK.shape[1]
    compiled = library()
    compiled.rounded_product(
        compiled.sgemm, *sizes, left, left_stride, right, right_stride, product_MN, product_MN.stride(0)
    )
    return product_MN


def rounded_linear(input: Tensor, weight_OI: Tensor) -> Tensor:
    """Return `input @ weight_OI.T` over the last axis, fp32; its three products round their operands."""
    rows_NI = input.reshape(-1, weight_OI.shape[1])
    rows_NO: Tensor = _RoundedLinear.apply(rows_NI, weight_OI)  # type: ignore[no-untyped-call]
    # Viewed out here, so that the caller may change the output in place.
    return rows_NO.view(*input.shape[:-1], weight_OI.shape[0])


class _RoundedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_NI: Tensor, weight_OI: Tensor) -> Tensor:
        ctx.save_for_backward(rows_NI, weight_OI)
        return rounded_product(rows_NI, weight_OI)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_NO: Tensor) -> tuple[Tensor | None, Tensor | None]:
        rows_NI, weight_OI = ctx.saved_tensors
        d_rows = rounded_product(gradient_NO, weight_OI.t()) if ctx.needs_input_grad[0] else None
        d_weight = rounded_product(gradient_NO.t(), rows_NI.t()) if ctx.needs_input_grad[1] else None
        return d_rows, d_weight


def _stored(matrix: Tensor) -> tuple[Tensor, bool, int]:
    """Return a matrix with contiguous rows or else columns, whether it is columns, and their distance."""
    if matrix.stride(1) != 1 and matrix.stride(0) == 1:
        return matrix, True, matrix.stride(1)
    matrix = matrix if matrix.stride(1) == 1 else matrix.contiguous()
    return matrix, False, matrix.stride(0)
