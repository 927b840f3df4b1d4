"""Low-rank adapters in a model: add, initialize, merge and disable them."""

import math
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from torch import Tensor, nn

from mcore_rl.config.model import ModelConfig
from mcore_rl.config.optim import TARGETS, LoraConfig, target_of
from mcore_rl.families.rules import Rows, packed_rows
from mcore_rl.megatron.agree import from_every_rank
from mcore_rl.model.build import LocalShard, local_shards, unwrap
from mcore_rl.model.heads import ScoreModel
from mcore_rl.model.layers import adapters as layers
from mcore_rl.model.layers.experts import GroupedExperts, StackedLinear
from mcore_rl.model.layers.linear import ReplicatedLinear

MTP = "mtp."
"""Name prefix of layers for multi-token prediction, which get no adapters."""
LINEAR = (ColumnParallelLinear, RowParallelLinear, ReplicatedLinear, StackedLinear)


def add_adapters(chunks: Sequence[nn.Module], lora: LoraConfig, model: ModelConfig, seed: int) -> None:
    """Add new adapters to chunks, before these are wrapped, and freeze all other weights but a scalar head. A is
    uniform within 1 / sqrt(inputs), as in PEFT, B is 0; they depend only on seed and names, on every mesh. No random
    state changes.
    """
    targets = lora.targets_in(model)
    for chunk in map(unwrap, chunks):
        chunk.requires_grad_(False)
        if isinstance(chunk, ScoreModel) and chunk.post_process:
            chunk.output_layer.requires_grad_(True)
        # Megatron would still update the experts' biases by their load, although they have no gradient.
        chunk.config.moe_router_bias_update_rate = 0.0
        for name, module in list(chunk.named_modules()):
            target = target_of(name)
            if isinstance(module, LINEAR) and target in targets and not name.startswith(MTP):
                rank = lora.rank_of(target, model)
                owner: Any = chunk.get_submodule(name.rpartition(".")[0])
                if isinstance(module, StackedLinear):
                    _adapt_experts(module, owner, rank, lora)
                else:
                    rows = packed_rows(name.rpartition(".")[2], len(module.weight), model)
                    _adapt(module, rows, rank, lora.scale_of(rank))
    _draw(chunks, seed)


@torch.no_grad()
def fill_adapters(chunks: Sequence[nn.Module], tensors: Mapping[str, Tensor]) -> None:
    """Fill this rank's adapters from global tensors, and the scalar head if these have it."""
    for shard in local_shards(chunks):
        if ".adapter." in shard.key or shard.key in tensors:
            shard.data.copy_(tensors[shard.key][shard.where])


def describe_adapters(chunks: Sequence[nn.Module]) -> str:
    """Collective over the world: return a log line that counts adapted matrices and their parameters by target."""
    counts: Counter[str] = Counter()
    for shard in local_shards(chunks):
        if not shard.is_main:
            continue
        counts["all"] += shard.data.numel()
        if ".adapter." not in shard.key:
            continue
        target = target_of(shard.key)
        assert target is not None
        counts[f"{target} parameters"] += shard.data.numel()
        # Only one rank has the first element of each A.
        if shard.key.endswith("A") and all(not index.start for index in shard.where if isinstance(index, slice)):
            counts[f"{target} matrices"] += 1
    total = sum(from_every_rank(counts), Counter())
    parts = [
        f"{total[f'{target} matrices']:,} matrices of {target} with {total[f'{target} parameters']:,} parameters"
        for target in TARGETS
        if total[f"{target} matrices"]
    ]
    trained = sum(total[f"{target} parameters"] for target in TARGETS)
    return f"adapters: {', '.join(parts)}; the base has {total['all'] - trained:,}, which are not trained"


def adapters_in(chunks: Sequence[nn.Module]) -> Iterator[layers.Adapter]:
    """Yield all adapters on this rank."""
    modules = (module for chunk in chunks for module in chunk.modules())
    return (module for module in modules if isinstance(module, layers.Adapter))


@contextmanager
def adapters_off(chunks: Sequence[nn.Module]) -> Iterator[None]:
    """Context in which all adapters are off: the model computes as its base."""
    adapters = [adapter for adapter in adapters_in(chunks) if adapter.is_on]
    for adapter in adapters:
        adapter.is_on = False
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.is_on = True


@torch.no_grad()
def merged_shards(chunks: Sequence[nn.Module], shards: Sequence[LocalShard]) -> list[LocalShard]:
    """Return shards of the chunks' weights; where there is an adapter, it is added in new memory, in fp32, and the sum
    is rounded once to the weight's dtype.
    """
    owners = _owners(chunks)
    merged: dict[nn.Module, Tensor] = {}
    found = []
    for shard in shards:
        owner = owners.get(shard.data.untyped_storage().data_ptr())
        if owner is None:
            found.append(shard)
            continue
        if owner not in merged:
            merged[owner] = (owner.weight.float() + _added(owner.adapter)).to(owner.weight.dtype)
        found.append(replace(shard, data=_region(merged[owner], owner, shard)))
    return found


@torch.no_grad()
def merge_loss(chunks: Sequence[nn.Module], dtype: torch.dtype) -> float:
    """Collective over the world: return the error of merging in `dtype`, relative to scale * B A (norms)."""
    owners = _owners(chunks)
    shards: dict[Any, list[LocalShard]] = {}
    for shard in local_shards(chunks):
        owner = owners.get(shard.data.untyped_storage().data_ptr())
        # Ranks have copies of some weights and not of others: each region counts on one rank.
        if owner is not None and shard.is_main:
            shards.setdefault(owner, []).append(shard)
    sums = torch.zeros(2, dtype=torch.float64)
    for owner, of_owner in shards.items():
        weight, added = owner.weight.float(), _added(owner.adapter).contiguous()
        lost = (weight + added).to(dtype).float() - weight - added
        for index, whole in enumerate((lost, added)):
            squares = [_region(whole, owner, shard).double().square().sum() for shard in of_owner]
            sums[index] += torch.stack(squares).sum().cpu()
    lost_total, added_total = torch.stack(from_every_rank(sums)).sum(0).tolist()
    return math.sqrt(lost_total / added_total) if added_total else 0.0


def _owners(chunks: Sequence[nn.Module]) -> dict[int, Any]:
    modules: Iterator[Any] = (module for chunk in chunks for module in chunk.modules())
    adapted = (module for module in modules if isinstance(getattr(module, "adapter", None), layers.Adapter))
    return {layer.weight.untyped_storage().data_ptr(): layer for layer in adapted}


def _region(of_weight: Tensor, owner: Any, shard: LocalShard) -> Tensor:
    """Return the part of a tensor that is laid out like a layer's weight which a shard is of the weight."""
    # A shard is a view of the weight, such as an expert or the gate.
    first = shard.data.storage_offset() - owner.weight.storage_offset()
    return of_weight.as_strided(shard.data.shape, shard.data.stride(), first)


def _added(adapter: layers.Adapter) -> Tensor:
    """Return scale * B A, fp32, with the shape of the weight."""
    weight_a, weight_b = (tensor.detach().float() for tensor in adapter())
    if weight_a.dim() == 2:
        product = layers.expanded(weight_a.t(), weight_b, adapter.rows).t()
    else:
        blocks = weight_a.split(weight_b.shape[-1], 1)
        parts = weight_b.chunk(len(blocks), 1)
        product = torch.cat([part @ block for part, block in zip(parts, blocks, strict=True)], 1)
    return adapter.scale * product


def _adapt(module: Any, rows: Rows, rank: int, scale: float) -> None:
    num_out, num_in = module.weight.shape
    module.adapter = layers.Adapter(
        (len(rows.sizes) * rank, num_in), (num_out, rank), module.weight, scale=scale, rows=rows
    )
    weight_a, weight_b = module.adapter()
    # Under sequence parallelism a replicated weight only has the gradient of the rank's positions: Megatron sums it.
    if isinstance(module, ColumnParallelLinear):
        module.__class__, module.is_gated = layers.AdaptedColumnLinear, len(rows.sizes) == 2
        weight_a.sequence_parallel = module.sequence_parallel
        set_tensor_model_parallel_attributes(weight_b, True, 0, 1)
    elif isinstance(module, RowParallelLinear):
        module.__class__ = layers.AdaptedRowLinear
        set_tensor_model_parallel_attributes(weight_a, True, 1, 1)
        weight_b.sequence_parallel = module.sequence_parallel
    else:
        module.__class__ = layers.AdaptedReplicatedLinear
        weight_a.sequence_parallel = weight_b.sequence_parallel = module.weight.sequence_parallel


def _adapt_experts(module: Any, owner: GroupedExperts, rank: int, lora: LoraConfig) -> None:
    num_experts, num_out, num_in = module.weight.shape
    is_first = module is owner.linear_fc1
    num_blocks = 2 if is_first and lora.expert_gate_up == "split" else 1
    module.adapter = layers.Adapter(
        (num_experts, num_blocks * rank, num_in),
        (num_experts, num_out, rank),
        module.weight,
        scale=lora.scale_of(rank),
        rows=Rows(1, (num_out // num_blocks,) * num_blocks),
    )
    module.etp, module.splits_outputs = owner.tp_group, is_first
    module.__class__ = layers.AdaptedStackedLinear
    # Compiled experts multiply by one weight: the sum W + scale * B A, which autograd would keep for every layer.
    owner.__class__ = GroupedExperts
    for name, param in module.adapter.named_parameters():
        is_split = (name == "B") == is_first
        axis = (1 if is_first else 2) if is_split else 1
        param.allreduce = False
        # Megatron's gradient norm would skip an unsplit tensor on all dense tensor-parallel ranks but the first, but
        # these ranks have different experts. A tensor replicated over expert-tensor ranks counts on the first of them.
        set_tensor_model_parallel_attributes(param, True, axis, 1)
        if not is_split:
            param.shared = owner.tp_group.rank() != 0


@torch.no_grad()
def _draw(chunks: Sequence[nn.Module], seed: int) -> None:
    for shard in local_shards(chunks):
        if not shard.key.endswith(".adapter.A"):
            continue
        # A layer or an expert is an index into the global tensor: each has its own random numbers.
        indices = tuple(index for index in shard.where if isinstance(index, int))
        inside = shard.where[len(indices) :]
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {shard.key} {indices}".encode()))
        # All of A is drawn for a part of it: so the numbers do not depend on the mesh.
        whole = torch.empty(shard.global_shape[len(indices) :])
        bound = 1 / math.sqrt(shard.global_shape[-1])
        shard.data.copy_(whole.uniform_(-bound, bound, generator=generator)[inside])
