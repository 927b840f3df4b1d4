"""Experts with SwiGLU over rows sorted by expert, forward and backward, in four kernels.

| kernel | computes |
|---|---|
| `_swiglu_kernel` | the first product with its activation and gates |
| `_product_kernel` | rows times a weight: the second product, the gradients of the activation and of the rows |
| `_activation_gradient_kernel` | from that of the activation the gradients of the first product and of the gates |
| `_weight_gradient_kernel` | the gradient of a weight, or its sum with what `main_grad` holds |

A program computes a tile of rows of one expert. Which expert a program has follows from the numbers of rows on the
device, so that the host does not wait for them: there are programs for the most tiles that any numbers of rows need,
and those without a tile return at once. Programs that follow each other compute the same rows, so that those which
work at once read these, and the weights of a few experts, from the second-level cache. Sums, the activation and its
derivative are in float32; torch's path rounds between the steps. No sum is atomic: results are the same each time.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from mcore_rl.backend.gpu.kernels import ExpertKernels, Tile

TILES = {
    2: Tile(rows=128, columns=64, depth=64, num_warps=8, num_stages=3),
    # Full fp32 has no tensor cores: its operands are in registers.
    4: Tile(rows=32, columns=32, depth=16, num_warps=4, num_stages=2),
}
"""Tile of the first product by the bytes of an operand's number; its sums are two, of gate and up-projection."""
PRODUCT_TILES = {
    2: Tile(rows=128, columns=128, depth=64, num_warps=8, num_stages=3),
    4: Tile(rows=32, columns=32, depth=16, num_warps=4, num_stages=2),
}
"""Tile of the other products, which have one sum."""
GRADIENT_ROWS, GRADIENT_COLUMNS = 4, 256
"""Block of the activation's gradient, which has no product: as one with that of the activation it needs 254 registers
on Hopper, where the product alone needs 106, so that two of its blocks fit a multiprocessor.
"""


def swiglu_experts(
    rows_ND: Tensor, gates_N: Tensor, fc1_EFD: Tensor, fc2_EDF: Tensor, counts_E: Tensor
) -> Tensor:
    """Return gate * fc2(silu(fc1_gate(x)) * fc1_up(x)) of each row, `[N, D]`.

    For the backward pass the inputs are kept and the first product `[N, 2 F]`, from which the activation is computed
    again. Under Megatron's data parallelism weight gradients are added to `main_grad`, in float32.

    Args:
        rows_ND: Inputs, sorted by expert.
        gates_N: Router probability of each row.
        fc1_EFD: First weights; the gate's are above those of the up-projection.
        fc2_EDF: Second weights.
        counts_E: Number of rows of each expert; it may be 0.
    """
    inputs = (rows_ND.contiguous(), gates_N.contiguous(), fc1_EFD.contiguous(), fc2_EDF.contiguous())
    ends_E = counts_E.to(rows_ND.device).cumsum(0).to(torch.int32)
    if not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)):
        return _forward(*inputs, ends_E, None)
    found: Tensor = _Experts.apply(*inputs, ends_E)
    return found


KERNELS = ExpertKernels(swiglu_experts=swiglu_experts)


class _Experts(torch.autograd.Function):
    """Function that saves its inputs and the result of the first product, as the path of torch does."""

    @staticmethod
    def forward(
        ctx: Any, rows_ND: Tensor, gates_N: Tensor, fc1_EFD: Tensor, fc2_EDF: Tensor, ends_E: Tensor
    ) -> Tensor:
        hidden_NF = rows_ND.new_empty((len(rows_ND), fc1_EFD.shape[1]))
        ctx.save_for_backward(rows_ND, gates_N, fc1_EFD, fc2_EDF, ends_E, hidden_NF)
        return _forward(rows_ND, gates_N, fc1_EFD, fc2_EDF, ends_E, hidden_NF)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor | None, ...]:
        rows_ND, gates_N, fc1_EFD, fc2_EDF, ends_E, hidden_NF = ctx.saved_tensors
        needs_rows, _, needs_fc1, needs_fc2, _ = ctx.needs_input_grad
        grad_ND = grad_ND.contiguous()
        grad_hidden_NF, grad_gates_N, active_NF = _activation_gradient(
            hidden_NF, gates_N, fc2_EDF, grad_ND, ends_E
        )
        grad_fc2_EDF = _weight_gradient(fc2_EDF, grad_ND, active_NF, ends_E) if needs_fc2 else None
        del active_NF
        return (
            _product(grad_hidden_NF, fc1_EFD, ends_E, is_transposed=False) if needs_rows else None,
            grad_gates_N,
            _weight_gradient(fc1_EFD, grad_hidden_NF, rows_ND, ends_E) if needs_fc1 else None,
            grad_fc2_EDF,
            None,
        )


def _forward(
    rows_ND: Tensor,
    gates_N: Tensor,
    fc1_EFD: Tensor,
    fc2_EDF: Tensor,
    ends_E: Tensor,
    hidden_NF: Tensor | None,
) -> Tensor:
    """Return the results of the experts, and fill `hidden_NF` with the first product."""
    num_rows, width = rows_ND.shape
    num_experts, inner = len(fc1_EFD), fc2_EDF.shape[2]
    tile = TILES[rows_ND.element_size()]
    active_NF = rows_ND.new_empty((num_rows, inner))
    _swiglu_kernel[(_most_tiles(num_rows, num_experts, tile) * triton.cdiv(inner, tile.columns),)](
        rows_ND, fc1_EFD, gates_N, ends_E, active_NF if hidden_NF is None else hidden_NF, active_NF,
        num_experts, width, inner,
        keeps_hidden=hidden_NF is not None,
        ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=tile.depth, EXPERTS=_padded(num_experts),
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return _product(active_NF, fc2_EDF, ends_E, is_transposed=True)


def _product(rows_NI: Tensor, weight: Tensor, ends_E: Tensor, *, is_transposed: bool) -> Tensor:
    """Return each row times the weight of its expert, `[N, O]`; weights are `[E, O, I]` where transposed, or
    `[E, I, O]`.
    """
    num_rows, width = rows_NI.shape
    num_experts, columns = len(weight), weight.shape[1 if is_transposed else 2]
    tile, output_NO = PRODUCT_TILES[rows_NI.element_size()], rows_NI.new_empty((num_rows, columns))
    _product_kernel[(_most_tiles(num_rows, num_experts, tile) * triton.cdiv(columns, tile.columns),)](
        rows_NI, weight, ends_E, output_NO, num_experts, width, columns,
        is_transposed=is_transposed,
        ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=tile.depth, EXPERTS=_padded(num_experts),
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return output_NO


def _activation_gradient(
    hidden_NF: Tensor, gates_N: Tensor, fc2_EDF: Tensor, grad_ND: Tensor, ends_E: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the first product `[N, 2 F]` and of the gates, and the activation with gates `[N, F]`.

    Args:
        hidden_NF: First product, the gate's half before the up-projection's.
        gates_N: Router probability of each row.
        fc2_EDF: Second weights.
        grad_ND: Gradient of the results.
        ends_E: Row behind the last one of each expert.
    """
    # The gradient of the activation; the kernel writes the activation in its place.
    active_NF = _product(grad_ND, fc2_EDF, ends_E, is_transposed=False)
    (num_rows, inner), grad_hidden_NF = active_NF.shape, torch.empty_like(hidden_NF)
    grad_gates_N = torch.empty_like(gates_N)
    _activation_gradient_kernel[(triton.cdiv(num_rows, GRADIENT_ROWS),)](
        hidden_NF, gates_N, active_NF, grad_hidden_NF, grad_gates_N, num_rows, inner,
        ROWS=GRADIENT_ROWS, COLUMNS=GRADIENT_COLUMNS,
    )  # fmt: skip
    return grad_hidden_NF, grad_gates_N, active_NF


def _weight_gradient(weight_EOI: Tensor, grad_NO: Tensor, rows_NI: Tensor, ends_E: Tensor) -> Tensor:
    """Return the gradient of the weight of `rows_NI @ weight.T`, or add it to `main_grad`, where there is one.

    Then `grad_added_to_main_grad` tells Megatron's hook so, as in its fused layers, and what is returned is never read:
    its arrival runs the hook. All gradients of this weight must then come from here, or be zero.
    """
    adds = getattr(weight_EOI, "main_grad", None) is not None and hasattr(
        weight_EOI, "grad_added_to_main_grad"
    )
    found_EOI = weight_EOI.main_grad if adds else torch.empty_like(weight_EOI)  # type: ignore[attr-defined]
    assert found_EOI.is_contiguous() and found_EOI.shape == weight_EOI.shape
    num_experts, num_out, num_in = weight_EOI.shape
    tile = PRODUCT_TILES[grad_NO.element_size()]
    _weight_gradient_kernel[(triton.cdiv(num_out, tile.rows) * triton.cdiv(num_in, tile.columns), num_experts)](
        grad_NO, rows_NI, ends_E, found_EOI, num_out, num_in,
        adds=adds,
        ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=tile.depth,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    if not adds:
        return found_EOI
    weight_EOI.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    return torch.empty_like(weight_EOI)


def _most_tiles(num_rows: int, num_experts: int, tile: Tile) -> int:
    """Return how many tiles of rows any numbers of rows need: each expert may have one that is not full."""
    return int(triton.cdiv(num_rows, tile.rows)) + num_experts


def _padded(num_experts: int) -> int:
    """Return the number of experts that a program reads at once: a power of two, as Triton requires."""
    return max(16, int(triton.next_power_of_2(num_experts)))


@triton.jit
def _tile_of(tile, ends, num_experts, ROWS: tl.constexpr, EXPERTS: tl.constexpr):
    """Return the expert of a tile of rows, its first row and the end of its expert's rows; no rows: no tile."""
    expert_E = tl.arange(0, EXPERTS)
    is_expert_E = expert_E < num_experts
    end_E = tl.load(ends + expert_E, mask=is_expert_E, other=0)
    begin_E = tl.load(ends + expert_E - 1, mask=is_expert_E & (expert_E > 0), other=0)
    tiles_E = tl.where(is_expert_E, tl.cdiv(end_E - begin_E, ROWS), 0)
    # The experts whose last tile comes before this one: empty ones have none, and are passed over.
    expert = tl.sum(tl.where(is_expert_E & (tl.cumsum(tiles_E, 0) <= tile), 1, 0), 0)
    tiles_before = tl.sum(tl.where(expert_E < expert, tiles_E, 0), 0)
    begin = tl.sum(tl.where(expert_E == expert, begin_E, 0), 0)
    end = tl.sum(tl.where(expert_E == expert, end_E, 0), 0)
    # Beyond the last tile both are 0.
    return expert, begin + (tile - tiles_before) * ROWS, end


@triton.jit
def _swiglu_kernel(
    rows, weight, gates, ends, hidden, active, num_experts, width, inner,
    keeps_hidden: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """Write a tile of gate * silu(rows @ weight_gate.T) * (rows @ weight_up.T), and of the products where asked for."""
    across = tl.cdiv(inner, COLUMNS)
    expert, first, end = _tile_of(tl.program_id(0) // across, ends, num_experts, ROWS, EXPERTS)
    if first < end:
        row_M = first + tl.arange(0, ROWS)
        is_row_M = row_M < end
        column_F = tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)
        is_column_F = column_F < inner
        depth_K = tl.arange(0, DEPTH)
        rows_MK = rows + row_M[:, None].to(tl.int64) * width + depth_K[None, :]
        # 64 bits: the weights of all experts may have more than 2^31 numbers.
        weight_KF = (
            weight + expert.to(tl.int64) * 2 * inner * width + column_F[None, :] * width + depth_K[:, None]
        )
        gate_MF = tl.zeros((ROWS, COLUMNS), tl.float32)
        up_MF = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(0, width, DEPTH):
            is_inside_K = depth_K < width - start
            mask_KF = is_column_F[None, :] & is_inside_K[:, None]
            left_MK = tl.load(rows_MK + start, mask=is_row_M[:, None] & is_inside_K[None, :], other=0.0)
            right_KF = tl.load(weight_KF + start, mask=mask_KF, other=0.0)
            gate_MF = tl.dot(left_MK, right_KF, gate_MF, input_precision="ieee")
            right_KF = tl.load(weight_KF + inner * width + start, mask=mask_KF, other=0.0)
            up_MF = tl.dot(left_MK, right_KF, up_MF, input_precision="ieee")
        mask_MF = is_row_M[:, None] & is_column_F[None, :]
        if keeps_hidden:
            to_MF = hidden + row_M[:, None].to(tl.int64) * 2 * inner + column_F[None, :]
            tl.store(to_MF, gate_MF.to(hidden.dtype.element_ty), mask=mask_MF)
            tl.store(to_MF + inner, up_MF.to(hidden.dtype.element_ty), mask=mask_MF)
        factor_M = tl.load(gates + row_M, mask=is_row_M, other=0.0).to(tl.float32)
        active_MF = gate_MF / (1.0 + tl.exp(-gate_MF)) * up_MF * factor_M[:, None]
        to_MF = active + row_M[:, None].to(tl.int64) * inner + column_F[None, :]
        tl.store(to_MF, active_MF.to(active.dtype.element_ty), mask=mask_MF)


@triton.jit
def _product_kernel(
    rows, weight, ends, output, num_experts, width, columns,
    is_transposed: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """Write a tile of rows @ weight.T, with weights `[experts, columns, width]`; or of rows @ weight, with weights
    `[experts, width, columns]`.
    """
    across = tl.cdiv(columns, COLUMNS)
    expert, first, end = _tile_of(tl.program_id(0) // across, ends, num_experts, ROWS, EXPERTS)
    if first < end:
        row_M = first + tl.arange(0, ROWS)
        is_row_M = row_M < end
        column_O = tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)
        is_column_O = column_O < columns
        depth_K = tl.arange(0, DEPTH)
        rows_MK = rows + row_M[:, None].to(tl.int64) * width + depth_K[None, :]
        weight_KO = weight + expert.to(tl.int64) * columns * width
        if is_transposed:
            weight_KO += column_O[None, :] * width + depth_K[:, None]
            step = 1
        else:
            weight_KO += depth_K[:, None] * columns + column_O[None, :]
            step = columns
        sum_MO = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(0, width, DEPTH):
            is_inside_K = depth_K < width - start
            left_MK = tl.load(rows_MK + start, mask=is_row_M[:, None] & is_inside_K[None, :], other=0.0)
            mask_KO = is_column_O[None, :] & is_inside_K[:, None]
            right_KO = tl.load(weight_KO + start * step, mask=mask_KO, other=0.0)
            sum_MO = tl.dot(left_MK, right_KO, sum_MO, input_precision="ieee")
        to_MO = output + row_M[:, None].to(tl.int64) * columns + column_O[None, :]
        tl.store(to_MO, sum_MO.to(output.dtype.element_ty), mask=is_row_M[:, None] & is_column_O[None, :])


@triton.jit
def _activation_gradient_kernel(
    hidden, gates, active, grad_hidden, grad_gates, num_rows, inner,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write the gradients of ROWS rows' first product and gates, and replace in `active` the gradient of the activation
    by the activation with gates.
    """
    row_M = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row_M = row_M < num_rows
    begin_M1 = row_M[:, None].to(tl.int64) * inner
    factor_M1 = tl.load(gates + row_M, mask=is_row_M, other=0.0).to(tl.float32)[:, None]
    grad_gate_M = tl.zeros((ROWS,), tl.float32)
    for start in range(0, inner, COLUMNS):
        column_F = start + tl.arange(0, COLUMNS)
        mask_MF = is_row_M[:, None] & (column_F < inner)[None, :]
        # The up-projection's half lies behind the gate's.
        at_MF = 2 * begin_M1 + column_F[None, :]
        gate_MF = tl.load(hidden + at_MF, mask=mask_MF, other=0.0).to(tl.float32)
        up_MF = tl.load(hidden + at_MF + inner, mask=mask_MF, other=0.0).to(tl.float32)
        grad_MF = tl.load(active + begin_M1 + column_F[None, :], mask=mask_MF, other=0.0).to(tl.float32)
        sigmoid_MF = 1.0 / (1.0 + tl.exp(-gate_MF))
        silu_MF = gate_MF * sigmoid_MF
        ungated_MF = silu_MF * up_MF
        grad_gate_M += tl.sum(grad_MF * ungated_MF, 1)
        active_MF = (ungated_MF * factor_M1).to(active.dtype.element_ty)
        tl.store(active + begin_M1 + column_F[None, :], active_MF, mask=mask_MF)
        grad_MF *= factor_M1
        # d silu(x) / dx = sigmoid(x) + silu(x) (1 - sigmoid(x)).
        grad_gate_MF = grad_MF * up_MF * (sigmoid_MF + silu_MF * (1.0 - sigmoid_MF))
        tl.store(grad_hidden + at_MF, grad_gate_MF.to(grad_hidden.dtype.element_ty), mask=mask_MF)
        grad_up_MF = (grad_MF * silu_MF).to(grad_hidden.dtype.element_ty)
        tl.store(grad_hidden + at_MF + inner, grad_up_MF, mask=mask_MF)
    tl.store(grad_gates + row_M, grad_gate_M.to(grad_gates.dtype.element_ty), mask=is_row_M)


@triton.jit
def _weight_gradient_kernel(
    grads, rows, ends, found, num_out, num_in,
    adds: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Write, or add to `found` `[experts, num_out, num_in]`, a tile of grads.T @ rows of one expert's rows."""
    expert = tl.program_id(1)
    begin = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends + expert)
    across = tl.cdiv(num_in, COLUMNS)
    out_M = tl.program_id(0) // across * ROWS + tl.arange(0, ROWS)
    in_I = tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)
    is_out_M, is_in_I = out_M < num_out, in_I < num_in
    sum_MI = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(begin, end, DEPTH):
        row_K = start + tl.arange(0, DEPTH)
        is_row_K = row_K < end
        left_MK = tl.load(
            grads + row_K[None, :].to(tl.int64) * num_out + out_M[:, None],
            mask=is_out_M[:, None] & is_row_K[None, :],
            other=0.0,
        )
        right_KI = tl.load(
            rows + row_K[:, None].to(tl.int64) * num_in + in_I[None, :],
            mask=is_in_I[None, :] & is_row_K[:, None],
            other=0.0,
        )
        sum_MI = tl.dot(left_MK, right_KI, sum_MI, input_precision="ieee")
    to_MI = found + expert.to(tl.int64) * num_out * num_in + out_M[:, None] * num_in + in_I[None, :]
    mask_MI = is_out_M[:, None] & is_in_I[None, :]
    if adds:
        if begin < end:
            sum_MI += tl.load(to_MI, mask=mask_MI, other=0.0).to(tl.float32)
            tl.store(to_MI, sum_MI.to(found.dtype.element_ty), mask=mask_MI)
    else:
        # Zeros for an expert without rows.
        tl.store(to_MI, sum_MI.to(found.dtype.element_ty), mask=mask_MI)
