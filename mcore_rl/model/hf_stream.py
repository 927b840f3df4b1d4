"""Weights of the live model as Hugging Face tensors, layer by layer, on one rank: an export without files.

It uses the families' rules, like `convert`: the tensors are bit for bit equal to an export of this model.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mcore_rl.config.model import ModelConfig
from mcore_rl.errors import CheckpointError
from mcore_rl.families import weight_map
from mcore_rl.families.weight_map import (
    AxisRange,
    Region,
    Shape,
    WeightMap,
    copies_into_megatron,
    cut,
    listed,
    overlap,
    sizes,
    whole,
)
from mcore_rl.megatron.mesh import Mesh
from mcore_rl.model.adapters import merged_shards
from mcore_rl.model.build import LocalShard, local_shards

MESSAGE_BYTES = 16 << 20
"""Largest size in bytes of a message between two ranks, unless a single element is larger."""
MTP = "mtp."
"""Key prefix of layers for multi-token prediction."""
LAYERS = "model.layers."
"""Prefix of Hugging Face's names of a layer's tensors."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Whole modules of Hugging Face's model: all tensors of a decoder layer, or a single tensor outside the layers."""

    name: str
    """Common prefix of the tensors' names, such as "model.layers.3.", or the name of the single tensor."""
    tensors: dict[str, Tensor]
    """Tensors by name, on the model's device; empty on other ranks, and after the next bucket is requested."""

    @property
    def num_bytes(self) -> int:
        """Size of all tensors in bytes."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class _Window:
    """Rows of a shard that are sent together."""

    rank: int
    """World rank that has the shard."""
    shard: int
    """Index of the shard among its rank's shards."""
    key: str
    """Name of Megatron's global tensor."""
    where: Region
    """Region of the global tensor."""
    local: Region
    """The same region, relative to the shard."""
    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class _Piece:
    """A region of a window, and the region `where` of the Hugging Face tensor `name` that equals it."""

    name: str
    where: Region
    window: _Window
    inside: Region
    """Region relative to the window."""
    transposed: bool

    @property
    def num_bytes(self) -> int:
        """Size of the piece in bytes."""
        return math.prod(sizes(self.where)) * self.window.dtype.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class _Target:
    """A Hugging Face tensor, and the pieces that make it up, in the same order on all ranks."""

    name: str
    shape: Shape
    dtype: torch.dtype
    pieces: tuple[_Piece, ...]


def iter_hf_weights(
    chunks: Sequence[nn.Module], mesh: Mesh, model: ModelConfig, *, to_rank: int = 0
) -> Iterator[Bucket]:
    """Collective over the world: yield the weights as Hugging Face tensors, in buckets, on the rank `to_rank`.

    All ranks must iterate over all buckets: a rank with part of a bucket waits until `to_rank` requests that bucket.
    No rank has more than one bucket in memory, plus two messages of MESSAGE_BYTES.

    Low-rank adapters are added to their weights, in fp32 and rounded once.

    A tied output is yielded as `lm_head.weight`, which exports omit: a server may have its own copy, which would
    otherwise not be updated. Layers for multi-token prediction are omitted, as by `convert export --mtp drop`: a server
    only uses them to propose tokens.

    Args:
        chunks: This rank's chunks of the model, wrapped or not.
        mesh: The model's mesh.
        model: The model's config.
        to_rank: World rank that gathers the tensors.

    Yields:
        Buckets in the order of the family's rules.

    Raises:
        CheckpointError: on all ranks, if the modules do not have the tensors that the family's rules describe.
    """
    shards = [shard for shard in local_shards(chunks) if shard.is_main and not shard.key.startswith(MTP)]
    targets = _targets(weight_map(model.model_copy(update={"mtp_layers": 0})), shards, mesh)
    buckets: dict[str, list[_Target]] = {}
    for target in targets:
        buckets.setdefault(bucket_of(target.name), []).append(target)
    # Taken from a parameter, because only the first replica has shards.
    device = next(chunks[0].parameters()).device
    for name, members in buckets.items():
        needed = {
            piece.window.shard for target in members for piece in target.pieces if piece.window.rank == mesh.world.rank
        }
        # Weights with adapters added are copies: make them only for the current bucket.
        merged = merged_shards(chunks, [shards[index] for index in sorted(needed)])
        at_hand = dict(zip(sorted(needed), merged, strict=True))
        bucket = Bucket(name, _gathered(members, at_hand, mesh, to_rank, device))
        yield bucket
        # The reader may still hold the bucket while it requests the next.
        bucket.tensors.clear()


def bucket_of(name: str) -> str:
    """Return the name of a tensor's bucket. A server only accepts whole modules, so layers are never split."""
    if not name.startswith(LAYERS):
        return name
    return LAYERS + name.removeprefix(LAYERS).partition(".")[0] + "."


def _targets(weights: WeightMap, shards: Sequence[LocalShard], mesh: Mesh) -> list[_Target]:
    """Collective over the world: return all tensors, each with its pieces on all ranks."""
    of_ranks: list[list[_Window]] = [[] for _ in range(mesh.world.size)]
    on_this_rank = [window for index, shard in enumerate(shards) for window in _windows(shard, mesh.world.rank, index)]
    dist.all_gather_object(of_ranks, on_this_rank, group=mesh.world.group)
    copies = copies_into_megatron(weights.blocks)
    pieces: dict[str, list[_Piece]] = {name: [] for name in weights.hf_shapes}
    for window in (window for of_rank in of_ranks for window in of_rank):
        for copy in copies.get(window.key, ()):
            if overlap(copy.into, window.where):
                part = cut(copy, window.where)
                pieces[part.source].append(
                    _Piece(
                        name=part.source, where=part.where, window=window, inside=part.into, transposed=part.transposed
                    )
                )
    _check(weights, pieces)
    targets = {
        name: _Target(name=name, shape=shape, dtype=pieces[name][0].window.dtype, pieces=tuple(pieces[name]))
        for name, shape in weights.hf_shapes.items()
    }
    repeated = [(copy.name, targets[copy.original]) for copy in weights.copies]
    return [
        *targets.values(),
        *(
            _Target(name=name, shape=original.shape, dtype=original.dtype, pieces=original.pieces)
            for name, original in repeated
        ),
    ]


def _check(weights: WeightMap, pieces: Mapping[str, Sequence[_Piece]]) -> None:
    """Raise CheckpointError unless the pieces make up every tensor, with a single dtype."""
    faults = []
    for name, shape in weights.hf_shapes.items():
        count = sum(math.prod(sizes(piece.where)) for piece in pieces[name])
        if count != math.prod(shape):
            faults.append(f"{name} {shape}: the ranks have {count} of its {math.prod(shape)} elements")
        elif len(kinds := {str(piece.window.dtype) for piece in pieces[name]}) > 1:
            faults.append(f"{name} is in memory in several types: {', '.join(sorted(kinds))}")
    if faults:
        raise CheckpointError(
            f"the model in memory is not the one that its family's rules describe:\n{listed(faults)}\n"
            "This is a mistake in the family's rules, or in model.* of the config."
        )


def _windows(shard: LocalShard, rank: int, index: int) -> Iterator[_Window]:
    """Yield parts of a shard of at most MESSAGE_BYTES each."""
    where = tuple(
        AxisRange(at, at + 1) if isinstance(at, int) else AxisRange(*at.indices(size)[:2])
        for at, size in zip(shard.where, shard.global_shape, strict=True)
    )
    shape, bytes_of_row = sizes(where), shard.data.element_size()
    axis = len(shape) - 1
    while axis and bytes_of_row * shape[axis] <= MESSAGE_BYTES:
        bytes_of_row *= shape[axis]
        axis -= 1
    # `axis` is split into runs of rows, and the axes before it into single indices.
    step = max(1, MESSAGE_BYTES // bytes_of_row)
    for front in itertools.product(*(range(size) for size in shape[:axis])):
        for start in range(0, shape[axis], step):
            rows = AxisRange(start, min(start + step, shape[axis]))
            local = (*(AxisRange(i, i + 1) for i in front), rows, *whole(shape[axis + 1 :]))
            yield _Window(
                rank=rank,
                shard=index,
                key=shard.key,
                where=tuple(
                    AxisRange(there.start + here.start, there.start + here.stop)
                    for there, here in zip(where, local, strict=True)
                ),
                local=local,
                dtype=shard.data.dtype,
            )


@torch.no_grad()
def _gathered(
    targets: Sequence[_Target], shards: Mapping[int, LocalShard], mesh: Mesh, to_rank: int, device: torch.device
) -> dict[str, Tensor]:
    """Collective over the world: return the tensors on `to_rank`, and an empty dict on all other ranks."""
    rank = mesh.world.rank
    tensors = {}
    if rank == to_rank:
        tensors = {target.name: torch.empty(target.shape, dtype=target.dtype, device=device) for target in targets}
    for owner, message in _messages([(target.name, piece) for target in targets for piece in target.pieces]):
        if rank == owner == to_rank:
            for name, piece in message:
                region = _region(tensors[name], piece.where)
                region.copy_(_elements(shards, piece).reshape(region.shape))
        elif rank == owner:
            parts = [_elements(shards, piece).reshape(-1) for _, piece in message]
            dist.send(torch.cat(parts).view(torch.uint8), to_rank, group=mesh.world.group)
        elif rank == to_rank:
            dtype, count = message[0][1].window.dtype, sum(piece.num_bytes for _, piece in message)
            flat = torch.empty(count, dtype=torch.uint8, device=device)
            dist.recv(flat, owner, group=mesh.world.group)
            start = 0
            for name, piece in message:
                region = _region(tensors[name], piece.where)
                region.copy_(flat.view(dtype)[start : start + region.numel()].view(region.shape))
                start += region.numel()
    return tensors


def _messages(pieces: Sequence[tuple[str, _Piece]]) -> Iterator[tuple[int, list[tuple[str, _Piece]]]]:
    """Yield messages as (rank, pieces), rank by rank: pieces of one dtype, up to MESSAGE_BYTES or a single piece."""
    kind = {dtype: index for index, dtype in enumerate(dict.fromkeys(piece.window.dtype for _, piece in pieces))}
    ordered = sorted(pieces, key=lambda item: (item[1].window.rank, kind[item[1].window.dtype]))
    for (rank, _), group in groupby(ordered, key=lambda item: (item[1].window.rank, item[1].window.dtype)):
        message: list[tuple[str, _Piece]] = []
        num_bytes = 0
        for name, piece in group:
            if message and num_bytes + piece.num_bytes > MESSAGE_BYTES:
                yield rank, message
                message, num_bytes = [], 0
            message.append((name, piece))
            num_bytes += piece.num_bytes
        yield rank, message


def _elements(shards: Mapping[int, LocalShard], piece: _Piece) -> Tensor:
    """Return a piece of this rank's shard, with axes in Hugging Face's order."""
    window = piece.window
    shard = shards[window.shard]
    shape = tuple(1 if isinstance(at, int) else size for at, size in _axes(shard))
    part = _region(_region(shard.data.reshape(shape), window.local), piece.inside)
    return part.mT if piece.transposed else part


def _axes(shard: LocalShard) -> Iterator[tuple[int | slice, int]]:
    """Yield the region's entry and the number of indices, for each axis of the global tensor."""
    for at, size in zip(shard.where, shard.global_shape, strict=True):
        yield at, 1 if isinstance(at, int) else len(range(*at.indices(size)))


def _region(tensor: Tensor, where: Region) -> Tensor:
    return tensor[tuple(slice(*axis) for axis in where)]
