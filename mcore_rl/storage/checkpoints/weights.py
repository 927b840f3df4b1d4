"""A model's weights to and from checkpoints, for other stages, evaluation, generation and conversion."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import extract_matching_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from torch import nn

from mcore_rl.config.changes import config_changes, listing
from mcore_rl.config.lora import LoraConfig
from mcore_rl.config.model import ModelConfig
from mcore_rl.errors import CheckpointError
from mcore_rl.megatron.agree import on_rank_zero
from mcore_rl.megatron.mesh import Mesh
from mcore_rl.model.build import unwrap
from mcore_rl.model.heads import SCORE_SHIFT, SCORE_WEIGHT
from mcore_rl.storage.checkpoint import WRITING, path_of_step, publish
from mcore_rl.storage.checkpoints.megatron_lm import model_args
from mcore_rl.storage.checkpoints.read import (
    ADAPTER,
    EXTRA_STATE,
    LOGIT_PARTS,
    OWN_ENTRY,
    StoredCheckpoint,
    inspect,
    read,
)
from mcore_rl.storage.checkpoints.write import ShardPlanner, finish, write_now
from mcore_rl.storage.files import checkpoint_errors_explained

SHARDING_METADATA = {
    "singleton_local_shards": False,
    # Megatron's default cannot be saved any more, and `dp_reshardable` cannot be loaded on another mesh.
    "distrib_optim_sharding_type": "fully_reshardable",
    "chained_optim_avoid_prefix": True,
}
"""Megatron's switches for the layout of a state, which in this package is the same on every mesh."""


def sharding_metadata(mesh: Mesh) -> dict[str, Any]:
    """Return the `metadata` argument of Megatron's `sharded_state_dict`."""
    return SHARDING_METADATA | {"dp_cp_group": mesh.dp_cp.group}


def weights_state(chunks: Sequence[nn.Module], mesh: Mesh) -> dict[str, Any]:
    """Return the chunks' weights and buffers as shards, under the names that Megatron-LM gives chunks."""
    return {
        name: unwrap(chunk).sharded_state_dict(metadata=sharding_metadata(mesh))
        for name, chunk in zip(_names(chunks), chunks, strict=True)
    }


def trained_weights(weights: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a `weights_state` that a checkpoint of adapters has: adapters, and a scalar head."""

    def is_trained(leaf: Any) -> bool:
        return ADAPTER in leaf.key or leaf.key in (SCORE_WEIGHT, SCORE_SHIFT)

    found: dict[str, Any] = extract_matching_values(weights, is_trained)[0]
    return found


def common_state(model: ModelConfig, mesh: Mesh, step: int, own: dict[str, Any]) -> dict[str, Any]:
    """Return the state that is the same on all ranks: the entries that Megatron-LM looks for, and OWN_ENTRY."""
    args = model_args(model)
    args.tensor_model_parallel_size = mesh.tp.size
    args.pipeline_model_parallel_size = mesh.pp.size
    args.world_size = mesh.world.size
    args.data_parallel_size = mesh.dp.size
    args.ckpt_format = "torch_dist"
    # Random states are saved here by rank and mesh; Megatron-LM would look for them by tensor and pipeline rank.
    args.no_save_rng = True
    return {
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": step,
        "content_metadata": dict(SHARDING_METADATA),
        OWN_ENTRY: own,
    }


def without_absent_extras(state: dict[str, Any], stored: StoredCheckpoint) -> dict[str, Any]:
    """Return `state` without the extra states that the checkpoint lacks: other layers may have written it."""

    def is_there(leaf: Any) -> bool:
        extra = isinstance(leaf, ShardedObject) and EXTRA_STATE in leaf.key
        return not extra or leaf.unique_key in stored.objects

    present: dict[str, Any] = extract_matching_values(state, is_there)[0]
    return present


@torch.no_grad()
def put_weights(chunks: Sequence[nn.Module], loaded: dict[str, Any]) -> None:
    """Copy into the chunks what `read` returned for `weights_state`."""
    for name, chunk in zip(_names(chunks), chunks, strict=True):
        missing, unexpected = unwrap(chunk).load_state_dict(loaded[name], strict=False)
        left = [key for key in (*missing, *unexpected) if EXTRA_STATE not in key]
        assert not left, f"names were compared before, yet {left} are missing or unexpected"


def save_weights(
    chunks: Sequence[nn.Module],
    mesh: Mesh,
    model: ModelConfig,
    folder: Path,
    base: Mapping[str, str] = MappingProxyType({}),
) -> Path:
    """Collective over the world: write a checkpoint of the weights alone and return its path, `folder/iter_0000000`.

    If `base`, the marker's entry, is given, the checkpoint has only low-rank adapters and a scalar head.
    CheckpointError on all ranks when it cannot be written, or is there already.
    """
    final, writing = path_of_step(folder, 0), folder / f"{WRITING}weights"
    on_rank_zero(partial(_make_room, final, writing))
    weights = weights_state(chunks, mesh)
    state = (trained_weights(weights) if base else weights) | common_state(model, mesh, 0, {})
    plan = ShardPlanner(mesh).plan(state, writing)
    finish(plan, write_now(plan), mesh, model, 0, base=base)

    def give_name() -> None:
        with checkpoint_errors_explained(final, "naming"):
            publish(writing, final)

    on_rank_zero(give_name)
    return final


def load_weights(
    chunks: Sequence[nn.Module],
    mesh: Mesh,
    model: ModelConfig,
    path: Path,
    *,
    verify_checksums: bool = True,
    allowed: tuple[str, ...] | None = None,
) -> StoredCheckpoint:
    """Collective over the world: fill the chunks from a checkpoint written on any mesh, whatever else it holds.

    A model with scores takes from a checkpoint with logits the layers alone: its head stays as it is, and the
    checkpoint's output layer and MTP layers are left out. `has_scores` of the result shows which it was. Low-rank
    adapters stay as they are where the checkpoint has none.

    `path` is a checkpoint, a folder of them (the newest is taken), or a run's folder. An optimizer that has its own
    copy of the weights needs `reload_model_params` afterwards. `allowed` as for `read`.

    Raises:
        CheckpointError: on all ranks: it is damaged, or of another model, be it only by a setting that changes
            the result of these weights; also a checkpoint with scores for a model with logits.
    """
    stored = inspect(path, verify_checksums=verify_checksums)
    state = without_absent_extras(weights_state(chunks, mesh), stored)
    is_new_head = model.head == "score" and not stored.has_scores
    if is_new_head:
        layers = {name: shape for name, shape in stored.shapes.items() if not name.startswith(LOGIT_PARTS)}
        stored_layers = replace(stored, shapes=layers)
    else:
        stored_layers = stored

    def is_stored(leaf: Any) -> bool:
        is_adapter = ADAPTER in leaf.key and not stored.has_adapters
        return not (is_adapter or (is_new_head and leaf.key in (SCORE_WEIGHT, SCORE_SHIFT)))

    wanted, own = extract_matching_values(state, is_stored)
    loaded = read(wanted, stored_layers, mesh, model, allowed=allowed)
    for name, tensors in own.items():
        loaded[name] |= {key: _own(shard) for key, shard in tensors.items()}
    put_weights(chunks, loaded)
    return stored


def refuse_other_adapters(stored: StoredCheckpoint, lora: LoraConfig) -> None:
    """Raise a CheckpointError where the adapters of a checkpoint would add something else to a model with `lora`."""
    if not stored.has_adapters:
        return
    assert stored.marker is not None, "only this program writes adapters"
    if changes := config_changes(stored.marker.settings.get("lora", {}), lora, "lora."):
        raise CheckpointError(
            f"{stored.path} has other low-rank adapters:\n{listing(changes)[0]}\nSet the section `lora` as there, or "
            "add them to the weights, with `mcore-rl convert export --merge`, and import the result"
        )


def _own(shard: ShardedTensor | ShardedTensorFactory) -> torch.Tensor:
    """Return the memory that a shard is of."""
    data: torch.Tensor | None = shard.data
    assert data is not None
    return data


def _names(chunks: Sequence[nn.Module]) -> list[str]:
    """Return the keys under which Megatron-LM has the chunks of a rank."""
    return ["model"] if len(chunks) == 1 else [f"model{index}" for index in range(len(chunks))]


def _make_room(final: Path, writing: Path) -> None:
    """Make an empty folder to write to; CheckpointError when the checkpoint is there already."""
    if final.exists():
        raise CheckpointError(f"{final} exists. Move it away, or save to another folder")
    with checkpoint_errors_explained(writing, "making"):
        shutil.rmtree(writing, ignore_errors=True)
        writing.mkdir(parents=True)
