"""The logits of a large vocabulary, read in the same kernel that computes them.

One kernel multiplies hidden states by the output weight and keeps, for each row, the highest logit and three sums: what
logprobs, entropies and the cross entropy are made of. No logit is stored. Another computes the logits of some rows once
more and writes their gradient, rounded as the weights are; two products of torch make of it the gradients of the
hidden states and of the weight. Logits are in float32 in both, where torch rounds those of a bf16 model to bf16.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mcore_rl.backend.gpu.kernels import LogitKernels, Tile

LOWEST = tl.constexpr(-1e30)
"""Logit in the place of -inf, as in `parallel.vocab`."""
TILES = {
    2: Tile(rows=128, columns=128, depth=64, num_warps=8, num_stages=3),
    # Full fp32 has no tensor cores: its operands are in registers.
    4: Tile(rows=64, columns=64, depth=16, num_warps=8, num_stages=2),
}
"""Tile by the bytes of an operand's number; tests/triton compiles each."""
COLUMNS_PER_PROGRAM = 4096
"""Ids of the vocabulary that one program reads, so that few rows also fill a GPU."""


def local_sums(
    hidden_TD: Tensor,
    weight_vD: Tensor,
    targets_T: Tensor,
    rows_N: Tensor,
    *,
    first: int,
    inverse_temperature: float,
    has_entropy: bool,
) -> tuple[Tensor, Tensor]:
    """Return of this slice of the vocabulary the highest scaled logit x of each row, and three sums.

    Args:
        hidden_TD: Hidden states.
        weight_vD: Output weight of this rank's ids, without those that pad the vocabulary; one at least.
        targets_T: Token ids of the whole vocabulary.
        rows_N: Positions that are computed.
        first: First id of the slice.
        inverse_temperature: Factor of the logits.
        has_entropy: Whether the second sum is wanted.

    Returns:
        The highest x, float32 `[N]`, and the sums of e^y, of y e^y with y = x - highest (0 where no entropy is wanted),
        and the target's x (0 where another rank has it), float32 `[3, N]`.
    """
    hidden_TD, weight_vD = _dense(hidden_TD), _dense(weight_vD)
    tile, num_rows, num_columns = TILES[weight_vD.element_size()], len(rows_N), len(weight_vD)
    parts = triton.cdiv(num_columns, COLUMNS_PER_PROGRAM)
    found_4PN = hidden_TD.new_empty((4, parts, num_rows), dtype=torch.float32)
    if num_rows:
        # Rows first: programs that run at the same time share the weight, which is larger than the cache.
        _sums_kernel[(triton.cdiv(num_rows, tile.rows), parts)](
            hidden_TD, weight_vD, rows_N.contiguous(), targets_T.contiguous(), found_4PN,
            num_rows, num_columns, first, hidden_TD.shape[1], hidden_TD.stride(0), weight_vD.stride(0),
            inverse_temperature,
            has_entropy=has_entropy, per_program=COLUMNS_PER_PROGRAM,
            ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=tile.depth,
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
    highest_PN, total_PN, weighted_PN, target_PN = found_4PN
    highest_N = highest_PN.amax(0)
    shift_PN = highest_PN - highest_N
    factor_PN = shift_PN.exp()
    total_N, weighted_N = (
        (factor_PN * total_PN).sum(0),
        (factor_PN * (weighted_PN + shift_PN * total_PN)).sum(0),
    )
    return highest_N, torch.stack([total_N, weighted_N if has_entropy else total_N * 0.0, target_PN.sum(0)])


def gradient(
    hidden_TD: Tensor,
    weight_vD: Tensor,
    targets_T: Tensor,
    rows_C: Tensor,
    log_partition_C: Tensor,
    entropy_C: Tensor,
    grad_logprobs_T: Tensor | None,
    grad_entropy_T: Tensor | None,
    *,
    first: int,
    inverse_temperature: float,
) -> Tensor:
    """Return the gradient `[C, v]` of the logits, without temperature, in the weight's format.

    Args:
        hidden_TD: Hidden states.
        weight_vD: Output weight of this rank's ids, without those that pad the vocabulary; one at least.
        targets_T: Token ids of the whole vocabulary.
        rows_C: Positions that are computed.
        log_partition_C: Log of the sum of e^x over the whole vocabulary, float32.
        entropy_C: Entropy at each of these positions in nats, float32.
        grad_logprobs_T: Gradient of the logprobs; None: 0.
        grad_entropy_T: Gradient of the entropies; None: 0.
        first: First id of the slice.
        inverse_temperature: Factor of the logits.
    """
    hidden_TD, weight_vD = _dense(hidden_TD), _dense(weight_vD)
    tile, num_rows, num_columns = TILES[weight_vD.element_size()], len(rows_C), len(weight_vD)
    grad_Cv = weight_vD.new_empty((num_rows, num_columns))
    if num_rows:
        unused_T = log_partition_C
        _gradient_kernel[(triton.cdiv(num_rows, tile.rows), triton.cdiv(num_columns, tile.columns))](
            hidden_TD, weight_vD, rows_C.contiguous(), targets_T.contiguous(),
            log_partition_C.contiguous(), entropy_C.contiguous(),
            unused_T if grad_logprobs_T is None else grad_logprobs_T.contiguous(),
            unused_T if grad_entropy_T is None else grad_entropy_T.contiguous(),
            grad_Cv,
            num_rows, num_columns, first, hidden_TD.shape[1], hidden_TD.stride(0), weight_vD.stride(0),
            inverse_temperature,
            of_logprobs=grad_logprobs_T is not None, of_entropy=grad_entropy_T is not None,
            ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=tile.depth,
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
    return grad_Cv


KERNELS = LogitKernels(local_sums=local_sums, gradient=gradient)


def _dense(matrix: Tensor) -> Tensor:
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()


@triton.jit
def _scaled_logits(
    hidden, weight, row_M, is_row_M, column_V, is_column_V, width, hidden_stride, weight_stride,
    inverse_temperature, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Return the logits `[ROWS, COLUMNS]` of some rows and ids, times a factor, in float32."""
    depth_K = tl.arange(0, DEPTH)
    # 64 bits: a large vocabulary times the hidden size exceeds 2^31.
    hidden_MK = hidden + row_M[:, None].to(tl.int64) * hidden_stride + depth_K[None, :]
    weight_KV = weight + column_V[None, :].to(tl.int64) * weight_stride + depth_K[:, None]
    sum_MV = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, width, DEPTH):
        is_inside_K = depth_K < width - start
        left_MK = tl.load(hidden_MK + start, mask=is_row_M[:, None] & is_inside_K[None, :], other=0.0)
        right_KV = tl.load(weight_KV + start, mask=is_column_V[None, :] & is_inside_K[:, None], other=0.0)
        sum_MV = tl.dot(left_MK, right_KV, sum_MV, input_precision="ieee")
    return sum_MV * inverse_temperature


@triton.jit
def _sums_kernel(
    hidden, weight, rows, targets, found,
    num_rows, num_columns, first, width, hidden_stride, weight_stride, inverse_temperature,
    has_entropy: tl.constexpr, per_program: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Write the highest logit and the sums over `per_program` ids of ROWS rows to `found` `[4, parts, num_rows]`."""
    place_M = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row_M = place_M < num_rows
    row_M = tl.load(rows + place_M, mask=is_row_M, other=0)
    target_M = tl.load(targets + row_M, mask=is_row_M, other=-1) - first
    # The sums belong to this origin; from LOWEST, and not from -inf, a shift of it times a sum of 0 is 0.
    highest_M = tl.full((ROWS,), LOWEST, tl.float32)
    total_M = tl.zeros((ROWS,), tl.float32)
    weighted_M = tl.zeros((ROWS,), tl.float32)
    at_target_M = tl.zeros((ROWS,), tl.float32)
    begin = tl.program_id(1) * per_program
    for start in range(begin, tl.minimum(begin + per_program, num_columns), COLUMNS):
        column_V = start + tl.arange(0, COLUMNS)
        is_column_V = column_V < num_columns
        logit_MV = _scaled_logits(
            hidden, weight, row_M, is_row_M, column_V, is_column_V, width, hidden_stride, weight_stride,
            inverse_temperature, ROWS, COLUMNS, DEPTH,
        )  # fmt: skip
        is_target_MV = (column_V[None, :] == target_M[:, None]) & is_column_V[None, :]
        at_target_M += tl.sum(tl.where(is_target_MV, logit_MV, 0.0), 1)
        # Comparisons, not `maximum`, which would lose a NaN.
        logit_MV = tl.where(logit_MV < LOWEST, LOWEST, logit_MV)
        logit_MV = tl.where(is_column_V[None, :], logit_MV, LOWEST)
        new_M = tl.maximum(highest_M, tl.max(logit_MV, 1))
        shift_M = highest_M - new_M
        factor_M = tl.exp(shift_M)
        below_MV = logit_MV - new_M[:, None]
        exponential_MV = tl.where(is_column_V[None, :], tl.exp(below_MV), 0.0)
        if has_entropy:
            weighted_M = factor_M * (weighted_M + shift_M * total_M) + tl.sum(exponential_MV * below_MV, 1)
        total_M = factor_M * total_M + tl.sum(exponential_MV, 1)
        highest_M = new_M
    row_of_found = tl.program_id(1) * num_rows
    size = tl.num_programs(1) * num_rows
    tl.store(found + row_of_found + place_M, highest_M, mask=is_row_M)
    tl.store(found + size + row_of_found + place_M, total_M, mask=is_row_M)
    tl.store(found + 2 * size + row_of_found + place_M, weighted_M, mask=is_row_M)
    tl.store(found + 3 * size + row_of_found + place_M, at_target_M, mask=is_row_M)


@triton.jit
def _gradient_kernel(
    hidden, weight, rows, targets, log_partitions, entropies, grad_logprobs, grad_entropies, grads,
    num_rows, num_columns, first, width, hidden_stride, weight_stride, inverse_temperature,
    of_logprobs: tl.constexpr, of_entropy: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Write the gradient of one tile of logits to `grads` `[num_rows, num_columns]`."""
    place_M = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row_M = place_M < num_rows
    row_M = tl.load(rows + place_M, mask=is_row_M, other=0)
    column_V = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column_V = column_V < num_columns
    logit_MV = _scaled_logits(
        hidden, weight, row_M, is_row_M, column_V, is_column_V, width, hidden_stride, weight_stride,
        inverse_temperature, ROWS, COLUMNS, DEPTH,
    )  # fmt: skip
    logprob_MV = logit_MV - tl.load(log_partitions + place_M, mask=is_row_M, other=0.0)[:, None]
    pull_MV = tl.zeros((ROWS, COLUMNS), tl.float32)
    # dH/dx = -p (log p + H), dlogprob/dx = 1[target] - p.
    if of_entropy:
        entropy_M = tl.load(entropies + place_M, mask=is_row_M, other=0.0)
        grad_M = tl.load(grad_entropies + row_M, mask=is_row_M, other=0.0)
        bounded_MV = tl.where(logprob_MV < LOWEST, LOWEST, logprob_MV)
        pull_MV -= grad_M[:, None] * (bounded_MV + entropy_M[:, None])
    if of_logprobs:
        grad_M = tl.load(grad_logprobs + row_M, mask=is_row_M, other=0.0)
        pull_MV -= grad_M[:, None]
    grad_MV = tl.exp(logprob_MV) * pull_MV
    if of_logprobs:
        target_M = tl.load(targets + row_M, mask=is_row_M, other=-1) - first
        grad_MV += tl.where(column_V[None, :] == target_M[:, None], grad_M[:, None], 0.0)
    grad_MV *= inverse_temperature
    to_MV = grads + place_M[:, None].to(tl.int64) * num_columns + column_V[None, :]
    tl.store(to_MV, grad_MV.to(grads.dtype.element_ty), mask=is_row_M[:, None] & is_column_V[None, :])
