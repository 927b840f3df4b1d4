"""Matrix products on a CPU by oneDNN or by torch's own way, which is MKL; `kernels.Process` tells which.

torch gives fp32 products to MKL, which leaves half of the AVX-512 units of some processors unused: a product of
512 x 256 by 256 x 256 runs at 105 GFLOP/s there, at 230 by oneDNN (one core of Zen 5), both in full fp32. On others
MKL is as fast, and adds a weight's gradient to a tensor in place, without copies of its operands. Products of operands
rounded to bf16 are four times as fast with AMX, by AVX-512's instruction for them twice as fast on AMD and half as fast
on Intel; without any torch's are five times as slow as those in fp32. Where bf16 is slower, rounded operands are
multiplied in fp32: that is exact, and saves nothing. The compiled file rounds as it packs them, torch before, and torch
in bf16 rounds the result too.

Tensors in bf16 are multiplied so too, and everything else is computed of them in fp32, with each result rounded once.
Runs of before multiplied some by torch, which takes ten times as long without instructions for bf16, and with AMX more
than twice as long in a step, since it compiles kernels for each number of rows: `CpuKernels.half` tells which.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mcore_rl.backend.cpu.compiled import Library
from mcore_rl.backend.cpu.kernels import (
    Process,
    is_widened,
    rounded,
    rounded_weight,
    rounding_for,
    weight_as,
)

ROW_MULTIPLE = 16
"""oneDNN compiles a kernel (~0.4 ms) for each new shape: a number of rows that is not of these goes to MKL."""
SMALL_MACS = 1 << 21
"""Multiply-adds below which oneDNN's look-up of its kernel (~10 us) costs more than it saves."""
GRADIENT_ROWS = 512
"""Rows that a weight's gradient sums at a time: its two operands then stay in the cache."""
FEW_SUMMED_ROWS = 64
"""Number of rows below which a weight's gradient is added in place, which is then faster than a separate product."""


def product(left_MK: Tensor, right_NK: Tensor) -> Tensor:
    """`left_MK @ right_NK.T` in the operands' dtype. No gradient is recorded."""
    if is_worthwhile(left_MK, right_NK.shape[0]):
        by_onednn: Tensor = torch.ops.mkldnn._linear_pointwise(
            _dense(left_MK), _dense(right_NK), None, "none", [], ""
        )
        return by_onednn
    if rounds(left_MK):
        if (library := rounding_for(left_MK, right_NK)) is not None:
            return _compiled_product(library, left_MK, right_NK)
        return torch.mm(rounded(left_MK), rounded(right_NK).t()).float()
    if left_MK.dtype == torch.bfloat16 and is_widened(left_MK):
        return product(left_MK.float(), right_NK.float()).to(left_MK.dtype)
    return torch.mm(left_MK, right_NK.t())


def product_with_weight(rows_NI: Tensor, weight_OI: Tensor) -> Tensor:
    """Return `product` with a weight, whose copy that is multiplied is kept inside `weights_unchanged`."""
    if rounds(rows_NI) and rounding_for(rows_NI, weight_OI) is None:
        return torch.mm(rounded(rows_NI), rounded_weight(weight_OI).t()).float()
    return product(rows_NI, weight_as(rows_NI.dtype, weight_OI))


def _compiled_product(
    library: Library, left_MK: Tensor, right_NK: Tensor, total_MN: Tensor | None = None
) -> Tensor:
    """Return `left_MK @ right_NK.T` of operands rounded to bf16, summed in fp32; added to `total_MN` if given."""
    is_sum = total_MN is not None
    if total_MN is None:
        total_MN = left_MK.new_empty(len(left_MK), len(right_NK))
    left, is_left_by_column, left_stride = _stored(left_MK)
    right, is_right_by_column, right_stride = _stored(right_NK)
    # The C++ file calls the right operand transposed where it is stored by rows of the left one's width.
    sizes = is_left_by_column, not is_right_by_column, *total_MN.shape, left_MK.shape[1]
    result = is_sum, total_MN, total_MN.stride(0)
    by = library.sgemm, Process.kernels.rounding
    library.rounded_product(*by, *sizes, left, left_stride, right, right_stride, *result)
    return total_MN


def _stored(matrix: Tensor) -> tuple[Tensor, bool, int]:
    """Return a matrix whose rows or else columns are contiguous, whether it is columns, and their distance."""
    if matrix.stride(1) != 1 and matrix.stride(0) == 1:
        return matrix, True, matrix.stride(1)
    matrix = matrix if matrix.stride(1) == 1 else matrix.contiguous()
    return matrix, False, matrix.stride(0)


def rounds(operand: Tensor) -> bool:
    """Return whether products of this operand round it to bf16.

    Sums are in fp32; torch rounds those of its products in bf16 once.
    """
    return (
        Process.kernels.products == "bf16" and operand.dtype == torch.float32 and operand.device.type == "cpu"
    )


def is_worthwhile(left_MK: Tensor, num_columns: int) -> bool:
    """Whether oneDNN takes the product of `left_MK` with a matrix of `num_columns` columns."""
    num_rows, depth = left_MK.shape
    return (
        Process.kernels.products == "onednn"
        and left_MK.dtype == torch.float32
        and left_MK.device.type == "cpu"
        and num_rows % ROW_MULTIPLE == 0
        and num_rows * depth * num_columns >= SMALL_MACS
    )


def _dense(matrix: Tensor) -> Tensor:
    """For a matrix with gaps between its rows oneDNN takes a kernel that is hundreds of times slower."""
    return matrix if matrix.is_contiguous() or matrix.t().is_contiguous() else matrix.contiguous()


def weight_gradient(gradient_NO: Tensor, input_NI: Tensor) -> Tensor:
    """Return `gradient_NO.T @ input_NI`, the gradient of a weight `[O, I]`."""
    if Process.kernels.products != "onednn":
        return product(gradient_NO.t(), input_NI.t())
    total_OI = input_NI.new_zeros(gradient_NO.shape[1], input_NI.shape[1])
    add_weight_gradient(total_OI, gradient_NO, input_NI)
    return total_OI


def add_weight_gradient(total_OI: Tensor, gradient_NO: Tensor, input_NI: Tensor) -> None:
    """Add `gradient_NO.T @ input_NI` to `total_OI`, which may have more bits than the operands."""
    if input_NI.dtype == torch.bfloat16 and is_widened(input_NI):
        gradient_NO, input_NI = gradient_NO.float(), input_NI.float()
    if rounds(input_NI):
        library = rounding_for(total_OI, gradient_NO, input_NI)
        if library is not None and total_OI.stride(1) == 1:
            _compiled_product(library, gradient_NO.t(), input_NI.t(), total_OI)
            return
        total_OI.add_(product(gradient_NO.t(), input_NI.t()))
        return
    by_onednn = (
        Process.kernels.products == "onednn" and input_NI.dtype == torch.float32 and not input_NI.is_cuda
    )
    if total_OI.dtype == input_NI.dtype and (not by_onednn or len(input_NI) < FEW_SUMMED_ROWS):
        total_OI.addmm_(gradient_NO.t(), input_NI)
    elif not by_onednn:
        total_OI.add_(torch.mm(gradient_NO.t(), input_NI))
    else:
        # Fastest with the first operand transposed.
        for gradient, rows in zip(
            gradient_NO.split(GRADIENT_ROWS), input_NI.split(GRADIENT_ROWS), strict=True
        ):
            total_OI.add_(product(gradient.t().contiguous(), rows.t()))


class WeightGradient:
    """Gradient of a weight, summed in its final place.

    Under Megatron's data parallelism that is the weight's `main_grad`, which saves writing and reading a tensor of the
    weight's size. As in Megatron's fused layers, `grad_added_to_main_grad` tells the hook so. The hook then reads no
    other gradient of this weight in the step, so that whatever multiplies by a weight on a CPU sums its gradient here.
    """

    def __init__(self, weight: Tensor, dtype: torch.dtype | None = None) -> None:
        """Begin at the sum of the step so far, or at zero in `dtype`, which is the weight's where it is None."""
        self._weight = weight
        self._fused = (
            weight.device.type == "cpu"
            and getattr(weight, "main_grad", None) is not None
            and hasattr(weight, "grad_added_to_main_grad")
        )
        self.total: Tensor = (
            weight.main_grad if self._fused else torch.zeros_like(weight, dtype=dtype)  # type: ignore[attr-defined]
        )
        """Sum so far, in the shape of the weight; it may have more bits than the weight."""

    def result(self) -> Tensor:
        """Return the gradient for autograd, or a tensor that is never read but whose arrival runs Megatron's hook."""
        if not self._fused:
            return self.total.to(self._weight.dtype)
        self._weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
        # The hook adds what arrives at an embedding that is also the output layer: the gradient of the embedding.
        is_read = getattr(self._weight, "zero_out_wgrad", False)
        return torch.zeros_like(self._weight) if is_read else torch.empty_like(self._weight)


def linear(input: Tensor, weight_OI: Tensor) -> Tensor:
    """`input @ weight_OI.T` over the last axis in the input's dtype, with its gradients."""
    input_NI = input.reshape(-1, weight_OI.shape[1])
    if input.dtype == torch.bfloat16 and is_widened(input):
        input_NI = input_NI.float()
    if torch.is_grad_enabled():
        rows: Tensor = _Linear.apply(input_NI, weight_OI)  # type: ignore[no-untyped-call]
    else:
        rows = product_with_weight(input_NI, weight_OI)
    # Viewed out here, so that the caller may change the output in place.
    return rows.to(input.dtype).view(*input.shape[:-1], weight_OI.shape[0])


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input_NI: Tensor, weight_OI: Tensor) -> Tensor:
        ctx.save_for_backward(input_NI, weight_OI)
        return product_with_weight(input_NI, weight_OI)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_NO: Tensor) -> tuple[Tensor | None, Tensor | None]:
        input_NI, weight_OI = ctx.saved_tensors
        d_input = None
        if ctx.needs_input_grad[0]:
            d_input = product(gradient_NO, weight_as(input_NI.dtype, weight_OI).t())
        if not ctx.needs_input_grad[1]:
            return d_input, None
        if not hasattr(weight_OI, "main_grad"):
            return d_input, weight_gradient(gradient_NO, input_NI).to(weight_OI.dtype)
        d_weight = WeightGradient(weight_OI)
        add_weight_gradient(d_weight.total, gradient_NO, input_NI)
        return d_input, d_weight.result()


def by_onednn(megatron_linear: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Megatron's linear with its collectives, its products by `linear`."""
    mappings = importlib.import_module("megatron.core.tensor_parallel.mappings")

    @functools.wraps(megatron_linear)
    def call(input: Tensor, weight: Tensor, **options: Any) -> Tensor:
        unusual = "gradient_accumulation_fusion", "grad_output_buffer"
        is_fp32 = weight.dtype == torch.float32 or is_widened(weight)
        if not is_fp32 or any(options.get(name) not in (None, False) for name in unusual):
            return megatron_linear(input, weight, **options)
        group = options["tp_group"]
        if options["sequence_parallel"]:
            input = mappings.gather_from_sequence_parallel_region(input, group=group)
        elif options["allreduce_dgrad"]:
            input = mappings.copy_to_tensor_model_parallel_region(input, group=group)
        product, bias = linear(input, weight), options.get("bias")
        return product if bias is None else product + bias

    return call


def gated_by_onednn(gating: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The router's logits, by the products of `by_onednn`; never rounded to bf16, which would choose other experts."""

    @functools.wraps(gating)
    def call(input: Tensor, weight: Tensor, bias: Tensor | None, router_dtype: torch.dtype) -> Tensor:
        is_fp32 = {input.dtype, weight.dtype, router_dtype} == {torch.float32}
        if Process.kernels.products == "bf16" or bias is not None or not is_fp32:
            return gating(input, weight, bias, router_dtype)
        return linear(input, weight)

    return call
