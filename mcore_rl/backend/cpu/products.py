"""Matrix products on a CPU by oneDNN instead of MKL, where that is faster.

torch gives fp32 products to MKL, which leaves the AVX-512 units of AMD's processors unused: a product of 512 x 256
by 256 x 256 runs at 105 GFLOP/s there, at 230 by oneDNN (one core of Zen 5), both in full fp32.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

ROW_MULTIPLE = 16
"""oneDNN compiles a kernel (~0.4 ms) for each new shape: a number of rows that is not of these goes to MKL."""
SMALL_MACS = 1 << 21
"""Multiply-adds below which oneDNN's look-up of its kernel (~10 us) costs more than it saves."""
GRADIENT_ROWS = 512
"""Rows that a weight's gradient sums at a time: its two operands then stay in the cache."""

HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def product(left_MK: Tensor, right_NK: Tensor) -> Tensor:
    """`left_MK @ right_NK.T` in the operands' dtype. No gradient is recorded."""
    if is_worthwhile(left_MK, right_NK.shape[0]):
        by_onednn: Tensor = torch.ops.mkldnn._linear_pointwise(
            _dense(left_MK), _dense(right_NK), None, "none", [], ""
        )
        return by_onednn
    return torch.mm(left_MK, right_NK.t())


def is_worthwhile(left_MK: Tensor, num_columns: int) -> bool:
    """Whether oneDNN takes the product of `left_MK` with a matrix of `num_columns` columns."""
    num_rows, depth = left_MK.shape
    return (
        HAS_ONEDNN
        and left_MK.dtype == torch.float32
        and left_MK.device.type == "cpu"
        and num_rows % ROW_MULTIPLE == 0
        and num_rows * depth * num_columns >= SMALL_MACS
    )


def _dense(matrix: Tensor) -> Tensor:
    """For a matrix with gaps between its rows oneDNN takes a kernel that is hundreds of times slower."""
    return matrix if matrix.is_contiguous() or matrix.t().is_contiguous() else matrix.contiguous()


def weight_gradient(gradient_NO: Tensor, input_NI: Tensor) -> Tensor:
    """`gradient_NO.T @ input_NI`, the gradient of a weight `[O, I]`; fastest with the first operand transposed."""
    parts = zip(gradient_NO.split(GRADIENT_ROWS), input_NI.split(GRADIENT_ROWS), strict=True)
    total_OI: Tensor | None = None
    for gradient, rows in parts:
        part_OI = product(gradient.t().contiguous(), rows.t())
        total_OI = part_OI if total_OI is None else total_OI.add_(part_OI)
    assert total_OI is not None
    return total_OI


def linear(input: Tensor, weight_OI: Tensor) -> Tensor:
    """`input @ weight_OI.T` over the last axis, with its gradients."""
    rows: Tensor = _Linear.apply(input.reshape(-1, weight_OI.shape[1]), weight_OI)  # type: ignore[no-untyped-call]
    # Viewed out here, so that the caller may change the output in place.
    return rows.view(*input.shape[:-1], weight_OI.shape[0])


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input_NI: Tensor, weight_OI: Tensor) -> Tensor:
        ctx.save_for_backward(input_NI, weight_OI)
        return product(input_NI, weight_OI)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_NO: Tensor) -> tuple[Tensor | None, Tensor | None]:
        input_NI, weight_OI = ctx.saved_tensors
        d_input = product(gradient_NO, weight_OI.t()) if ctx.needs_input_grad[0] else None
        d_weight = weight_gradient(gradient_NO, input_NI) if ctx.needs_input_grad[1] else None
        return d_input, d_weight
