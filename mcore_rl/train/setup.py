"""Set-up of a model for training, from a checked config."""

import importlib
from collections.abc import Sequence

from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer
from torch import nn

from mcore_rl.config.optim import LoraConfig, OptimConfig
from mcore_rl.config.run import RunConfig, TrainConfig
from mcore_rl.config.section import Store
from mcore_rl.config.speed import SpeedFlags, run_flags
from mcore_rl.errors import ConfigError
from mcore_rl.megatron.agree import from_every_rank, world_max
from mcore_rl.megatron.mesh import Mesh, build_mesh, seed_ranks
from mcore_rl.megatron.platform import Platform
from mcore_rl.megatron.routers import routers
from mcore_rl.metrics.performance import Timers
from mcore_rl.model.build import build_model, unwrap
from mcore_rl.model.transformer_config import machine_of
from mcore_rl.storage.checkpoints.write import weights_state
from mcore_rl.train.offload import Residence
from mcore_rl.train.optimizer import build_optimizer, build_schedule
from mcore_rl.train.state import Progress, TrainState


def set_up(config: RunConfig, platform: Platform) -> TrainState:
    """Collective over the world: build mesh, random model, optimizer and schedule, for a critic too, at step 0."""
    mesh = build_mesh(config.mesh, config.platform.timeout_s)
    if config.mesh.overlap_tp and platform.layers == "te":
        # The buffers that overlap tensor-parallel communication with matrix products, before any layer that uses them
        # is built. Megatron leaves this to its scripts, and TransformerEngine is not installed everywhere.
        base = importlib.import_module("transformer_engine.pytorch.module.base")
        shape = user_buffer_shape(config.train, config.packed_length, mesh.cp.size, config.model.hidden_size)
        base.initialize_ub(shape=shape, tp_size=mesh.tp.size, use_fp8=False, ub_cfgs={}, bootstrap_backend="nccl")
    seed_ranks(config.train.seed)
    # Memory that is stored elsewhere leaves the device before the next model is built.
    state = _set_up_model(config, platform, mesh, config.train.steps, store=config.update_store, weights_stay=True)
    if config.critic_optim is not None:
        scored = config.model_copy(
            update={"model": config.model.scored, "optim": config.critic_optim, "lora": LoraConfig()}
        )
        state.critic = _set_up_model(
            scored, platform, mesh, config.critic_steps, store=config.critic_store, weights_stay=False
        )
    return state


def user_buffer_shape(train: TrainConfig, length: int, cp: int, hidden_size: int) -> list[int]:
    """Return [tokens, hidden size] of a microbatch of sequences of `length` positions, the same in every step, on the
    tensor-parallel ranks of one of `cp` context-parallel parts.
    """
    return [train.micro_batch * length // cp, hidden_size]


def _set_up_model(
    config: RunConfig, platform: Platform, mesh: Mesh, steps: int, *, store: Store, weights_stay: bool
) -> TrainState:
    """Collective over the world: build a model, its optimizer and its schedule, and move its memory to `store`."""
    bare = build_model(config.model, mesh, platform, config.platform)
    freeze(bare, trains_routers=not config.freezes_router, trains_mtp=config.trains_mtp)
    if config.lora.is_on:
        from mcore_rl.model.adapters import add_adapters  # only runs that train adapters

        add_adapters(bare, config.lora, config.model, config.train.seed)
    refuse_partly_frozen(bare, mesh)
    flags = run_flags(config, machine_of(platform))
    chunks = wrap_for_data_parallelism(bare, flags, mesh, config.optim)
    optimizer = build_optimizer(config.optim, platform, chunks)
    connect(chunks, optimizer)
    return TrainState(
        config=config,
        platform=platform,
        mesh=mesh,
        chunks=chunks,
        optimizer=optimizer,
        schedule=build_schedule(config.optim, optimizer, steps),
        progress=Progress(),
        timers=Timers(platform.device),
        residence=Residence(chunks, optimizer, store, platform.device, weights_stay=weights_stay),
    )


def freeze(chunks: Sequence[nn.Module], *, trains_routers: bool, trains_mtp: bool) -> None:
    """Freeze what is not trained, before the optimizer is built: routers, with the expert biases that Megatron updates
    from the load, and multi-token-prediction layers that no pass uses, which an optimizer would decay and an overlapped
    reduction would wait for.
    """
    for chunk in chunks:
        model = unwrap(chunk)
        if not trains_routers:
            model.config.moe_router_bias_update_rate = 0.0
            for _, router in routers(chunk):
                router.requires_grad_(False)
        if not trains_mtp and getattr(model, "mtp", None) is not None:
            model.mtp.requires_grad_(False)


def refuse_partly_frozen(chunks: Sequence[nn.Module], mesh: Mesh) -> None:
    """Collective over the world: raise a ConfigError on all ranks if only part of a checkpoint's tensor would be
    trained, such as the tensor of all layers' routers with a single frozen layer: its moments could not be saved.
    """
    trained: dict[str, set[bool]] = {}
    for shard in nested_values(weights_state(chunks, mesh)):
        if isinstance(shard, ShardedTensor | ShardedTensorFactory) and isinstance(shard.data, nn.Parameter):
            trained.setdefault(shard.key, set()).add(shard.data.requires_grad)
    # Nearly always everything is trained, and a single number shows it.
    if not world_max(int({False} in trained.values() or {False, True} in trained.values())):
        return
    whole: dict[str, set[bool]] = {}
    for found in from_every_rank(trained):
        for key, flags in found.items():
            whole.setdefault(key, set()).update(flags)
    partly = sorted(key for key, flags in whole.items() if len(flags) > 1)
    if partly:
        raise ConfigError(
            f"{partly[0]} is one tensor in a checkpoint, and only a part of its parameters is trainable "
            "(requires_grad): it could not be saved. Freeze it in all layers and experts, or in none."
            + (f" {len(partly) - 1} more are so." if len(partly) > 1 else "")
        )


def wrap_for_data_parallelism(
    chunks: Sequence[nn.Module], flags: SpeedFlags, mesh: Mesh, optim: OptimConfig
) -> list[DistributedDataParallel]:
    """Collective over the world: wrap chunks so that gradients are summed over microbatches and data-parallel ranks, as
    the optimizer needs them.
    """
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=optim.main_grads_dtype == "fp32",  # otherwise in the weights' dtype
        use_distributed_optimizer=optim.is_sharded,
        overlap_grad_reduce=flags.overlap_grad_reduce,
        overlap_param_gather=flags.overlap_param_gather,
    )
    # The backward pass ends with the first chunk: only its reduction gains from buckets that start early.
    wrapped = [
        DistributedDataParallel(unwrap(chunk).config, settings, chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]
    if mesh.world.size > 1:
        for chunk in wrapped:
            # Random states differ between ranks, which must start with the same weights.
            chunk.broadcast_params()
    return wrapped


def connect(chunks: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer) -> None:
    """Tell Megatron's schedules, in the chunks' config, how to finish gradients and when not to reduce them."""
    config = unwrap(chunks[0]).config
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    if chunks[0].ddp_config.overlap_grad_reduce:
        pauses = [chunk.no_sync for chunk in chunks]
        config.no_sync_func = pauses if len(pauses) > 1 else pauses[0]
