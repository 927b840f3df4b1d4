"""Checkpoints of this package's experts, and of their optimizer state, equal those of Megatron's experts."""

import functools
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, apply_factories
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.megatron.mesh import Mesh, build_mesh, destroy_mesh, seed_ranks
from mcore_rl.model.layers.experts import GroupedExperts
from mcore_rl.model.layers.linear import RMSNorm
from mcore_rl.storage.checkpoints.write import sharding_metadata
from tests.parallel.parity import MESHES
from tests.ranks import run_ranks
from tests.unit.model.layers.oracles import small_config

NUM_EXPERTS, WIDTH, ROWS = 4, 32, 6
Saved = tuple[dict[str, Tensor], set[tuple[Any, ...]]]


class Layers(MegatronModule):
    """Experts under a prefix, as in a model, with a dense weight: Megatron's optimizer wants one on every rank."""

    def __init__(self, experts: MegatronModule) -> None:
        super().__init__(experts.config)
        self.experts = experts
        self.norm = RMSNorm(experts.config, WIDTH)
        self.model_type = ModelType.encoder_or_decoder

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.experts(*inputs)[0] + 0.0 * self.norm.weight  # type: ignore[no-any-return]


def trained(
    kind: str, mesh_config: MeshConfig, is_singleton: bool, has_bias: bool
) -> tuple[list[Any], list[tuple[Any, ...]]]:
    """On a rank: this rank's part of what is saved of the experts `kind` after two steps on this rank's rows."""
    mesh = build_mesh(mesh_config)
    seed_ranks(1)
    config = small_config(
        tensor_model_parallel_size=mesh_config.tp,
        expert_model_parallel_size=mesh_config.ep,
        expert_tensor_parallel_size=mesh_config.etp,
        sequence_parallel=mesh_config.tp > 1,
        add_bias_linear=has_bias,
        calculate_per_token_loss=True,  # gradients are sums over the ranks
    )
    num_local = NUM_EXPERTS // mesh_config.ep
    experts = build_experts(kind, num_local, config, mesh)
    for weight in experts.parameters():
        weight.allreduce = False
    fill(experts)
    model, optimizer = wrapped(Layers(experts))
    for step in range(2):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        # A loss linear in the output needs no sum over tensor-parallel ranks; the ranks of a dispatcher's group
        # would all send an expert its rows, so each expert has rows of its own here.
        first = mesh.ep.rank * num_local
        rows = torch.cat([expert_rows(step, first + e) for e in range(num_local)])
        model(rows, torch.tensor([ROWS] * num_local), torch.full((len(rows),), 0.5)).sum().backward()
        finalize_model_grads([model])
        optimizer.step()
    parts = shards(model, optimizer, mesh, is_singleton)
    destroy_mesh()
    return parts


def build_experts(kind: str, num_local: int, config: TransformerConfig, mesh: Mesh) -> MegatronModule:
    if kind == "ours":
        return GroupedExperts(num_local, config, pg_collection=mesh.groups)
    submodules = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    return SequentialMLP(num_local, config, submodules, mesh.groups)


def expert_rows(step: int, expert: int) -> Tensor:
    """Inputs of one expert, the same wherever it is."""
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(100 * step + expert))


def fill(experts: MegatronModule) -> None:
    """Weights that depend on the place in the whole only."""
    for leaf in leaves(experts.sharded_state_dict(prefix="experts.")):
        if isinstance(leaf, ShardedTensor):
            grids = [
                torch.arange(span.start, span.stop) if isinstance(span, slice) else torch.tensor([span])
                for span in leaf.global_slice()
            ]
            mixed = sum(
                grid.reshape([-1 if i == axis else 1 for i in range(len(grids))]) * factor
                for axis, (grid, factor) in enumerate(zip(grids, (7, 3, 5), strict=False))
            )
            with torch.no_grad():
                leaf.data.copy_(torch.sin(mixed.double()).reshape(leaf.data.shape) * 0.3)


def wrapped(model: Layers) -> tuple[Any, Any]:
    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    parallel = DistributedDataParallel(model.config, settings, model)
    adam = OptimizerConfig(optimizer="adam", lr=1e-2, use_distributed_optimizer=True, clip_grad=0.0)
    return parallel, get_megatron_optimizer(adam, [parallel], use_gloo_process_groups=False)


def shards(model: Any, optimizer: Any, mesh: Mesh, is_singleton: bool) -> tuple[list[Any], list[tuple[Any, ...]]]:
    metadata = sharding_metadata(mesh) | {"singleton_local_shards": is_singleton}
    weights = model.module.sharded_state_dict(metadata=metadata)
    state = {"model": weights, "optimizer": optimizer.sharded_state_dict({"model": dict(weights)}, metadata=metadata)}
    tensors, objects = [], []
    for leaf in leaves(state):
        if isinstance(leaf, ShardedTensor):
            tensors.append((leaf.key, leaf.global_slice(), tuple(leaf.global_shape), leaf.data.detach().clone()))
        elif isinstance(leaf, ShardedObject) and "_extra_state" in leaf.key:
            objects.append((leaf.key, tuple(leaf.global_shape), tuple(leaf.global_offset)))
    return tensors, objects


def leaves(state: Any) -> list[Any]:
    apply_factories(state)
    found, left = [], [state]
    while left:
        node = left.pop()
        if isinstance(node, dict):
            left += node.values()
        elif isinstance(node, list | tuple):
            left += node
        else:
            found.append(node)
    return found


def whole(ranks: list[Any]) -> Saved:
    """All tensors put together, and the names and places of the empty extra states."""
    tensors: dict[str, Tensor] = {}
    for parts, _ in ranks:
        for key, where, shape, data in parts:
            target = tensors.setdefault(key, torch.full(shape, float("nan")))
            target[where] = data.reshape(target[where].shape).float()
    assert not any(tensor.isnan().any() for tensor in tensors.values()), "an element that no rank saves"
    return tensors, {place for _, objects in ranks for place in objects}


@pytest.mark.full
@pytest.mark.parametrize("is_singleton", [False, True], ids=["stacked", "single"])
@pytest.mark.parametrize("mesh", ["1", "ep2", "tp2-etp2", "tp2-etp2-ep2"])
def test_our_experts_are_saved_as_megatrons_are(mesh: str, is_singleton: bool) -> None:
    config = MESHES[mesh]
    ours = whole(run_ranks(trained, config.smallest_world, "ours", config, is_singleton, False))
    assert_same(ours, saved_by_megatrons(is_singleton))


@functools.cache
def saved_by_megatrons(is_singleton: bool) -> Saved:
    return whole(run_ranks(trained, 1, "megatron", MeshConfig(), is_singleton, False))


@pytest.mark.full
def test_experts_with_biases_are_saved_alike_by_one_rank_and_by_two() -> None:
    """Megatron's own cannot be trained with biases in this torch: it changes a view in place."""
    two = whole(run_ranks(trained, 2, "ours", MESHES["ep2"], False, True))
    assert any("exp_avg" in key and "bias" in key for key in two[0])
    assert_same(two, whole(run_ranks(trained, 1, "ours", MeshConfig(), False, True)))


@pytest.mark.parametrize("is_singleton", [False, True], ids=["stacked", "single"])
def test_biases_are_saved_as_megatrons_are(is_singleton: bool) -> None:
    ours, megatrons = (run_ranks(saved_biases, 1, kind, is_singleton)[0] for kind in ("ours", "megatron"))
    assert sum("bias" in key for key, *_ in ours) == NUM_EXPERTS * 3, "two halves of fc1, and fc2"
    assert ours == megatrons


def saved_biases(kind: str, is_singleton: bool) -> set[tuple[Any, ...]]:
    """On a rank: name, place and shape of the whole of everything that experts with biases save."""
    mesh = build_mesh(MeshConfig())
    seed_ranks(1)
    metadata = sharding_metadata(mesh) | {"singleton_local_shards": is_singleton}
    state = build_experts(kind, NUM_EXPERTS, small_config(add_bias_linear=True), mesh).sharded_state_dict(
        "experts.", (), metadata
    )
    tensors = [leaf for leaf in leaves(state) if isinstance(leaf, ShardedTensor)]
    return {(leaf.key, leaf.global_offset, leaf.local_shape, leaf.global_shape) for leaf in tensors}


def assert_same(ours: Saved, theirs: Saved) -> None:
    (our_tensors, our_extras), (tensors, extras) = ours, theirs
    assert our_tensors.keys() == tensors.keys()
    assert sum("exp_avg" in key for key in our_tensors) >= 4, "moments are there"
    for key, tensor in tensors.items():
        torch.testing.assert_close(
            our_tensors[key], tensor, rtol=1e-4, atol=2e-6, msg=lambda text, key=key: f"{key}: {text}"
        )
    assert our_extras == extras and extras
