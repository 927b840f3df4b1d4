"""Experts with SwiGLU over rows sorted by expert: the first product with its activation in one kernel, then the second.

A program computes a tile of rows of one expert. Which expert a program has follows from the numbers of rows on the
device, so that the host does not wait for them: there are programs for the most tiles that any numbers of rows need,
and those without a tile return at once. Sums and the activation are in float32; torch's path rounds between the steps.
The backward pass is torch's: grouped products, and the derivative of the activation.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import grouped_mm

from mcore_rl.backend.gpu.kernels import ExpertKernels, Tile

TILES = {
    2: Tile(rows=128, columns=64, depth=64, num_warps=8, num_stages=3),
    # Full fp32 has no tensor cores: its operands are in registers.
    4: Tile(rows=32, columns=32, depth=16, num_warps=4, num_stages=2),
}
"""Tile by the bytes of an operand's number; the first product has two sums, of the gate and of the up-projection."""


def swiglu_experts(
    rows_ND: Tensor, gates_N: Tensor, fc1_EFD: Tensor, fc2_EDF: Tensor, counts_E: Tensor
) -> Tensor:
    """Return gate * fc2(silu(fc1_gate(x)) * fc1_up(x)) of each row, `[N, D]`.

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
        grad_ND = grad_ND.contiguous()
        grad_active_NF = grouped_mm(grad_ND, fc2_EDF, offs=ends_E)
        grad_hidden_NF, grad_gates_N, active_NF = swiglu_backward(hidden_NF, gates_N, grad_active_NF)
        return (
            grouped_mm(grad_hidden_NF, fc1_EFD, offs=ends_E),
            grad_gates_N,
            grouped_mm(grad_hidden_NF.t(), rows_ND, offs=ends_E),
            grouped_mm(grad_ND.t(), active_NF, offs=ends_E),
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
    tile, padded = TILES[rows_ND.element_size()], max(16, triton.next_power_of_2(num_experts))
    # Each expert may have one tile that is not full.
    most_tiles = triton.cdiv(num_rows, tile.rows) + num_experts
    active_NF, output_ND = rows_ND.new_empty((num_rows, inner)), torch.empty_like(rows_ND)
    _swiglu_kernel[(most_tiles, triton.cdiv(inner, tile.columns))](
        rows_ND, fc1_EFD, gates_N, ends_E, active_NF if hidden_NF is None else hidden_NF, active_NF,
        num_experts, width, inner,
        keeps_hidden=hidden_NF is not None,
        ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=tile.depth, EXPERTS=padded,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    _product_kernel[(most_tiles, triton.cdiv(width, tile.columns))](
        active_NF, fc2_EDF, ends_E, output_ND, num_experts, inner, width,
        ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=tile.depth, EXPERTS=padded,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return output_ND


def swiglu_backward(
    hidden_NF: Tensor, gates_N: Tensor, grad_active_NF: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the first product `[N, 2 F]` and of the gates, and the activation with gates `[N, F]`.

    Args:
        hidden_NF: First product, the gate's half before the up-projection's.
        gates_N: Router probability of each row.
        grad_active_NF: Gradient of the activation.
    """
    gate_NF, up_NF = hidden_NF.float().chunk(2, -1)
    sigmoid_NF, gates_N1 = gate_NF.sigmoid(), gates_N[:, None].float()
    silu_NF = gate_NF * sigmoid_NF
    # The activation once more, rather than saved: it costs no product.
    ungated_NF, grad_NF = silu_NF * up_NF, grad_active_NF.float()
    grad_gates_N = (grad_NF * ungated_NF).sum(1).to(gates_N.dtype)
    grad_NF = grad_NF * gates_N1
    # d silu(x) / dx = sigmoid(x) (1 + x (1 - sigmoid(x))).
    grad_gate_NF = grad_NF * up_NF * sigmoid_NF * (1.0 + gate_NF * (1.0 - sigmoid_NF))
    grad_hidden_NF = torch.cat([grad_gate_NF, grad_NF * silu_NF], 1).to(hidden_NF.dtype)
    return grad_hidden_NF, grad_gates_N, (ungated_NF * gates_N1).to(hidden_NF.dtype)


@triton.jit
def _tile_of(ends, num_experts, ROWS: tl.constexpr, EXPERTS: tl.constexpr):
    """Return the expert of this program's tile, its first row and the end of its expert's rows; no rows: no tile."""
    tile = tl.program_id(0)
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
    expert, first, end = _tile_of(ends, num_experts, ROWS, EXPERTS)
    if first < end:
        row_M = first + tl.arange(0, ROWS)
        is_row_M = row_M < end
        column_F = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
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
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """Write a tile of rows @ weight.T."""
    expert, first, end = _tile_of(ends, num_experts, ROWS, EXPERTS)
    if first < end:
        row_M = first + tl.arange(0, ROWS)
        is_row_M = row_M < end
        column_O = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        is_column_O = column_O < columns
        depth_K = tl.arange(0, DEPTH)
        rows_MK = rows + row_M[:, None].to(tl.int64) * width + depth_K[None, :]
        weight_KO = (
            weight + expert.to(tl.int64) * columns * width + column_O[None, :] * width + depth_K[:, None]
        )
        sum_MO = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(0, width, DEPTH):
            is_inside_K = depth_K < width - start
            left_MK = tl.load(rows_MK + start, mask=is_row_M[:, None] & is_inside_K[None, :], other=0.0)
            right_KO = tl.load(weight_KO + start, mask=is_column_O[None, :] & is_inside_K[:, None], other=0.0)
            sum_MO = tl.dot(left_MK, right_KO, sum_MO, input_precision="ieee")
        to_MO = output + row_M[:, None].to(tl.int64) * columns + column_O[None, :]
        tl.store(to_MO, sum_MO.to(output.dtype.element_ty), mask=is_row_M[:, None] & is_column_O[None, :])
