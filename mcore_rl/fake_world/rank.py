"""Bytes of one rank of a run: its model, buffers and optimizer, built without their memory and counted."""

from collections.abc import Iterable

from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from mcore_rl.config.model import ModelConfig
from mcore_rl.config.run import RunConfig
from mcore_rl.config.speed import planned_flags
from mcore_rl.fake_world.groups import fake_platform, fake_rank
from mcore_rl.fake_world.meta import on_meta
from mcore_rl.model.build import build_model
from mcore_rl.parallel.mesh import Mesh
from mcore_rl.parallel.routers import routers
from mcore_rl.plan.exact import RankBytes
from mcore_rl.plan.memory import ModelOnRanks, models_on_ranks
from mcore_rl.train.optimizer import build_optimizer
from mcore_rl.train.setup import freeze_routers, wrap_for_data_parallelism


def bytes_of_rank(config: RunConfig, rank: int, world_size: int) -> RankBytes:
    """Build every model of a run on one rank, on `meta`, and count its bytes; config and world have passed the checks.

    Layers are ours whatever the config says: TransformerEngine's have the same weights.
    """
    with fake_rank(config.mesh, rank, world_size) as mesh, on_meta():
        counted = [_model_bytes(config, one, mesh) for one in models_on_ranks(config)]
        stage = mesh.pp.rank
    return RankBytes(
        rank=rank,
        stage=stage,
        weights=sum(one.weights for one in counted),
        gradients=sum(one.gradients for one in counted),
        optimizer=sum(one.optimizer for one in counted),
        gaps=sum(one.gaps for one in counted),
        numbers=sum(one.numbers for one in counted),
        host=sum(one.host for one in counted),
    )


def _model_bytes(config: RunConfig, one: ModelOnRanks, mesh: Mesh) -> RankBytes:
    """Return the bytes of one model on the rank that `mesh` is of."""
    platform = fake_platform(config.platform, mesh)
    bare = build_model(buildable(one.model), mesh, platform, config.platform)
    for chunk in bare:
        for _, router in routers(chunk):
            # As the first forward pass does.
            router._maintain_float32_expert_bias()
    weights = storage_bytes(tensor for chunk in bare for tensor in (*chunk.parameters(), *chunk.buffers()))
    numbers = sum(param.numel() for chunk in bare for param in chunk.parameters())
    place = {"rank": mesh.world.rank, "stage": mesh.pp.rank, "numbers": 0 if one.on_host else numbers}
    if not one.trains:
        on_device, on_host = (0, weights) if one.on_host else (weights, 0)
        return RankBytes(**place, weights=on_device, gradients=0, optimizer=0, gaps=0, host=on_host)
    if config.freezes_router:
        freeze_routers(bare)
    chunks = wrap_for_data_parallelism(bare, planned_flags(config, mesh.world.size), mesh)
    buffers = [buffer for chunk in chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    gaps = sum(buffer.numel - sum(param.numel() for param in buffer.params) for buffer in buffers)
    return RankBytes(
        **place,
        # Parameters now lie in buffers with gaps between them, which the optimizer gathers as one.
        weights=storage_bytes(tensor for chunk in bare for tensor in (*chunk.parameters(), *chunk.buffers())),
        gradients=storage_bytes(buffer.grad_data for buffer in buffers),
        optimizer=_state_bytes(build_optimizer(config.optim, platform, chunks)),
        gaps=gaps,
        host=0,
    )


def _state_bytes(optimizer: MegatronOptimizer) -> int:
    """Return the bytes of moments and fp32 copies of this rank's share of the weights."""
    total = 0
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        if one.optimizer is None:  # no weight of this kind
            continue
        one.init_state_fn(one.optimizer, one.config)
        own = [value for state in one.optimizer.state.values() for value in state.values()]
        copies = [copy for group in one.shard_fp32_from_float16_groups for copy in group]
        total += storage_bytes(value for value in (*own, *copies) if isinstance(value, Tensor))
    return total


def buildable(model: ModelConfig) -> ModelConfig:
    """Return a model of the same weights that needs no packages for GPUs."""
    if not model.is_moe:
        return model
    return model.model_copy(update={"moe": model.moe.model_copy(update={"dispatcher": "alltoall"})})


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the memory that tensors lie in, shared memory once."""
    return sum(
        {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}.values()
    )
