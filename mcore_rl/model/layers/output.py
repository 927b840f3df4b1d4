"""The output layer of a language model."""

from typing import Any

from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor
from torch.nn.functional import linear


class OutputLayer(ColumnParallelLinear):
    """Megatron's output layer, which can defer its product until the logits are used."""

    is_deferred = False
    """Whether the layer returns the hidden states `[s, B, D]` of all positions instead of the logits `[s, B, v]`."""

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Collective over the tensor-parallel ranks: return the logits, or the hidden states, and None for a bias."""
        # A deferred product needs this call too: Megatron waits for a gathered weight before the forward of its module.
        if not self.is_deferred:
            result: tuple[Tensor, Tensor | None] = super().forward(input_, *args, **kwargs)
            return result
        # Each rank's slice of the vocabulary gives a part of the gradient: the backward pass sums the parts.
        if self.sequence_parallel:
            return gather_from_sequence_parallel_region(input_, group=self.tp_group), None
        return copy_to_tensor_model_parallel_region(input_, group=self.tp_group), None

    @staticmethod
    def product(rows: Tensor, weight: Tensor) -> Tensor:
        """Return this rank's logits `[N, v]` for hidden states `[N, D]`, computed as in `forward`."""
        return linear(rows, weight)
