"""Stacked experts in distributed checkpoints, with the same names and shapes as Megatron's experts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensorFactory
from torch import Tensor
from torch.distributed import ProcessGroup

Offsets = tuple[tuple[int, int, int], ...]
"""Leading axes of a global tensor, as (axis, index, size), that select a layer or an expert."""
SPLIT_AXIS = {
    "linear_fc1.weight": 0,
    "linear_fc2.weight": 1,
    "linear_fc1.bias": 0,
    "linear_fc2.bias": 0,
    "linear_fc1.adapter.A": None,
    "linear_fc1.adapter.B": 0,
    "linear_fc2.adapter.A": 1,
    "linear_fc2.adapter.B": None,
}
"""Axis of an expert's parameter that expert tensor parallelism splits; None if it is replicated. Experts with biases
are not split."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertShards:
    """The part of a layer's experts that this rank holds."""

    num_local: int
    """Number of experts on this rank."""
    ep_group: ProcessGroup
    tp_group: ProcessGroup
    dp_group: ProcessGroup
    is_singleton: bool
    """Whether each expert is a tensor of its own, such as `experts.7.linear_fc1`, not a slice along an expert axis."""

    def prefix_and_offsets(self, expert: int, outer: Offsets) -> tuple[str, Offsets]:
        """Return the prefix of the weight's name, and its offsets, for local expert `expert`."""
        global_index = self.ep_group.rank() * self.num_local + expert
        if self.is_singleton:
            return f"experts.{global_index}.", outer
        return "experts.", (*outer, (len(outer), global_index, self.ep_group.size() * self.num_local))


def sharded_experts(
    weights: Mapping[str, Tensor], shards: ExpertShards, prefix: str, outer: Offsets
) -> dict[str, Any]:
    """Return, for each stacked parameter `[e, ...]`, a factory of one sharded tensor per expert.

    The result also has the empty extra states that Megatron writes for its own experts.
    """
    tp_rank, dp_rank = shards.tp_group.rank(), shards.dp_group.rank()
    state: dict[str, Any] = {}
    for name, weight in weights.items():
        is_split = SPLIT_AXIS[name] is not None
        halves = 2 if is_split and "linear_fc1" in name else 1
        stack = _Stack(shards=shards, name=name, outer=outer, halves=halves)
        state[f"{prefix}{name}"] = ShardedTensorFactory(
            f"{prefix}{stack.suffix}",
            weight,
            stack.build,
            stack.merge,
            (0, 0 if is_split else tp_rank, dp_rank),
        )
    for layer in dict.fromkeys(name.partition(".")[0] for name in weights):
        for expert in range(shards.num_local):
            before, offsets = shards.prefix_and_offsets(expert, outer)
            shape = tuple(count for _, _, count in offsets) or (1,)
            place = tuple(index for _, index, _ in offsets) or (0,)
            state[f"{prefix}{layer}._extra_state{expert}"] = ShardedObject(
                f"{prefix}{before}{layer}._extra_state", None, shape, place, replica_id=(0, tp_rank, dp_rank)
            )
    return state


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stack:
    """Splits a stacked parameter, or its optimizer state, into sharded tensors, and joins them again."""

    shards: ExpertShards
    name: str
    outer: Offsets
    halves: int
    """2 for fc1: gate and up-projection are saved separately, for the same global tensor at every ETP size."""

    @property
    def suffix(self) -> str:
        return f"experts.{self.name}"

    def build(
        self, key: str, stacked: Tensor, replica_id: Any, flattened_range: slice | None
    ) -> list[ShardedTensor]:
        """Return the sharded tensors of `stacked` under `key`, which includes the prefixes of layers and optimizer."""
        assert flattened_range is None, "optimizer state is saved in whole tensors"
        tp_rank, tp_size = self.shards.tp_group.rank(), self.shards.tp_group.size()
        lead = key.removesuffix(self.suffix)
        parts = []
        for expert, weight in enumerate(stacked):
            before, offsets = self.shards.prefix_and_offsets(expert, self.outer)
            axis = SPLIT_AXIS[self.name]
            for half, part in enumerate(weight.chunk(self.halves)):
                expert_key = f"{lead}{before}{self.name}"
                split: Offsets = ()
                if self.shards.is_singleton and self.halves == 2:
                    assert axis is not None
                    expert_key += ("_w", "_v")[half]
                    split = ((len(offsets) + axis, tp_rank, tp_size),)
                elif axis is not None:
                    split = ((len(offsets) + axis, tp_rank + half * tp_size, self.halves * tp_size),)
                parts.append(
                    ShardedTensor.from_rank_offsets(
                        expert_key,
                        part,
                        *offsets,
                        *split,
                        replica_id=replica_id,
                        prepend_axis_num=len(offsets),
                    )
                )
        return parts

    def merge(self, parts: list[Tensor]) -> Tensor:
        """Join the parts that `build` returned into the stacked tensor."""
        with torch.no_grad():
            experts = [torch.cat(parts[i : i + self.halves]) for i in range(0, len(parts), self.halves)]
            return torch.stack(experts)
