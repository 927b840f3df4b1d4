"""Linear layers with a frozen weight and a low-rank adapter: x W^T + scale * (x A^T) B^T (arXiv 2106.09685).

An existing layer is adapted by changing its class, so the base's modules and keys do not change; A and B are added
under `adapter.`. The branch's output must be distributed over the ranks like the base output that it is added to.
"""

from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.functional import linear

from mcore_rl.families.rules import Rows
from mcore_rl.model.layers.experts import Linear, LowRank, StackedLinear
from mcore_rl.model.layers.linear import ReplicatedLinear, sharded_weights


class Adapter(nn.Module):
    """A and B of one matrix or of all experts; call it to read them, as Megatron then waits for their gather."""

    def __init__(
        self, shape_a: tuple[int, ...], shape_b: tuple[int, ...], like: Tensor, *, scale: float, rows: Rows
    ) -> None:
        """Create A and B with the dtype and device of `like`. A has a block of rows for each of `rows.sizes`, or one
        for all; `rows` is the order of B's rows, `scale` the factor on B A.
        """
        super().__init__()
        self.A = nn.Parameter(like.new_empty(shape_a))
        self.B = nn.Parameter(like.new_zeros(shape_b))
        self.scale, self.rows, self.is_on = scale, rows, True

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return A and B."""
        return self.A, self.B


def expanded(low: Tensor, weight_b: Tensor, rows: Rows) -> Tensor:
    """Return `[..., O]`: each row of B `[O, r]` multiplied by its projection's block of `low` `[..., P * r]`."""
    rank = weight_b.shape[-1]
    if low.shape[-1] == rank:
        return linear(low, weight_b)
    blocks = low.split(rank, -1)
    parts = weight_b.view(rows.groups, sum(rows.sizes), rank).split(rows.sizes, 1)
    products = [torch.einsum("...r,gor->...go", block, part) for block, part in zip(blocks, parts, strict=True)]
    return torch.cat(products, -1).flatten(-2)


class AdaptedColumnLinear(ColumnParallelLinear):
    """Megatron's layer that splits its outputs: A is replicated on every rank, and B is split like the weight."""

    adapter: Adapter
    is_gated: bool
    """Whether each rank's rows are a gate, then an up-projection, as in a SwiGLU MLP."""

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Collective over the tensor-parallel ranks: return this rank's outputs `[S, B, o]`, and the layer's bias."""
        output, bias = super().forward(input_, *args, **kwargs)
        if not self.adapter.is_on:
            return output, bias
        weight_a, weight_b = self.adapter()
        low = linear(input_, weight_a)  # this rank's positions: r columns are communicated, not D
        if self.sequence_parallel:
            low = gather_from_sequence_parallel_region(low, group=self.tp_group)  # backward: reduce-scatter
        else:
            low = copy_to_tensor_model_parallel_region(low, group=self.tp_group)  # backward: all-reduce
        branch = expanded(low, weight_b, self.adapter.rows)
        return torch.add(output, branch, alpha=self.adapter.scale), bias

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the tensors as shards; Megatron's method would save B as replicated and lose parts of it."""
        state = sharded_weights(self, prefix, {"weight": 0, "bias": 0, "adapter.B": 0}, sharded_offsets, metadata)
        if self.is_gated:  # as Megatron's MLP does for the weight
            key = f"{prefix}adapter.B"
            state[key] = apply_swiglu_sharded_factory(state[key], sharded_offsets)
        return state


class AdaptedRowLinear(RowParallelLinear):
    """Megatron's layer that splits its inputs: A is split like the weight, and B is replicated on every rank."""

    adapter: Adapter

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """Collective over the tensor-parallel ranks: return the output, summed over them, and the layer's bias."""
        output, bias = super().forward(input_)
        if not self.adapter.is_on:
            return output, bias
        weight_a, weight_b = self.adapter()
        low = linear(input_, weight_a)  # this rank's part of a sum over the ranks
        if self.sequence_parallel:
            low = reduce_scatter_to_sequence_parallel_region(low, group=self.tp_group)
        else:
            low = reduce_from_tensor_model_parallel_region(low, group=self.tp_group)
        return torch.add(output, linear(low, weight_b), alpha=self.adapter.scale), bias

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the tensors as shards; A is split like the weight."""
        return sharded_weights(self, prefix, {"weight": 1, "adapter.A": 1}, sharded_offsets, metadata)


class AdaptedReplicatedLinear(ReplicatedLinear):
    """A layer that is replicated on every tensor-parallel rank, as are A and B."""

    adapter: Adapter

    def forward(self, input: Tensor) -> tuple[Tensor, None]:
        """Return the output of this rank's positions, and no bias."""
        output, _ = super().forward(input)
        if not self.adapter.is_on:
            return output, None
        weight_a, weight_b = self.adapter()
        branch = linear(linear(input, weight_a), weight_b)
        return torch.add(output, branch, alpha=self.adapter.scale), None


class AdaptedStackedLinear(StackedLinear):
    """A matrix of every expert `[e, O, I]` with adapters; expert tensor parallelism splits A or B alone."""

    adapter: Adapter
    etp: ProcessGroup
    splits_outputs: bool
    """Whether expert tensor parallelism splits O, and with it B; else it splits I, and with it A."""

    def forward(self) -> Linear:
        """Return weights, biases and adapters."""
        if not self.adapter.is_on:
            return super().forward()
        weight_a, weight_b = self.adapter()
        # Each rank has only a part of the gradient of the replicated matrix, and no Megatron attribute makes it sum.
        if self.splits_outputs:
            weight_a = copy_to_tensor_model_parallel_region(weight_a, group=self.etp)
        else:
            weight_b = copy_to_tensor_model_parallel_region(weight_b, group=self.etp)
        return Linear(self.weight, self.bias, LowRank(weight_a, weight_b, self.adapter.scale))
