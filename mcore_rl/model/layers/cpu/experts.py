"""SwiGLU experts by the compiled library: tokens are gathered, computed and added back block by block, in the cache.

Intermediate tensors of the whole batch (tokens x top-k rows of hidden and inner width) would be read from main memory
several times in each direction; a block of an expert's rows stays in the L2 cache from gather to scatter.
"""

from typing import Any, NamedTuple

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import silu

from mcore_rl.megatron.compiled import library, rounded_linear
from mcore_rl.model.layers.experts import GroupedExperts
from mcore_rl.model.layers.linear import OutputLayer, RMSNorm, ZeroCenteredRMSNorm


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


class _Rounded:
    """Mixin that replaces the product of Megatron's linear layers, and keeps their collectives."""

    def _forward_impl(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        tp_group: Any,
        **_: Any,
    ) -> Tensor:
        # The ignored arguments are Megatron's optimizations for GPUs.
        if sequence_parallel:
            input = gather_from_sequence_parallel_region(input, group=tp_group)
        elif allreduce_dgrad:
            input = copy_to_tensor_model_parallel_region(input, group=tp_group)
        product = rounded_linear(input, weight)
        return product if bias is None else product + bias


class RoundedColumnLinear(_Rounded, ColumnParallelLinear):
    """`ColumnParallelLinear` with the operands of its products rounded to bf16."""


class RoundedRowLinear(_Rounded, RowParallelLinear):
    """`RowParallelLinear` with the operands of its products rounded to bf16."""


class RoundedOutputLayer(_Rounded, OutputLayer):
    """`OutputLayer` with the operands of its products rounded to bf16."""

    @staticmethod
    def product(rows: Tensor, weight: Tensor) -> Tensor:
        """Return this rank's logits `[N, v]` for hidden states `[N, D]`, computed as in `forward`."""
        return rounded_linear(rows, weight)


BLOCK_ROWS = 512
"""Largest number of rows of a block."""


class CompiledExperts(GroupedExperts):
    """`GroupedExperts` with compiled code for plain SwiGLU without biases."""

    def __init__(self, num_local_experts: int, config: TransformerConfig, *args: Any, **options: Any) -> None:
        super().__init__(num_local_experts, config, *args, **options)
        self._rounds = config.rounds_products

    @property
    def skips_dropped(self) -> bool:
        """Whether the experts are plain SwiGLU without biases, which the compiled code computes row by row."""
        return bool(
            not self.config.add_bias_linear
            and self.config.activation_func is silu
            and self.config.activation_func_clamp_value is None
            and self.config.glu_linear_offset == 0.0
        )

    def forward(self, sorted_ND: Tensor, tokens_per_expert: Tensor, gates_N: Tensor) -> tuple[Tensor, None]:
        """Return the output `[N, D]` of rows sorted by expert, and no bias."""
        if not self.skips_dropped:
            return super().forward(sorted_ND, tokens_per_expert, gates_N)
        identity_N = torch.arange(len(sorted_ND))
        return self._computed(sorted_ND, gates_N, assign(identity_N, identity_N, tokens_per_expert.tolist())), None

    def routed(self, input_TD: Tensor, probs_TE: Tensor, routed_TE: Tensor) -> Tensor:
        """Return every token's sum over its experts, `[T, D]`, on a rank that has all experts unsplit."""
        if not self.skips_dropped:
            return super().routed(input_TD, probs_TE, routed_TE)
        expert_N, token_N = routed_TE.t().nonzero(as_tuple=True)
        gates_index_N = token_N * routed_TE.shape[1] + expert_N
        return self._computed(input_TD, probs_TE, assign(token_N, gates_index_N, routed_TE.sum(0).tolist()))

    def _computed(self, input_TD: Tensor, gates: Tensor, assignment: "Assignment") -> Tensor:
        fc1_EFD, fc2_EDF = self.linear_fc1().weight_EOI, self.linear_fc2().weight_EOI
        return swiglu_experts(input_TD, gates, fc1_EFD, fc2_EDF, assignment, rounds=self._rounds)


class Assignment(NamedTuple):
    """The input rows that each expert processes, split into blocks."""

    rows_N: Tensor
    """Indices of input rows, sorted by expert, int64."""
    gates_index_N: Tensor
    """Index of each row's gate in the flattened gates."""
    blocks_B3: Tensor
    """Expert, first row and end row (exclusive) of each block, int64."""
    longest: int
    """Number of rows of the longest block; 0 without blocks."""


def assign(rows_N: Tensor, gates_index_N: Tensor, counts: list[int]) -> Assignment:
    """Return the assignment of rows sorted by expert, with `counts` rows for each expert."""
    blocks, begin, longest = [], 0, 0
    for expert, count in enumerate(counts):
        end = begin + count
        for first in range(begin, end, BLOCK_ROWS):
            last = min(first + BLOCK_ROWS, end)
            blocks.append((expert, first, last))
            longest = max(longest, last - first)
        begin = end
    blocks_B3 = torch.tensor(blocks, dtype=torch.int64).view(-1, 3)
    return Assignment(rows_N.contiguous(), gates_index_N, blocks_B3, longest)


def swiglu_experts(
    input_TD: Tensor, gates: Tensor, fc1_EFD: Tensor, fc2_EDF: Tensor, assignment: Assignment, *, rounds: bool
) -> Tensor:
    """Return for each row of `input_TD` the sum over its experts of gate * (silu(x @ g.T) * (x @ u.T)) @ fc2[e].T, `[T,
    D]`, fp32. `fc1_EFD` has the rows of g above those of u; `gates_index_N` of the assignment indexes the flattened
    gates; `rounds` products to bf16.
    """
    operands = input_TD, gates, fc1_EFD, fc2_EDF, assignment, rounds
    if not torch.is_grad_enabled():
        return _forward(*operands)[0]
    output_TD: Tensor = _SwiGLUExperts.apply(*operands)  # type: ignore[no-untyped-call]
    return output_TD


def _forward(
    input_TD: Tensor, gates: Tensor, fc1_EFD: Tensor, fc2_EDF: Tensor, assignment: Assignment, rounds: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the output, and tensors for the backward pass: the input, the gates of the rows, the first product."""
    input_TD = input_TD.contiguous()
    gates_N = gates.reshape(-1).index_select(0, assignment.gates_index_N)
    _, width, inner = fc2_EDF.shape
    output_TD = torch.zeros_like(input_TD)
    hidden_NF = input_TD.new_empty(len(gates_N), 2 * inner)
    compiled = library()
    compiled.experts_forward(
        *(compiled.sgemm, rounds, input_TD, gates_N, fc1_EFD, fc2_EDF),
        *(assignment.rows_N, assignment.blocks_B3, len(assignment.blocks_B3), width, inner),
        *(hidden_NF, output_TD, input_TD.new_empty(2 * assignment.longest * (width + inner))),
    )
    return output_TD, input_TD, gates_N, hidden_NF


class _SwiGLUExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input_TD: Tensor,
        gates: Tensor,
        fc1_EFD: Tensor,
        fc2_EDF: Tensor,
        assignment: Assignment,
        rounds: bool,
    ) -> Tensor:
        output_TD, input_TD, gates_N, hidden_NF = _forward(input_TD, gates, fc1_EFD, fc2_EDF, assignment, rounds)
        ctx.assignment, ctx.rounds, ctx.gates_shape = assignment, rounds, gates.shape
        ctx.save_for_backward(input_TD, gates_N, fc1_EFD, fc2_EDF, hidden_NF)
        return output_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_TD: Tensor) -> tuple[Tensor | None, ...]:
        input_TD, gates_N, fc1_EFD, fc2_EDF, hidden_NF = ctx.saved_tensors
        assignment: Assignment = ctx.assignment
        d_input_TD, d_gates_N = torch.zeros_like(input_TD), torch.empty_like(gates_N)
        d_fc1, d_fc2 = _WeightGradient(fc1_EFD), _WeightGradient(fc2_EDF)
        _, width, inner = fc2_EDF.shape
        compiled = library()
        compiled.experts_backward(
            *(compiled.sgemm, ctx.rounds, gradient_TD.contiguous(), input_TD, gates_N, fc1_EFD, fc2_EDF),
            *(assignment.rows_N, assignment.blocks_B3, len(assignment.blocks_B3), width, inner, hidden_NF),
            *(d_input_TD, d_gates_N, d_fc1.total, d_fc2.total),
            input_TD.new_empty(assignment.longest * (3 * width + 4 * inner)),
        )
        d_gates = input_TD.new_zeros(ctx.gates_shape.numel())
        d_gates.index_add_(0, assignment.gates_index_N, d_gates_N)
        return d_input_TD, d_gates.view(ctx.gates_shape), d_fc1.result(), d_fc2.result(), None, None


class _WeightGradient:
    """Gradient of a weight, accumulated in place, which saves writing and reading a tensor of the weight's size.

    Under Megatron's data parallelism it is accumulated in the weight's `main_grad`. As in Megatron's fused layers,
    `grad_added_to_main_grad` tells Megatron's hook, which then ignores the gradient returned to autograd.
    """

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight
        main_grad = getattr(weight, "main_grad", None)
        self._is_fused = (
            main_grad is not None and main_grad.dtype == torch.float32 and hasattr(weight, "grad_added_to_main_grad")
        )
        self.total = main_grad if self._is_fused and main_grad is not None else torch.zeros_like(weight)
        """Sum so far, fp32, with the shape of the weight."""

    def result(self) -> Tensor:
        """Return the gradient for autograd; if it is in `main_grad`, a dummy tensor that triggers Megatron's hook."""
        if not self._is_fused:
            return self.total
        self._weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
        return torch.empty_like(self._weight)
