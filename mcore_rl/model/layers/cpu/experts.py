"""SwiGLU experts on a CPU: tokens are gathered, computed and added back block by block, inside the cache.

Whole-batch intermediate tensors (tokens x top-k rows of hidden and inner width) are read from main memory several
times in each direction; a block of an expert's rows stays in the second-level cache from gather to scatter.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import silu

from mcore_rl.backend.cpu.compiled import Library
from mcore_rl.backend.cpu.kernels import Process, is_widened, weight_as
from mcore_rl.backend.cpu.products import (
    WeightGradient,
    add_weight_gradient,
    product,
    product_with_weight,
)

BLOCK_ROWS = 512
"""Largest number of rows of a block."""
PADDED_MULTIPLE = 16
"""Multiple to which blocks are filled up, so that oneDNN compiles kernels for few different shapes."""
FEW_ROWS = 24
"""Number of rows below which a block is not filled up: torch's product is faster than a padded one."""


@dataclass(frozen=True, slots=True)
class ExpertBlock:
    """Consecutive rows, sorted by expert, that belong to one expert."""

    expert: int
    """Index of the expert."""
    rows: slice
    """Range of the block in `Assignment.rows_N`."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """The rows of the input that each expert works on, cut into blocks.

    Blocks are filled up by repeating one of their rows with a gate of zero, which adds nothing to outputs and
    gradients.
    """

    rows_N: Tensor
    """Indices of input rows, sorted by expert, with the padding."""
    gates_index_N: Tensor
    """Index of each row's gate in the flattened gates."""
    padding_N: Tensor | None
    """True at padding, bool; None when there is none."""
    blocks: list[ExpertBlock]
    """The blocks, in order."""

    @property
    def longest(self) -> int:
        """Number of rows of the longest block, 0 where there is none."""
        return max((block.rows.stop - block.rows.start for block in self.blocks), default=0)

    def tables(self) -> tuple[Tensor, Tensor]:
        """Return the indices of rows and, for each block, its expert, its first row and the one behind its last:
        int64 `[N]` and `[blocks, 3]`, contiguous.
        """
        blocks = [(block.expert, block.rows.start, block.rows.stop) for block in self.blocks]
        return self.rows_N.contiguous(), self.rows_N.new_tensor(blocks).view(-1, 3)


def swiglu_experts(
    input_TD: Tensor, gates: Tensor, fc1_EFD: Tensor, fc2_EDF: Tensor, assignment: Assignment
) -> Tensor:
    """Return for each row the sum over its experts of gate * (silu(x @ g.T) * (x @ u.T)) @ fc2[e].T, `[T, D]`.

    Args:
        input_TD: The rows x.
        gates: Gates in any shape; `assignment.gates_index_N` counts in the flattened tensor.
        fc1_EFD: For each expert g above u.
        fc2_EDF: The experts' output matrices.
        assignment: The rows of each expert.
    """
    if input_TD.dtype == torch.bfloat16 and is_widened(input_TD):
        wide = input_TD.float(), gates.float()
        return swiglu_experts(*wide, fc1_EFD, fc2_EDF, assignment).to(input_TD.dtype)
    operands = input_TD, gates, fc1_EFD, fc2_EDF, assignment
    if not torch.is_grad_enabled():
        return _computed(*operands).output_TD
    output_TD: Tensor = _SwiGLUExperts.apply(*operands)  # type: ignore[no-untyped-call]
    return output_TD


def assign_sorted(counts: list[int]) -> Assignment:
    """Return the assignment of rows that are sorted by expert, `counts` of them for each."""
    identity_N = torch.arange(sum(counts))
    return _padded(identity_N, identity_N, counts)


def assign_routed(routed_TE: Tensor) -> Assignment:
    """Return the assignment of a router's map, true where a token goes to an expert.

    The gates that belong to it are the router's probabilities `[T, E]`.
    """
    num_experts = routed_TE.shape[1]
    expert_N, token_N = routed_TE.t().nonzero(as_tuple=True)
    return _padded(token_N, token_N * num_experts + expert_N, routed_TE.sum(0).tolist())


def _padded(rows_N: Tensor, gates_index_N: Tensor, counts: list[int]) -> Assignment:
    blocks: list[ExpertBlock] = []
    # The others compile nothing.
    few_rows = FEW_ROWS if Process.kernels.is_onednn else BLOCK_ROWS + 1
    shifts, lasts, sizes = [], [], []
    source = begin = 0
    for expert, count in enumerate(counts):
        for first in range(source, source + count, BLOCK_ROWS):
            size = min(BLOCK_ROWS, source + count - first)
            filled = size if size < few_rows else -(-size // PADDED_MULTIPLE) * PADDED_MULTIPLE
            shifts.append(first - begin)
            lasts.append(first + size - 1)
            sizes.append(filled)
            blocks.append(ExpertBlock(expert, slice(begin, begin + filled)))
            begin += filled
        source += count
    if begin == source:
        return Assignment(rows_N, gates_index_N, None, blocks)
    shift_last_2N = torch.tensor([shifts, lasts]).repeat_interleave(torch.tensor(sizes), 1, output_size=begin)
    source_N = torch.arange(begin) + shift_last_2N[0]
    # Behind the last row of its block a position repeats that row.
    padding_N = source_N > shift_last_2N[1]
    take_N = torch.minimum(source_N, shift_last_2N[1])
    return Assignment(rows_N[take_N], gates_index_N[take_N], padding_N, blocks)


class _Forward(NamedTuple):
    """Result of a forward pass, and what its backward pass reads."""

    output_TD: Tensor
    input_TD: Tensor
    hidden: list[Tensor]
    compiled: Library | None
    rounding: int
    """How the compiled file rounds operands of products; see `CpuKernels.rounding`."""


def _computed(
    input_TD: Tensor, gates: Tensor, fc1_EFD: Tensor, fc2_EDF: Tensor, assignment: Assignment
) -> _Forward:
    gates_N1 = _gates(gates, assignment)
    fc1_EFD, fc2_EDF = (weight_as(input_TD.dtype, weight) for weight in (fc1_EFD, fc2_EDF))
    output_TD = input_TD.new_zeros(input_TD.shape)
    library = _library(input_TD, gates_N1, fc1_EFD, fc2_EDF)
    if library is not None:
        input_TD = input_TD.contiguous()
        _, width, inner = fc2_EDF.shape
        hidden_NF = input_TD.new_empty(len(gates_N1), 2 * inner)
        scratch = input_TD.new_empty(2 * assignment.longest * (width + inner))
        operands = input_TD, gates_N1, fc1_EFD, fc2_EDF, *assignment.tables()
        sizes = len(assignment.blocks), width, inner
        results = hidden_NF, output_TD, scratch
        rounding = Process.kernels.rounding
        library.experts_forward(library.sgemm, rounding, *operands, *sizes, *results)
        return _Forward(output_TD, input_TD, [hidden_NF], library, rounding)
    fc1, fc2 = fc1_EFD.unbind(0), fc2_EDF.unbind(0)
    hidden = []
    for block in assignment.blocks:
        rows = assignment.rows_N[block.rows]
        hidden_NF = product_with_weight(input_TD.index_select(0, rows), fc1[block.expert])
        gate, up = hidden_NF.chunk(2, -1)
        active = silu(gate).mul_(up).mul_(gates_N1[block.rows])
        output_TD.index_add_(0, rows, product_with_weight(active, fc2[block.expert]))
        hidden.append(hidden_NF)
    return _Forward(output_TD, input_TD, hidden, None, rounding=0)


class _SwiGLUExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input_TD: Tensor, gates: Tensor, fc1_EFD: Tensor, fc2_EDF: Tensor, assignment: Assignment
    ) -> Tensor:
        output_TD, input_TD, hidden, ctx.compiled, ctx.rounding = _computed(
            input_TD, gates, fc1_EFD, fc2_EDF, assignment
        )
        ctx.assignment = assignment
        ctx.save_for_backward(input_TD, gates, fc1_EFD, fc2_EDF, *hidden)
        return output_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_TD: Tensor) -> tuple[Tensor | None, ...]:
        input_TD, gates, fc1_EFD, fc2_EDF, *hidden = ctx.saved_tensors
        assignment: Assignment = ctx.assignment
        gates_N1 = _gates(gates, assignment)
        d_gates_N1 = torch.empty_like(gates_N1)
        d_input_TD = torch.zeros_like(input_TD)
        sums = [WeightGradient(weight, input_TD.dtype) for weight in (fc1_EFD, fc2_EDF)]
        fc1_EFD, fc2_EDF = (weight_as(input_TD.dtype, weight) for weight in (fc1_EFD, fc2_EDF))
        if ctx.compiled is not None:
            totals = [of_weight.total.to(input_TD.dtype) for of_weight in sums]
            _, width, inner = fc2_EDF.shape
            scratch = input_TD.new_empty(assignment.longest * (3 * width + 4 * inner))
            tensors = gradient_TD.contiguous(), input_TD, gates_N1, fc1_EFD, fc2_EDF, *assignment.tables()
            sizes = len(assignment.blocks), width, inner
            results = d_input_TD, d_gates_N1, *totals, scratch
            product_by = ctx.compiled.sgemm, ctx.rounding
            ctx.compiled.experts_backward(*product_by, *tensors, *sizes, hidden[0], *results)
            for of_weight, total in zip(sums, totals, strict=True):
                of_weight.total.copy_(total)  # Nothing happens where it is the same tensor.
            d_gates = _d_gates(gates, d_gates_N1, assignment)
            return d_input_TD, d_gates, *(of_weight.result() for of_weight in sums), None
        fc1, fc2 = fc1_EFD.unbind(0), fc2_EDF.unbind(0)
        d_fc1, d_fc2 = (of_weight.total.unbind(0) for of_weight in sums)
        for block, hidden_NF in zip(assignment.blocks, hidden, strict=True):
            rows = assignment.rows_N[block.rows]
            gate, up = hidden_NF.chunk(2, -1)
            gates_n1 = gates_N1[block.rows]
            d_output = gradient_TD.index_select(0, rows)
            d_active = product(d_output, fc2[block.expert].t())
            silu_gate = silu(gate)
            active = silu_gate * up
            d_gates_N1[block.rows] = torch.linalg.vecdot(d_active, active)[:, None]
            add_weight_gradient(d_fc2[block.expert], d_output, active.mul_(gates_n1))
            d_active.mul_(gates_n1)
            d_hidden = torch.empty_like(hidden_NF)
            d_gate, d_up = d_hidden.chunk(2, -1)
            torch.mul(d_active, silu_gate, out=d_up)
            torch.ops.aten.silu_backward.grad_input(d_active.mul_(up), gate, grad_input=d_gate)
            add_weight_gradient(d_fc1[block.expert], d_hidden, input_TD.index_select(0, rows))
            d_input_TD.index_add_(0, rows, product(d_hidden, fc1[block.expert].t()))
        d_gates = _d_gates(gates, d_gates_N1, assignment)
        return d_input_TD, d_gates, *(of_weight.result() for of_weight in sums), None


def _library(input_TD: Tensor, gates_N1: Tensor, fc1_EFD: Tensor, fc2_EDF: Tensor) -> Library | None:
    """Return the compiled file where it computes these: its products are MKL's or its own, and it reads dense weights.

    Where torch multiplies rounded operands they are MKL's, in fp32: rounding rows and activations in Python takes more
    time than products save.
    """
    library = Process.library
    # A fake tensor has no numbers at its address.
    is_fp32 = type(input_TD) is Tensor and {t.dtype for t in (input_TD, gates_N1, fc1_EFD)} == {torch.float32}
    is_dense = fc1_EFD.is_contiguous() and fc2_EDF.is_contiguous()
    if library is None or not is_fp32 or not is_dense or Process.kernels.products == "onednn":
        return None
    return library if library.sgemm is not None or Process.kernels.rounding else None


def _gates(gates: Tensor, assignment: Assignment) -> Tensor:
    gates_N = gates.reshape(-1).index_select(0, assignment.gates_index_N)
    if assignment.padding_N is not None:
        gates_N.masked_fill_(assignment.padding_N, 0.0)
    return gates_N[:, None]


def _d_gates(gates: Tensor, d_gates_N1: Tensor, assignment: Assignment) -> Tensor:
    d_gates_N = d_gates_N1[:, 0]
    if assignment.padding_N is not None:
        d_gates_N.masked_fill_(assignment.padding_N, 0.0)
    d_gates = torch.zeros(gates.numel(), dtype=gates.dtype)
    return d_gates.index_add_(0, assignment.gates_index_N, d_gates_N).view_as(gates)
