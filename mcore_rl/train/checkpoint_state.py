"""Translation of a training state to shards that are saved, and back."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.distributed import DistributedDataParallel
from torch import nn

from mcore_rl.checkpoint.read import OWN_ENTRY, StoredCheckpoint, read
from mcore_rl.checkpoint.weights import (
    common_state,
    put_weights,
    sharding_metadata,
    weights_state,
    without_absent_extras,
)
from mcore_rl.checkpoint.write import describe_mesh
from mcore_rl.train.random_states import random_states, reseed, restore_random_states
from mcore_rl.train.state import Progress, TrainState

RANDOM = "mcore_rl.random_states"


def settle_weights(chunks: Sequence[nn.Module]) -> None:
    """Collective over the data-parallel ranks: give every rank the weights of the last optimizer step.

    With overlap_param_gather Megatron gathers them only in the next forward pass; whatever reads weights in
    between (checkpoints, weight sync) would get those of the step before.
    """
    for chunk in chunks:
        assert isinstance(chunk, DistributedDataParallel)
        if chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)


def full_state(state: TrainState) -> dict[str, Any]:
    """Collective over the mesh: return everything that a resumed run needs, as shards and common values.

    The common values are copies; the shards of weights share the weights' memory.
    """
    settle_weights(state.chunks)
    _initialize_optimizer(state)
    weights = weights_state(state.chunks, state.mesh)
    # A copy, because Megatron's optimizer adds to the dict that it is given.
    moments = state.optimizer.sharded_state_dict(
        dict(weights), is_loading=False, metadata=sharding_metadata(state.mesh)
    )
    ours = {"progress": asdict(state.progress), "device": state.platform.device.type}
    common = common_state(state.config.model, state.mesh, state.progress.step, ours)
    common["args"].consumed_train_samples = state.progress.consumed_samples
    return (
        weights
        | common
        | {
            "optimizer": moments,
            "opt_param_scheduler": state.schedule.state_dict(),
            "random_states": _random_shard(state, random_states()),
        }
    )


def load_full_state(state: TrainState, stored: StoredCheckpoint) -> list[str]:
    """Collective over the mesh: load a checkpoint into `state`.

    Returns:
        Lines for the log on what differs from the run that was saved.
    """
    assert stored.marker is not None
    is_same_mesh = stored.marker.mesh == describe_mesh(state.mesh)
    wanted = without_absent_extras(weights_state(state.chunks, state.mesh), stored)
    wanted["optimizer"] = state.optimizer.sharded_state_dict(
        dict(wanted), is_loading=True, metadata=sharding_metadata(state.mesh)
    )
    if is_same_mesh:
        wanted["random_states"] = _random_shard(state, None)
    loaded = read(wanted, stored, state.mesh, state.config.model)
    put_weights(state.chunks, loaded)
    _put_optimizer(state, loaded)
    state.progress = Progress(**loaded[OWN_ENTRY]["progress"])
    saved_on = loaded[OWN_ENTRY]["device"]
    if is_same_mesh and saved_on == state.platform.device.type:
        restore_random_states(loaded["random_states"])
        return []
    reseed(state.config.train.seed, state.progress.step)
    return [
        f"random states follow anew from train.seed={state.config.train.seed} and step {state.progress.step}: the "
        f"checkpoint is of another mesh or device ({_sizes(stored.marker.mesh)}, {saved_on})"
    ]


def _put_optimizer(state: TrainState, loaded: dict[str, Any]) -> None:
    """Load moments, main weights, step count and position in the schedule; settings are those of the config."""
    inner = state.optimizer.chained_optimizers
    parts = (
        [loaded["optimizer"]]
        if len(inner) == 1
        else [loaded["optimizer"][index] for index in range(len(inner))]
    )
    # Megatron would take rates, betas and decay from the checkpoint's parameter groups, or fail to find its own there.
    groups = [group for part in parts for group in part["optimizer"]["param_groups"]]
    steps = [{"step": group["step"]} for group in groups if "step" in group]
    step = steps[0] if steps else {}  # none before the first step
    for optimizer, part in zip(inner, parts, strict=True):
        part["optimizer"]["param_groups"] = [
            {name: value for name, value in group.items() if name != "params"} | step
            for group in optimizer.optimizer.param_groups
        ]
    with torch.no_grad():
        state.optimizer.load_state_dict(loaded["optimizer"])
    state.schedule.num_steps = 0  # Megatron adds the checkpoint's number to it
    state.schedule.load_state_dict(loaded["opt_param_scheduler"])


def _initialize_optimizer(state: TrainState) -> None:
    """Make zero moments where no step has made any: Megatron cannot save moments that do not exist."""
    for optimizer in state.optimizer.chained_optimizers:
        if not optimizer.is_stub_optimizer:
            optimizer.init_state_fn(optimizer.optimizer, optimizer.config)


def _random_shard(state: TrainState, states: dict[str, Any] | None) -> ShardedObject:
    world = state.mesh.world
    return ShardedObject(RANDOM, states, (world.size,), (world.rank,), replica_id=0)


def _sizes(mesh: dict[str, int]) -> str:
    return ", ".join(f"{name} {size}" for name, size in mesh.items() if size > 1) or "1 rank"
