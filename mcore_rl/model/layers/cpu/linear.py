"""Megatron's linear layers with the products of `platform.bf16_products`."""

from typing import Any

from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from mcore_rl.backend.cpu.products import rounded_linear
from mcore_rl.model.layers.output import OutputLayer


class _Rounded:
    """The product of a linear layer, for whose collectives Megatron's layers are as they were."""

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
        # The other arguments are Megatron's ways to save time on GPUs.
        if sequence_parallel:
            input = gather_from_sequence_parallel_region(input, group=tp_group)
        elif allreduce_dgrad:
            input = copy_to_tensor_model_parallel_region(input, group=tp_group)
        product = rounded_linear(input, weight)
        return product if bias is None else product + bias


class RoundedColumnLinear(_Rounded, ColumnParallelLinear):
    """`ColumnParallelLinear` whose products round their operands to bf16."""


class RoundedRowLinear(_Rounded, RowParallelLinear):
    """`RowParallelLinear` whose products round their operands to bf16."""


class RoundedOutputLayer(_Rounded, OutputLayer):
    """The output layer, whose products round their operands to bf16 where it is not deferred."""

    @staticmethod
    def product(rows: Tensor, weight: Tensor) -> Tensor:
        """Return this rank's logits `[N, v]` of hidden states `[N, D]`, as `forward` computes them."""
        return rounded_linear(rows, weight)
