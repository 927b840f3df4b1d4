"""Weights of the live model as Hugging Face tensors, layer by layer: an export without files.

It uses the families' rules, like `convert`: the tensors are bit for bit equal to an export of this model.
"""

import itertools
import math
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mcore_rl.config.model import ModelConfig
from mcore_rl.errors import CheckpointError
from mcore_rl.families import weight_map
from mcore_rl.families.weight_map import (
    AxisRange,
    Copies,
    Region,
    WeightMap,
    copies_into_megatron,
    listed,
    sizes,
    whole,
)
from mcore_rl.megatron.agree import gathered_on, give_word, on_every_rank, on_rank_zero, wait_for_word
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
    """Tensors that this rank gathers by name, on the model's device; empty after the next bucket is requested."""

    @property
    def num_bytes(self) -> int:
        """Size of all tensors in bytes."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class _Held:
    """A shard as other ranks need to know it: everything but its memory."""

    key: str
    where: Region
    """Region of the global tensor."""
    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class _Piece:
    """A region of a shard, and the region of a Hugging Face tensor that equals it."""

    where: Region
    """Region of the Hugging Face tensor."""
    shard: int
    """Index of the shard among its rank's shards."""
    window: Region
    """Rows of the shard that are sent together, relative to the shard."""
    inside: Region
    """Region relative to the window."""
    dtype: torch.dtype
    transposed: bool

    @property
    def num_bytes(self) -> int:
        """Size of the piece in bytes."""
        return math.prod(sizes(self.where)) * self.dtype.itemsize


class WeightStream:
    """The weights of a model in memory as Hugging Face tensors, in buckets, as often as they are iterated: on one rank,
    or each tensor on a rank that has a part of it, so that experts are not sent.

    Which rank sends which part of which tensor is planned once, by all ranks together. A rank plans what it sends
    and receives itself, as both sides follow the same rules. The time of the plan grows with the number of tensors,
    layers x experts, and not with the world.

    Low-rank adapters are added to their weights, in fp32 and rounded once.

    A tied output is yielded as `lm_head.weight`, which exports omit: a server may have its own copy, which would
    otherwise not be updated. Layers for multi-token prediction are omitted, as by `convert export --mtp drop`: a server
    only uses them to propose tokens.
    """

    def __init__(self, chunks: Sequence[nn.Module], mesh: Mesh, model: ModelConfig, *, to_rank: int | None = 0) -> None:
        """Collective over the world: plan.

        Args:
            chunks: This rank's chunks of the model, wrapped or not.
            mesh: The model's mesh.
            model: The model's config.
            to_rank: World rank that gathers the tensors; None: each is gathered by the first rank that has a part of
                it, in a data-parallel copy of the model that its layer chooses.

        Raises:
            CheckpointError: on all ranks, if the modules do not have the tensors that the family's rules describe.
        """
        self._chunks, self._mesh, self._to_rank = chunks, mesh, to_rank
        self._key = on_rank_zero(lambda: secrets.token_hex(4))
        self._rank = rank = mesh.world.rank
        own = [_held(shard) for shard in self._shards()]
        weights = weight_map(model.model_copy(update={"mtp_layers": 0}))
        copies = copies_into_megatron(weights.blocks)
        told = gathered_on(to_rank or 0, own or None)
        if to_rank is None:
            told = on_rank_zero(partial(list, told))
        pieces = {rank: _pieces(copies, dict(enumerate(own)))}
        # Of other ranks' shards only those are looked at that may have parts of this rank's tensors.
        near = {
            (key, tuple(axis.start for axis in copy.into[: found.num_lead]))
            for key, found in copies.items()
            for copy in found
            if rank == to_rank or copy.source in pieces[rank]
        }
        for holder, shards in enumerate(told):
            if shards and holder != rank:
                held = {i: one for i, one in enumerate(shards) if not near.isdisjoint(_places(one, copies))}
                pieces[holder] = _pieces(copies, held)
        originals = {name: name for name in weights.hf_shapes} | {copy.name: copy.original for copy in weights.copies}
        self._buckets: dict[str, list[str]] = {}
        """Names of the tensors in each bucket."""
        self._pieces: dict[str, dict[int, list[_Piece]]] = {}
        """Pieces of each tensor by the rank that has them: all on the tensor's owner, its own on every other rank."""
        self._owner: dict[str, int] = {}
        """Rank that gathers each tensor of which this rank has a part."""
        by_tensor: dict[str, dict[int, list[_Piece]]] = {}
        for holder, of_holder in pieces.items():
            for original, found_pieces in of_holder.items():
                by_tensor.setdefault(original, {})[holder] = found_pieces
        for name, original in originals.items():
            self._buckets.setdefault(bucket_of(name), []).append(name)
            of_ranks = by_tensor.get(original, {})
            self._owner[name] = min(of_ranks, default=-1) if to_rank is None else to_rank
            self._pieces[name] = {r: found for r, found in of_ranks.items() if rank in (r, self._owner[name])}
        on_every_rank(lambda: _check(weights, self._pieces, {n for n in originals if self._owner[n] == rank}))
        self._shapes = {name: weights.hf_shapes[original] for name, original in originals.items()}
        counts = Counter(bucket_of(name) for name, owner in self._owner.items() if owner == rank)
        told_counts = gathered_on(0, dict(counts) or None)
        self.owners: dict[str, set[int]] = {
            bucket: {r for r, found in enumerate(told_counts) if bucket in (found or ())} for bucket in self._buckets
        }
        """Ranks that gather a part of each bucket; on rank 0 alone."""

        def refuse_missing() -> None:
            total = sum((Counter(found) for found in told_counts if found), Counter[str]())
            missing = [name for name, names in self._buckets.items() if rank == 0 and total[name] != len(names)]
            if missing:
                raise CheckpointError(f"no rank has all tensors of the model in memory: {listed(missing)}\n{RULES}")

        on_every_rank(refuse_missing)

    @property
    def largest_bytes(self) -> int:
        """Size of the largest bucket in bytes, on the rank that gathers it; at most that on others."""
        parts = ([*chain(*(chain(*self._pieces[name].values()) for name in names))] for names in self._buckets.values())
        return max(sum(piece.num_bytes for piece in of_bucket) for of_bucket in parts)

    def __iter__(self) -> Iterator[Bucket]:
        """Collective over the world: yield the buckets in the order of the family's rules, each with the tensors that
        this rank gathers, of which there may be none.

        All ranks must iterate over all buckets: a rank with part of a tensor waits until the tensor's owner requests
        that bucket, however long. No rank has more than one bucket in memory, plus two messages of MESSAGE_BYTES.
        """
        shards, rank = self._shards(), self._rank
        # Taken from a parameter, because only the first replica has shards.
        device = next(self._chunks[0].parameters()).device
        for bucket_name, names in self._buckets.items():
            sent: dict[int, list[tuple[str, _Piece]]] = {}
            received: dict[int, list[tuple[str, _Piece]]] = {}
            for name in names:
                for holder, pieces in self._pieces[name].items():
                    owner = self._owner[name]
                    peers, peer = (received, holder) if owner == rank else (sent, owner)
                    peers.setdefault(peer, []).extend((name, piece) for piece in pieces)
            own = [*received.get(rank, ()), *chain(*sent.values())]
            needed = sorted({piece.shard for _, piece in own})
            # Weights with adapters added are copies: make them only for the current bucket.
            at_hand = dict(zip(needed, merged_shards(self._chunks, [shards[index] for index in needed]), strict=True))
            owned = {n: next(iter(self._pieces[n].values()))[0].dtype for n in names if self._owner[n] == rank}
            tensors = {n: torch.empty(self._shapes[n], dtype=dtype, device=device) for n, dtype in owned.items()}
            # First what is sent, by rising rank: then no two ranks wait for each other.
            for owner in sorted(sent):
                wait_for_word(f"{self._key}/{bucket_name}/{owner}/{rank}")
                for message in _messages(sent[owner]):
                    self._send(owner, message, at_hand)
            for holder in sorted(received):
                if holder != rank:
                    give_word(f"{self._key}/{bucket_name}/{rank}/{holder}")
                for message in _messages(received[holder]):
                    self._receive(holder, message, at_hand, tensors, device)
            bucket = Bucket(bucket_name, tensors)
            yield bucket
            # The reader may still hold the bucket while it requests the next.
            bucket.tensors.clear()

    def _shards(self) -> list[LocalShard]:
        """Return this rank's shards, always in the same order; their memory may be another one after each step."""
        return [one for one in local_shards(self._chunks) if self._is_taken(one) and not one.key.startswith(MTP)]

    def _is_taken(self, shard: LocalShard) -> bool:
        """Return whether a shard is taken from this rank alone; where all gather, copies take turns by layer."""
        layer = shard.where[0] if shard.where else 0
        if self._to_rank is not None or not isinstance(layer, int):
            return shard.is_main
        copies = self._mesh.expert_dp if ".experts." in shard.key else self._mesh.dp_cp
        return shard.copy == layer % copies.size

    @torch.no_grad()
    def _send(self, owner: int, message: Sequence[tuple[str, _Piece]], shards: Mapping[int, LocalShard]) -> None:
        parts = [_elements(shards, piece).reshape(-1) for _, piece in message]
        # As bytes: not every backend sends every type.
        dist.send(torch.cat(parts).view(torch.uint8), owner, group=self._mesh.world.group)

    @torch.no_grad()
    def _receive(
        self,
        holder: int,
        message: Sequence[tuple[str, _Piece]],
        shards: Mapping[int, LocalShard],
        tensors: Mapping[str, Tensor],
        device: torch.device,
    ) -> None:
        """Bring pieces of one type from the shards of `holder`, which may be this rank, into the tensors."""
        if holder == self._rank:
            for name, piece in message:
                region = _region(tensors[name], piece.where)
                region.copy_(_elements(shards, piece).reshape(region.shape))
            return
        flat = torch.empty(sum(piece.num_bytes for _, piece in message), dtype=torch.uint8, device=device)
        dist.recv(flat, holder, group=self._mesh.world.group)
        start, values = 0, flat.view(message[0][1].dtype)
        for name, piece in message:
            region = _region(tensors[name], piece.where)
            region.copy_(values[start : start + region.numel()].view(region.shape))
            start += region.numel()


Views = list[tuple[str, Region, Tensor]]


def hf_views(chunks: Sequence[nn.Module], model: ModelConfig, ends: tuple[str, ...]) -> Callable[[], Views]:
    """Plan what this rank has of Hugging Face's tensors with these ends of names, in every copy of the model. Returns a
    function that returns names, regions, and views of the weights there.
    """
    copies = copies_into_megatron(weight_map(model.model_copy(update={"mtp_layers": 0})).blocks)
    held = {i: _held(one) for i, one in enumerate(local_shards(chunks)) if not one.key.startswith(MTP)}
    found = [(name, one) for name, pieces in _pieces(copies, held).items() if name.endswith(ends) for one in pieces]

    def views() -> Views:
        shards = dict(enumerate(local_shards(chunks)))
        return [(name, one.where, _elements(shards, one).view(sizes(one.where))) for name, one in found]

    return views


def bucket_of(name: str) -> str:
    """Return the name of a tensor's bucket. A server only accepts whole modules, so layers are never split."""
    if not name.startswith(LAYERS):
        return name
    return LAYERS + name.removeprefix(LAYERS).partition(".")[0] + "."


def _held(shard: LocalShard) -> _Held:
    return _Held(key=shard.key, where=shard.region, dtype=shard.data.dtype)


def _places(shard: _Held, copies: Mapping[str, Copies]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the layers, and experts, of Megatron's tensor that a shard has a part of."""
    lead = shard.where[: copies.get(shard.key, Copies()).num_lead]
    return ((shard.key, place) for place in itertools.product(*(range(axis.start, axis.stop) for axis in lead)))


def _pieces(copies: Mapping[str, Copies], shards: Mapping[int, _Held]) -> dict[str, list[_Piece]]:
    """Return the pieces of Hugging Face's tensors in shards, by their rank's index, by the tensors' names."""
    pieces: dict[str, list[_Piece]] = {}
    for index, shard in shards.items():
        for window in _windows(shard):
            there = tuple(
                AxisRange(axis.start + rows.start, axis.start + rows.stop)
                for axis, rows in zip(shard.where, window, strict=True)
            )
            for part in copies.get(shard.key, Copies()).within(there):
                piece = _Piece(
                    where=part.where,
                    shard=index,
                    window=window,
                    inside=part.into,
                    dtype=shard.dtype,
                    transposed=part.transposed,
                )
                pieces.setdefault(part.source, []).append(piece)
    return pieces


RULES = "This is a mistake in the family's rules, or in model.* of the config."


def _check(weights: WeightMap, pieces: Mapping[str, Mapping[int, Sequence[_Piece]]], owned: set[str]) -> None:
    """Raise CheckpointError unless the pieces make up every owned tensor, with a single dtype."""
    faults = []
    for name in weights.hf_shapes:
        shape, found = weights.hf_shapes[name], [*chain(*pieces[name].values())]
        count, dtypes = sum(math.prod(sizes(piece.where)) for piece in found), {str(piece.dtype) for piece in found}
        if name in owned and count != math.prod(shape):
            faults.append(f"{name} {shape}: the ranks have {count} of its {math.prod(shape)} elements")
        elif name in owned and len(dtypes) > 1:
            faults.append(f"{name} is in memory in several types: {', '.join(sorted(dtypes))}")
    if faults:
        raise CheckpointError(
            f"the model in memory is not the one that its family's rules describe:\n{listed(faults)}\n{RULES}"
        )


def _windows(shard: _Held) -> Iterator[Region]:
    """Yield regions of a shard, relative to it, of at most MESSAGE_BYTES each."""
    shape, bytes_of_row = sizes(shard.where), shard.dtype.itemsize
    axis = len(shape) - 1
    while axis and bytes_of_row * shape[axis] <= MESSAGE_BYTES:
        bytes_of_row *= shape[axis]
        axis -= 1
    # `axis` is split into runs of rows, and the axes before it into single indices.
    step = max(1, MESSAGE_BYTES // bytes_of_row)
    for front in itertools.product(*(range(size) for size in shape[:axis])):
        for start in range(0, shape[axis], step):
            rows = AxisRange(start, min(start + step, shape[axis]))
            yield (*(AxisRange(i, i + 1) for i in front), rows, *whole(shape[axis + 1 :]))


def _messages(pieces: Sequence[tuple[str, _Piece]]) -> Iterator[list[tuple[str, _Piece]]]:
    """Yield the messages of a rank: pieces of one dtype, up to MESSAGE_BYTES or a single piece."""
    # Sender and receiver plan apart: the order of types must not depend on other ranks' pieces.
    for _, group in groupby(sorted(pieces, key=lambda item: str(item[1].dtype)), key=lambda item: item[1].dtype):
        message: list[tuple[str, _Piece]] = []
        num_bytes = 0
        for name, piece in group:
            if message and num_bytes + piece.num_bytes > MESSAGE_BYTES:
                yield message
                message, num_bytes = [], 0
            message.append((name, piece))
            num_bytes += piece.num_bytes
        yield message


def _elements(shards: Mapping[int, LocalShard], piece: _Piece) -> Tensor:
    """Return a piece of this rank's shard, with axes in Hugging Face's order."""
    shard = shards[piece.shard]
    part = _region(_region(shard.data.reshape(sizes(shard.region)), piece.window), piece.inside)
    return part.mT if piece.transposed else part


def _region(tensor: Tensor, where: Region) -> Tensor:
    return tensor[tuple(slice(*axis) for axis in where)]
