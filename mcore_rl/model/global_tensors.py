"""A model's weights by their names and indices in checkpoints, independent of the mesh."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories, is_main_replica
from torch import Tensor, nn

from mcore_rl.errors import CheckpointError
from mcore_rl.megatron.mesh import Mesh
from mcore_rl.model.build import unwrap


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalShard:
    """A region of a global tensor, and its memory on this rank."""

    key: str
    """Name of the global tensor in checkpoints."""
    where: tuple[int | slice, ...]
    """Region as one int or slice for each axis of the global tensor."""
    global_shape: tuple[int, ...]
    """Shape of the whole tensor."""
    data: Tensor
    """View of the parameter or buffer: writing to it changes the model."""
    is_main: bool
    """True on exactly one rank among those with a copy of the region."""


def local_shards(chunks: Sequence[nn.Module]) -> Iterator[LocalShard]:
    """Yield every weight and persistent buffer of this rank's chunks."""
    for chunk in chunks:
        model = unwrap(chunk)
        # Megatron needs the group only if an MTP stage has a copy of the embedding.
        state = model.sharded_state_dict(metadata={"dp_cp_group": model.pg_collection.dp_cp})
        apply_factories(state)
        for tensor in _leaves(state):
            yield LocalShard(
                key=tensor.key,
                where=tensor.global_slice(),
                global_shape=tuple(tensor.global_shape),
                data=tensor.data,
                is_main=is_main_replica(tensor.replica_id),
            )


@torch.no_grad()
def copy_in(chunks: Sequence[nn.Module], tensors: Mapping[str, Tensor]) -> None:
    """Fill this rank's weights from global tensors, converted to the weights' dtype.

    Tensors that are not on this rank are ignored.

    Raises:
        CheckpointError: a tensor is missing or has the wrong shape.
    """
    for shard in local_shards(chunks):
        source = tensors.get(shard.key)
        if source is None:
            raise CheckpointError(
                f"no tensor {shard.key} {shard.global_shape} among the {len(tensors)} given"
            )
        if tuple(source.shape) != shard.global_shape:
            raise CheckpointError(
                f"{shard.key} has shape {tuple(source.shape)}, the model wants {shard.global_shape}"
            )
        shard.data.copy_(source[shard.where])


@torch.no_grad()
def gathered(shards: Sequence[LocalShard], mesh: Mesh, to_rank: int = 0) -> dict[str, Tensor]:
    """Collective over the world: return the whole tensors of all ranks' shards by key, in the main memory of `to_rank`;
    an empty dict on all other ranks. Shards are sent one at a time.
    """
    own = [shard for shard in shards if shard.is_main]
    of_ranks: list[list[LocalShard]] = [[] for _ in range(mesh.world.size)]
    described = [replace(shard, data=torch.empty_like(shard.data, device="meta")) for shard in own]
    dist.all_gather_object(of_ranks, described, group=mesh.world.group)
    rank, tensors = mesh.world.rank, dict[str, Tensor]()
    for owner, theirs in enumerate(of_ranks):
        for index, shard in enumerate(theirs):
            data = own[index].data.detach().contiguous() if rank == owner else None
            if data is not None and rank != to_rank:
                dist.send(data.view(-1).view(torch.uint8), to_rank, group=mesh.world.group)
            if rank != to_rank:
                continue
            if data is None:
                device = next((local.data.device for local in own), torch.device("cpu"))
                flat = torch.empty(shard.data.nbytes, dtype=torch.uint8, device=device)
                dist.recv(flat, owner, group=mesh.world.group)
                data = flat.view(shard.data.dtype)
            whole = tensors.setdefault(shard.key, torch.empty(shard.global_shape, dtype=shard.data.dtype))
            into = whole[shard.where]
            into.copy_(data.view(into.shape))
    return tensors


def _leaves(state: object) -> Iterator[ShardedTensor]:
    if isinstance(state, ShardedTensor):
        yield state
    elif isinstance(state, dict):
        for value in state.values():
            yield from _leaves(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from _leaves(value)
