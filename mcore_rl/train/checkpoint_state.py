"""Conversion of a training state to shards for a checkpoint, and back."""

from dataclasses import asdict
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding

from mcore_rl.errors import CheckpointError
from mcore_rl.megatron.mesh import seed_ranks
from mcore_rl.model.build import settle_weights
from mcore_rl.storage.checkpoint import CRITIC, OWN_ENTRY
from mcore_rl.storage.checkpoints import write
from mcore_rl.storage.checkpoints.read import StoredCheckpoint, read
from mcore_rl.storage.megatron_lm import common_state
from mcore_rl.train.optimizer import initialize_moments, settle_loaded_step
from mcore_rl.train.state import Progress, TrainState, random_states, restore_random_states

RANDOM = "mcore_rl.random_states"
COPIES = "fp32_from_fp16_params"
"""Key of the fp32 copies of a bf16 model's weights in the state of an optimizer that is not distributed."""
SEED_DISTANCE = 1_000_003
"""Distance between the seeds of two steps; larger than the seeds' range over ranks, so that no seeds coincide."""


def full_state(state: TrainState) -> dict[str, Any]:
    """Collective over the mesh: return everything that a resumed run needs, without the base's weights if checkpoints
    have only adapters. The common values are copies; the shards of weights share the weights' memory.
    """
    weights, moments = _sharded(state)
    if state.config.checkpoint.weights == "adapters":
        weights = write.trained_weights(weights)
    ours = {"progress": asdict(state.progress), "device": state.platform.device.type}
    common = common_state(
        state.config.model, write.describe_mesh(state.mesh), state.mesh.world.size, state.progress.step, ours
    )
    common["args"].consumed_train_samples = state.progress.consumed_samples
    entries: dict[str, Any] = weights | common
    entries |= {
        "optimizer": moments,
        "opt_param_scheduler": state.schedule.state_dict(),
        "random_states": _random_shard(state, random_states()),
    }
    if (critic := state.critic) is not None:
        weights, moments = _sharded(critic)
        shards: dict[str, Any] = weights | {"optimizer": moments}
        add_prefix_for_sharding(shards, CRITIC)
        values = {"opt_param_scheduler": critic.schedule.state_dict(), "progress": asdict(critic.progress)}
        entries["critic"] = shards | values
    return entries


def _sharded(state: TrainState) -> tuple[dict[str, Any], dict[str, Any]]:
    """Collective over the mesh: return one model's weights and optimizer state as shards, without copying."""
    settle_weights(state.chunks)
    initialize_moments(state.optimizer)
    weights = write.weights_state(state.chunks, state.mesh)
    # A copy, because Megatron's optimizer adds to the dict that it is given.
    moments = state.optimizer.sharded_state_dict(
        dict(weights), is_loading=False, metadata=write.sharding_metadata(state.mesh)
    )
    for part in _parts(state, moments):
        inner = _inner(part)
        # Without the classes among a hybrid optimizer's settings.
        inner["param_groups"] = [
            {name: value for name, value in group.items() if not isinstance(value, type)}
            for group in inner["param_groups"]
        ]
        # Empty where a stage trains nothing, it would count as common to all ranks.
        if not part.get("param_state", True):
            del part["param_state"]
    if not state.config.optim.is_sharded:
        _number_copies(state, moments)
    return weights, moments


def _wanted(state: TrainState, stored: StoredCheckpoint) -> dict[str, Any]:
    """Collective over the mesh: return the shards of weights and optimizer to fill from a checkpoint."""
    initialize_moments(state.optimizer)
    wanted = write.without_absent_extras(write.weights_state(state.chunks, state.mesh), stored)
    wanted["optimizer"] = state.optimizer.sharded_state_dict(
        dict(wanted), is_loading=True, metadata=write.sharding_metadata(state.mesh)
    )
    if not state.config.optim.is_sharded:
        _number_copies(state, wanted["optimizer"])
        for part in _parts(state, wanted["optimizer"]):
            # They would have to be as many as in the checkpoint, and are replaced by the run's own.
            del _inner(part)["param_groups"]
    return wanted


def load_full_state(state: TrainState, stored: StoredCheckpoint) -> list[str]:
    """Collective over the mesh: load a checkpoint into `state`; return log lines about differences from its run."""
    assert stored.marker is not None
    is_same_mesh = stored.marker.mesh == write.describe_mesh(state.mesh)
    wanted = _wanted(state, stored)
    if is_same_mesh:
        wanted["random_states"] = _random_shard(state, None)
    if state.critic is not None:
        if not stored.has_critic:
            raise CheckpointError(
                f'{stored.path} has no critic, which rl.advantage.kind="gae" trains. Start another run_dir from its '
                f"weights, with checkpoint.load={stored.path} and checkpoint.load_optimizer=false"
            )
        wanted["critic"] = _wanted(state.critic, stored)
        add_prefix_for_sharding(wanted["critic"], CRITIC)
    allowed = state.config.checkpoint.allow_changes
    loaded = read(wanted, stored, state.mesh, state.config.model, allowed=allowed)
    _put(state, loaded, loaded[OWN_ENTRY])
    if state.critic is not None:
        _put(state.critic, loaded["critic"], loaded["critic"])
    saved_on = loaded[OWN_ENTRY]["device"]
    if is_same_mesh and saved_on == state.platform.device.type:
        restore_random_states(loaded["random_states"])
        return []
    seed_ranks(state.config.train.seed + SEED_DISTANCE * (state.progress.step + 1))
    sizes = ", ".join(f"{name} {size}" for name, size in stored.marker.mesh.items() if size > 1) or "1 rank"
    return [
        f"random states follow anew from train.seed={state.config.train.seed} and step {state.progress.step}: the "
        f"checkpoint is of another mesh or device ({sizes}, {saved_on})"
    ]


def _put(state: TrainState, loaded: dict[str, Any], own: dict[str, Any]) -> None:
    write.put_weights(state.chunks, loaded)
    parts = _parts(state, loaded["optimizer"])
    # Megatron would take rates, betas and decay from the checkpoint's parameter groups, or fail if they do not match.
    groups = [group for part in parts for group in _inner(part)["param_groups"]]
    steps = [{"step": group["step"]} for group in groups if "step" in group]
    step = steps[0] if steps else {}  # none before the first step
    for optimizer, part in zip(state.optimizer.chained_optimizers, parts, strict=True):
        if state.config.optim.is_sharded:
            part["optimizer"]["param_groups"] = [
                {name: value for name, value in group.items() if name != "params"} | step
                for group in optimizer.optimizer.param_groups
            ]
        else:
            _complete(part, optimizer.optimizer.state_dict()["param_groups"], step)
    with torch.no_grad():
        state.optimizer.load_state_dict(loaded["optimizer"])
    settle_loaded_step(state.optimizer)
    state.schedule.num_steps = 0  # Megatron adds the checkpoint's number to it
    state.schedule.load_state_dict(loaded["opt_param_scheduler"])
    state.progress = Progress(**own["progress"])


def _parts(state: TrainState, optimizer: dict[Any, Any]) -> list[dict[str, Any]]:
    """Return the state of each optimizer in Megatron's chain. A single optimizer's state is not numbered."""
    count = len(state.optimizer.chained_optimizers)
    return [optimizer] if count == 1 else [optimizer[index] for index in range(count)]


def _number_copies(state: TrainState, optimizer: dict[Any, Any]) -> None:
    """Put fp32 copies of weights under numbers, and leave out what is empty: a stage without weights of an optimizer
    has no moments and shorter lists, which would count as common to all ranks.
    """
    for part in _parts(state, optimizer):
        if COPIES in part:
            part[COPIES] = {index: dict(enumerate(group)) for index, group in enumerate(part[COPIES]) if group}
        for table, name in ((part, COPIES), (_inner(part), "state")):
            if not table.get(name, True):
                del table[name]


def _complete(part: dict[str, Any], groups: list[dict[str, Any]], step: dict[str, int]) -> None:
    """Add a run's own parameter groups to what was loaded for an optimizer with whole states, and undo
    `_number_copies`. Muon counts no steps.
    """
    inner = _inner(part)
    inner["param_groups"] = [group | ({} if "momentum" in group else step) for group in groups]
    inner.setdefault("state", {})
    if inner is not part:
        copies = part.get(COPIES, {})
        part[COPIES] = [[copy for _, copy in sorted(copies.get(index, {}).items())] for index in range(len(groups))]


def _inner(part: dict[str, Any]) -> dict[str, Any]:
    """Return the state of torch's optimizer in that of a Megatron optimizer, which for fp32 weights has no more."""
    inner: dict[str, Any] = part.get("optimizer", part)
    return inner


def _random_shard(state: TrainState, states: dict[str, Any] | None) -> ShardedObject:
    world = state.mesh.world
    return ShardedObject(RANDOM, states, (world.size,), (world.rank,), replica_id=0)
