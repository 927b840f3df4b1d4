"""The distributed optimizer's state parameter by parameter, as checkpoints hold it for any mesh."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

STATES = ("param", "exp_avg", "exp_avg_sq")


def state_by_parameter(
    self: Any, model_sharded_state_dict: dict[str, Any], is_loading: bool = False, metadata: Any = None
) -> dict[int, dict[str, Any]]:
    """Collective over the optimizer's data-parallel ranks: Megatron's `sharded_param_state_fully_reshardable`.

    The main weight and moments of each of this rank's parameters, in the order of its buffers, sharded as the
    parameter is. An optimizer that shares its state with no other rank hands out the state itself; else it is
    gathered on the host of every rank, so that any of them can write a part.
    """
    # Not at the top: this module is imported by the one that must run before Megatron is.
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories

    leaves = nested_values(extract_sharded_tensors_and_factories(model_sharded_state_dict)[0])
    shards = {leaf.data: leaf for leaf in leaves}
    return {
        index: {name: _sharded_like(shards[param], name, state) for name, state in states.items()}
        for index, (param, states) in enumerate(_whole_states(self, is_loading))
    }


def _whole_states(optimizer: Any, is_loading: bool) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """Yield each parameter with its whole state, flat; when loading, with room for it."""
    is_shared = optimizer.data_parallel_group.size() > 1
    for buffer, ranges in zip(optimizer.buffers, optimizer.gbuf_ranges, strict=True):
        (buckets,) = ranges.values()
        gathered = (
            [_gathered(optimizer, bucket, own) for bucket, own in zip(buffer.buckets, buckets, strict=True)]
            if (is_shared and not is_loading)
            else []
        )
        for param, (start, end, index) in buffer.param_index_map.items():
            if not is_shared:
                own = optimizer._get_main_param_and_optimizer_states(param)
                yield param, {name: own[name].detach() for name in STATES}
            elif is_loading:
                yield (
                    param,
                    {name: torch.empty(end - start, dtype=torch.float32, device="cpu") for name in STATES},
                )
            else:
                # Counted from the bucket's start: Megatron counts from the buffer's start without the padding between
                # buckets, and so saves a neighbour's values for a parameter.
                offset = buffer.buckets[index].offset
                yield param, {name: gathered[index][name][start - offset : end - offset] for name in STATES}


def _gathered(optimizer: Any, bucket: Any, own: dict[str, Any]) -> dict[str, Tensor]:
    """Collective over the optimizer's data-parallel ranks: return the states of a bucket's parameters, on the host."""
    group = optimizer.data_parallel_group
    whole = torch.empty(bucket.grad_data.numel(), dtype=torch.float32, device=bucket.grad_data.device)
    states = {}
    for name in STATES:
        shard = torch.zeros(whole.numel() // group.size(), dtype=torch.float32, device=whole.device)
        for param, where in own["param_map"].items():
            local = where["gbuf_local"]
            shard[local.start : local.end].copy_(
                optimizer._get_main_param_and_optimizer_states(param)[name].detach()
            )
        dist.all_gather_into_tensor(whole, shard, group=group)
        states[name] = whole.to("cpu", copy=True)
    return states


def _sharded_like(shard: Any, name: str, state: Tensor) -> Any:
    """Return `state` as a shard of its own tensor; a factory (for weights stored in parts) takes its dtype."""
    changes: dict[str, Any] = {
        "key": f"optimizer.state.{name}.{shard.key}",
        "data": state.reshape(shard.data.shape),
    }
    if hasattr(shard, "dtype"):
        changes["dtype"] = state.dtype
    return replace(shard, **changes)
