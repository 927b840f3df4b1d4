"""Bytes of a rank of a run: its model, buffers and optimizer, built without memory and counted."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from torch import Tensor

from mcore_rl.config.model import ModelConfig
from mcore_rl.config.speed import planned_flags
from mcore_rl.fake_world.groups import fake_platform, fake_rank
from mcore_rl.fake_world.meta import on_meta
from mcore_rl.megatron.mesh import Mesh
from mcore_rl.megatron.routers import routers
from mcore_rl.model.adapters import add_adapters
from mcore_rl.model.build import build_model
from mcore_rl.planning.exact import RankBytes
from mcore_rl.planning.training import ModelOnRanks, Training
from mcore_rl.train.optimizer import build_optimizer, initialize_moments
from mcore_rl.train.setup import freeze, wrap_for_data_parallelism


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelBytes:
    """Bytes of a model on a rank."""

    one: ModelOnRanks
    numbers: int
    """Number of weights."""
    weights: int
    gradients: int = 0
    optimizer: int = 0
    host_optimizer: int = 0
    gaps: int = 0
    gradient_gaps: int = 0


def bytes_of_rank(training: Training, rank: int, updated: str | None = None) -> RankBytes:
    """Build every model of a training on a rank, on `meta`, and count its bytes.

    Layers are ours whatever the config says: TransformerEngine's have the same weights.

    Args:
        training: The training.
        rank: The rank.
        updated: Name of the model that is being updated when the bytes are counted; it matters if models wait elsewhere
            between their updates. None for the first that is trained.
    """
    with fake_rank(training.mesh, rank, training.world_size) as mesh, on_meta():
        counted = [_model_bytes(training, model, mesh) for model in training.models]
        stage = mesh.pp.rank
    trained = [each for each in counted if each.one.trains]
    present = [each for each in trained if updated in (None, each.one.name)][:1]
    resident = [each for each in trained if each in present or each.one.store == "device"]
    with_weights = [each for each in counted if each in present or each.one.has_weights]
    return RankBytes(
        rank=rank,
        stage=stage,
        weights=sum(each.weights for each in with_weights),
        gradients=sum(each.gradients for each in resident),
        optimizer=sum(each.optimizer for each in resident),
        gaps=sum(each.gaps for each in with_weights),
        gradient_gaps=sum(each.gradient_gaps for each in resident),
        numbers=sum(each.numbers for each in with_weights),
        host=sum(
            each.optimizer + (0 if each.one.weights_stay else each.weights)
            for each in counted
            if each.one.on_host
        ),
        host_optimizer=sum(each.host_optimizer for each in counted),
    )


def _model_bytes(training: Training, one: ModelOnRanks, mesh: Mesh) -> ModelBytes:
    """Return the bytes of a model on the rank of `mesh`."""
    platform, trains_mtp = fake_platform(training.platform, mesh), training.rollouts is None
    bare = build_model(buildable(one.model), mesh, platform, training.platform)
    if one.lora.is_on:
        add_adapters(bare, one.lora, one.model, seed=0)
    for chunk in bare:
        for _, router in routers(chunk):
            # As the first forward pass does.
            router._maintain_float32_expert_bias()
    weights = storage_bytes(tensor for chunk in bare for tensor in (*chunk.parameters(), *chunk.buffers()))
    numbers = sum(param.numel() for chunk in bare for param in chunk.parameters())
    if one.optim is None:
        if one.is_swapped and one.lora.is_on:
            held = [param for chunk in bare for param in chunk.parameters() if param.requires_grad]
            numbers, weights = sum(param.numel() for param in held), storage_bytes(held)
        return ModelBytes(one=one, numbers=numbers, weights=weights)
    freeze(bare, trains_routers=not training.freezes_router, trains_mtp=trains_mtp)
    flags = planned_flags(
        training.platform, training.mesh, training.model, training.world_size, trains_mtp=trains_mtp
    )
    chunks = wrap_for_data_parallelism(bare, flags, mesh, one.optim.main_grads_dtype)
    buffers = [buffer for chunk in chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    gaps = [buffer.numel - sum(param.numel() for param in buffer.params) for buffer in buffers]
    optimizer = build_optimizer(one.optim, platform, chunks)
    initialize_moments(optimizer)
    on_host = storage_bytes(_offloaded(optimizer))
    return ModelBytes(
        one=one,
        numbers=numbers,
        # Parameters are now in buffers with gaps between them, which the optimizer gathers as a whole.
        weights=storage_bytes(tensor for chunk in bare for tensor in (*chunk.parameters(), *chunk.buffers())),
        gradients=storage_bytes(buffer.grad_data for buffer in buffers),
        optimizer=storage_bytes(_states(optimizer)) - on_host,
        host_optimizer=on_host + _offloaded_gradients(optimizer),
        gaps=sum(gaps),
        gradient_gaps=sum(
            count * buffer.grad_data.element_size() for count, buffer in zip(gaps, buffers, strict=True)
        ),
    )


def _states(optimizer: MegatronOptimizer) -> Iterator[Tensor]:
    """Yield moments and fp32 copies of this rank's share of the weights, in whichever memory."""
    for part in optimizer.chained_optimizers:
        for state in part.optimizer.state.values():
            # In a hybrid optimizer each weight has a count of steps.
            yield from (value for value in state.values() if isinstance(value, Tensor) and value.dim())
        for group in part.shard_fp32_from_float16_groups:
            yield from (copy for copy in group if copy is not None)


def _hybrid(optimizer: MegatronOptimizer) -> Iterator[HybridDeviceOptimizer]:
    for part in optimizer.chained_optimizers:
        if isinstance(part.optimizer, HybridDeviceOptimizer):
            yield part.optimizer


def _offloaded(optimizer: MegatronOptimizer) -> Iterator[Tensor]:
    """Yield moments and fp32 copies that Megatron's hybrid optimizer has in main memory."""
    for hybrid in _hybrid(optimizer):
        for weight, copy in hybrid.gpu_params_map_cpu_copy.items():
            yield copy
            yield from (
                value for value in hybrid.state[weight].values() if isinstance(value, Tensor) and value.dim()
            )


def _offloaded_gradients(optimizer: MegatronOptimizer) -> int:
    """Return the bytes of the gradients in main memory; the first step makes them as large as the fp32 copies."""
    return sum(
        copy.numel() * copy.element_size()
        for hybrid in _hybrid(optimizer)
        for copy in hybrid.gpu_params_map_cpu_copy.values()
    )


def buildable(model: ModelConfig) -> ModelConfig:
    """Return a model with the same weights that needs no packages for GPUs."""
    if not model.is_moe:
        return model
    return model.model_copy(update={"moe": model.moe.model_copy(update={"dispatcher": "alltoall"})})


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the memory that tensors use, counting shared memory once."""
    return sum(
        {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}.values()
    )
