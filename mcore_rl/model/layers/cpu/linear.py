"""Megatron's linear layers with the products of `platform.bf16_products`."""

from typing import Any

from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from mcore_rl.megatron.cpu.products import rounded_linear
from mcore_rl.model.layers.output import OutputLayer


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
