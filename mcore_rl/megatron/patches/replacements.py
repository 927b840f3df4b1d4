"""Replacements of parts of torch and Megatron: each is a function of the original, named in table.toml."""

import dataclasses
import functools
import importlib
import io
import itertools
import math
import queue
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint._traverse import set_element

from mcore_rl.errors import CheckpointError
from mcore_rl.storage import foreign
from mcore_rl.storage.checkpoint import COMMON

FindOverlap = Callable[[Sequence[Any], Sequence[int]], tuple[int, int] | None]


def find_overlap_on_grid(find_overlap: FindOverlap) -> FindOverlap:
    """Return the indices of two shards that overlap. On a grid these have the same offset; else torch searches."""

    def find(shards: Sequence[Any], sharded_dims: Sequence[int]) -> tuple[int, int] | None:
        places = [tuple(shard.shard_offsets) for shard in shards]
        if not _is_grid(places, [tuple(shard.shard_sizes) for shard in shards]):
            return find_overlap(shards, sharded_dims)
        if len(set(places)) == len(places):
            return None
        first: dict[tuple[int, ...], int] = {}
        return next((first[place], i) for i, place in enumerate(places) if first.setdefault(place, i) != i)

    return find


def validate_plan_on_grid(validate: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return torch's check of a save's plan without the tensors that are whole grids."""

    def check(global_plan: Any, metadata: Any) -> Any:
        entries = metadata.state_dict_metadata
        rest = {name: entry for name, entry in entries.items() if not _is_whole(entry)}
        return validate(global_plan, dataclasses.replace(metadata, state_dict_metadata=rest))

    return check


def read_items_on_grid(create: Callable[[str, Any, Sequence[Any]], list[Any]]) -> Callable[..., list[Any]]:
    """Return torch's plan of reads, which compares each chunk with all stored ones, with nearby ones alone."""

    def items(fqn: str, stored: Any, local_chunks: Sequence[Any]) -> list[Any]:
        places = [tuple(chunk.offsets) for chunk in stored.chunks]
        at = {place: index for index, place in enumerate(places)}
        if len(at) != len(places) or not places or not _is_grid(places, [tuple(c.sizes) for c in stored.chunks]):
            return create(fqn, stored, local_chunks)
        found, size = [], tuple(stored.chunks[0].sizes)
        for index, chunk in enumerate(local_chunks):
            axes = zip(chunk.offsets, chunk.sizes, size, strict=True)
            cells = itertools.product(*(range(start - start % n, start + length, n) for start, length, n in axes))
            near = [at[cell] for cell in cells if cell in at]
            for item in create(fqn, replace(stored, chunks=[stored.chunks[place] for place in near]), [chunk]):
                source, target = item.storage_index, replace(item.dest_index, index=index)
                found.append(replace(item, dest_index=target, storage_index=replace(source, index=near[source.index])))
        return found

    return items


def shards_to_least_busy(_: Any) -> Callable[..., dict[Any, int]]:
    """Return Megatron's choice of the rank that saves or loads each shard, in a time linear in the copies."""

    def distribute(
        shard_to_ranks: Mapping[Any, Sequence[int]],
        shard_to_size: Mapping[Any, int],
        num_ranks: int,
        last: Collection[Any] = (),
    ) -> dict[Any, int]:
        busy = [0] * num_ranks
        chosen: dict[Any, int] = {}
        for shard in sorted(
            shard_to_ranks, key=lambda one: (one in last, len(shard_to_ranks[one]), -shard_to_size[one], one)
        ):
            rank = chosen[shard] = min(shard_to_ranks[shard], key=lambda rank: (busy[rank], rank))
            busy[rank] += shard_to_size[shard]
        return chosen

    return distribute


def _is_whole(entry: Any) -> bool:
    """Return whether the chunks of a stored tensor are a grid that fills it, each offset once."""
    chunks = getattr(entry, "chunks", None)
    if not chunks:
        return False
    places = [tuple(chunk.offsets) for chunk in chunks]
    size = tuple(chunks[0].sizes)
    return (
        _is_grid(places, [tuple(chunk.sizes) for chunk in chunks])
        and all(offset + n <= end for place in places for offset, n, end in zip(place, size, entry.size, strict=True))
        and len(set(places)) == len(places)
        and len(places) * math.prod(size) == math.prod(entry.size)
    )


def _is_grid(places: Sequence[tuple[int, ...]], sizes: Sequence[tuple[int, ...]]) -> bool:
    size = sizes[0]
    if 0 in size or any(other != size for other in sizes):
        return False
    return not any(offset % n for place in places for offset, n in zip(place, size, strict=True))


STATES = ("param", "exp_avg", "exp_avg_sq")


def state_by_parameter(
    self: Any, model_sharded_state_dict: dict[str, Any], is_loading: bool = False, metadata: Any = None
) -> dict[int, dict[str, Any]]:
    """Collective over the optimizer's data-parallel ranks: Megatron's `sharded_param_state_fully_reshardable`.

    The main weight and moments of each of this rank's parameters, in the order of its buffers, sharded as the parameter
    is. State that is shared with other ranks is gathered on every rank's host, so that any can write a part.
    """
    # Not at the top: this module is imported by the one that must run before Megatron is.
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories

    leaves = nested_values(extract_sharded_tensors_and_factories(model_sharded_state_dict)[0])
    shards = {leaf.data: leaf for leaf in leaves}
    return {
        index: {name: _sharded_like(shards[param], name, state) for name, state in states.items()}
        for index, (param, states) in enumerate(_whole_states(self, is_loading))
    }


def _whole_states(optimizer: Any, is_loading: bool) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """Yield each parameter with its whole state, flat; when loading, with room for it."""
    is_shared = optimizer.data_parallel_group.size() > 1
    for buffer, ranges in zip(optimizer.buffers, optimizer.gbuf_ranges, strict=True):
        (buckets,) = ranges.values()
        gathered = []
        if is_shared and not is_loading:
            gathered = [_gathered(optimizer, bucket, own) for bucket, own in zip(buffer.buckets, buckets, strict=True)]
        for param, (start, end, index) in buffer.param_index_map.items():
            if not is_shared:
                own = optimizer._get_main_param_and_optimizer_states(param)
                yield param, {name: own[name].detach() for name in STATES}
            elif is_loading:
                yield param, {name: torch.empty(end - start, dtype=torch.float32, device="cpu") for name in STATES}
            else:
                # Counted from the bucket's start: Megatron counts from the buffer's start without the padding between
                # buckets, and so saves a neighbour's values for a parameter.
                offset = buffer.buckets[index].offset
                yield param, {name: gathered[index][name][start - offset : end - offset] for name in STATES}


def _gathered(optimizer: Any, bucket: Any, own: dict[str, Any]) -> dict[str, Tensor]:
    """Collective over the optimizer's data-parallel ranks: return the states of a bucket's parameters, on the host."""
    group = optimizer.data_parallel_group
    whole = torch.empty(bucket.grad_data.numel(), dtype=torch.float32, device=bucket.grad_data.device)
    states = {}
    for name in STATES:
        shard = torch.zeros(whole.numel() // group.size(), dtype=torch.float32, device=whole.device)
        for param, where in own["param_map"].items():
            local = where["gbuf_local"]
            shard[local.start : local.end].copy_(optimizer._get_main_param_and_optimizer_states(param)[name].detach())
        dist.all_gather_into_tensor(whole, shard, group=group)
        states[name] = whole.to("cpu", copy=True)
    return states


def _sharded_like(shard: Any, name: str, state: Tensor) -> Any:
    """Return `state` as a shard of its own tensor; a factory (for weights stored in parts) takes its dtype."""
    changes: dict[str, Any] = {"key": f"optimizer.state.{name}.{shard.key}", "data": state.reshape(shard.data.shape)}
    if hasattr(shard, "dtype"):
        changes["dtype"] = state.dtype
    return replace(shard, **changes)


def weights_count_as_on_device(_: Any) -> Callable[..., Any]:
    """Return a `HybridDeviceOptimizer._get_sub_optimizer_param_groups` for weights that are not on a CUDA device.

    As on a GPU, the first weights up to the fraction are offloaded, and every weight has an fp32 copy.
    """

    def sub_groups(self: Any, offload_fraction: float) -> tuple[Any, ...]:
        total = sum(weight.numel() for group in self.param_groups for weight in group["params"])
        offloaded = 0
        host_groups, device_groups = [], []
        host_copy_of: dict[Tensor, Tensor] = {}
        fp32_of: dict[Tensor, Tensor] = {}
        for group in self.param_groups:
            on_host, on_device = {**group, "params": []}, {**group, "params": []}
            for weight in group["params"]:
                is_offloaded = offloaded < total * offload_fraction
                copy = weight.detach().clone().float()  # without clone an fp32 weight would be its own copy
                fp32_of[weight] = copy
                if is_offloaded:
                    offloaded += weight.numel()
                    host_copy_of[weight] = copy
                (on_host if is_offloaded else on_device)["params"].append(copy)
            host_groups += [on_host] if on_host["params"] else []
            device_groups += [on_device] if on_device["params"] else []
        weight_of = {copy: weight for weight, copy in host_copy_of.items()}
        return host_groups, device_groups, host_copy_of, weight_of, fp32_of

    return sub_groups


def without_fp8(init: Callable[..., None]) -> Callable[..., None]:
    """`CheckpointWithoutOutput.__init__` that treats a false `fp8` as None."""

    def __init__(self: Any, fp8: Any = None, *args: Any, **kwargs: Any) -> None:
        init(self, fp8 or None, *args, **kwargs)

    return __init__


def copied_storage(_: Any) -> Callable[[], Callable[[torch.Tensor, torch.Tensor], None]]:
    """`_get_share_storage` that gives the tensors a copy of the storage."""

    def share_storage(target: torch.Tensor, source: torch.Tensor) -> None:
        with torch.no_grad():
            target.untyped_storage().resize_(source.untyped_storage().size())
            target.untyped_storage().copy_(source.untyped_storage())

    return lambda: share_storage


def direct_queries_unnormed(fused_or_default: Callable[..., Any]) -> Callable[..., Any]:
    """The resolver of norms before projections, for which directly projected queries have none."""

    @functools.wraps(fused_or_default)
    def wrapped(self: Any, module: Any, name: str) -> Any:
        return module if name == "linear_q_proj" else fused_or_default(self, module, name)

    return wrapped


def own_gates(tensors: Callable[..., Any]) -> Callable[..., Any]:
    """`SelfAttention.get_query_key_value_tensors` with the gates of this rank's queries."""

    @functools.wraps(tensors)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = tensors(self, *args, **kwargs)
        sharing = self.world_size // self.config.num_query_groups
        if sharing <= 1 or len(found) != 4:
            return found
        query, key, value, gate = found
        return query, key, value, gate.chunk(sharing, 2)[self.pg_collection.tp.rank() % sharing]

    return wrapped


def only_tensors_saved(checkpointed_forward: Callable[..., Any]) -> Callable[..., Any]:
    """`MultiTokenPredictionLayer._checkpointed_forward` that saves only tensors, and passes the rest on unchanged."""

    def wrapped(self: Any, forward: Callable[..., Any], **inputs: Any) -> Any:
        saved = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}
        others = {name: value for name, value in inputs.items() if name not in saved}

        def of_saved(*tensors: torch.Tensor) -> Any:
            return forward(**dict(zip(saved, tensors, strict=True)), **others)

        return checkpointed_forward(self, of_saved, *saved.values())

    return wrapped


def part_of_head_turned(init: Callable[..., None]) -> Callable[..., None]:
    """`YarnRotaryEmbedding.__init__` that makes the wavelengths of the turned part of a head only."""

    @functools.wraps(init)
    def wrapped(self: Any, kv_channels: int, rotary_percent: float = 1.0, *args: Any, **options: Any) -> None:
        init(self, int(kv_channels * rotary_percent), 1.0, *args, **options)

    return wrapped


def permuted_without_waiting(permute: Callable[..., Any]) -> Callable[..., Any]:
    """`permute` with Megatron's rows and order, found by sorting: a mask's true values are counted on the host."""

    @functools.wraps(permute)
    def wrapped(
        tokens: torch.Tensor,
        routing_map: torch.Tensor,
        probs: torch.Tensor | None = None,
        num_out_tokens: Any = None,
        fused: bool = False,
        drop_and_pad: bool = False,
    ) -> Any:
        if fused or drop_and_pad or num_out_tokens is None:
            return permute(tokens, routing_map, probs, num_out_tokens, fused, drop_and_pad)
        by_expert = routing_map.bool().T.reshape(-1)
        # A stable sort leaves the true values in their order: by expert, then by token.
        chosen_N = by_expert.argsort(descending=True, stable=True)[:num_out_tokens]
        token_N = chosen_N % len(tokens)
        gates_N = None if probs is None else probs.T.reshape(-1)[chosen_N]
        return tokens.index_select(0, token_N), gates_N, token_N

    return wrapped


def rotated_without_waiting(rotate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`_apply_rotary_pos_emb_thd` that finds packed tokens' positions on the device, and rotates the row at once."""

    @functools.wraps(rotate)
    def wrapped(
        t: torch.Tensor, cu_seqlens: torch.Tensor, freqs: torch.Tensor, *args: Any, **options: Any
    ) -> torch.Tensor:
        if args:
            return rotate(t, cu_seqlens, freqs, *args, **options)
        group = options.pop("cp_group")
        position_t = packed_positions(cu_seqlens, len(t), group.rank(), group.size(), len(freqs))
        embeddings = importlib.import_module("megatron.core.models.common.embeddings.rope_utils")
        rotated: torch.Tensor = embeddings._apply_rotary_pos_emb_bshd(t.unsqueeze(1), freqs[position_t], **options)
        return rotated.squeeze(1)

    return wrapped


def packed_positions(
    cu_seqlens: torch.Tensor, num_tokens: int, rank: int, ranks: int, table_length: int
) -> torch.Tensor:
    """Return the row of Megatron's table of angles for each of a context-parallel rank's packed tokens, `[t]`.

    `cu_seqlens` are cumulative over all ranks, `num_tokens * ranks` in sum; a rank has of each sequence the chunks
    `rank` and `2 * ranks - 1 - rank`. A table as long as all sequences together counts through them.
    """
    index_t = torch.arange(num_tokens, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    sequence_t = torch.searchsorted(cu_seqlens[1:] // ranks, index_t, right=True)
    begin_t = cu_seqlens[sequence_t]
    position_t = index_t - begin_t // ranks
    if ranks > 1:
        chunk_t = (cu_seqlens[sequence_t + 1] - begin_t) // (2 * ranks)
        skipped_t = torch.where(position_t < chunk_t, rank, 2 * ranks - 2 - rank) * chunk_t
        position_t = position_t + skipped_t
    return position_t + begin_t if table_length == num_tokens * ranks else position_t


def scaled_in_place(scale_tensors: Callable[..., None]) -> Callable[..., None]:
    """`local_multi_tensor_scale`, which makes a copy of every gradient that it clips."""

    def scale(
        chunk_size: int, noop_flag: torch.Tensor, tensor_lists: Sequence[list[torch.Tensor]], factor: float
    ) -> None:
        sources, targets = tensor_lists
        if all(source is target for source, target in zip(sources, targets, strict=True)):
            torch._foreach_mul_(targets, factor)
        else:
            scale_tensors(chunk_size, noop_flag, tensor_lists, factor)

    return scale


WITH_OBJECTS = ("TENSOR_MODEL_PARALLEL_GROUP", "PIPELINE_MODEL_PARALLEL_GROUP", "DATA_PARALLEL_GROUP_WITH_CP")
"""Megatron's names of the groups through which objects travel, from host to host."""


def without_hosts(create_group: Callable[..., Any]) -> Callable[..., Any]:
    """`create_group` whose groups on GPUs have NCCL alone, except those of WITH_OBJECTS, which connect hosts too."""

    @functools.wraps(create_group)
    def create(*args: Any, backend: str | None = None, group_desc: str | None = None, **options: Any) -> Any:
        if backend is None and group_desc not in WITH_OBJECTS and torch.cuda.is_available():
            backend = "nccl"
        return create_group(*args, backend=backend, group_desc=group_desc, **options)

    return create


def unless_alone(collective: Callable[..., Any]) -> Callable[..., Any]:
    """`all_gather_into_tensor` or `reduce_scatter_tensor` that skips gloo's copies in a group of a single rank."""

    @functools.wraps(collective)
    def call(output: torch.Tensor, input: torch.Tensor, *, group: Any = None, **options: Any) -> Any:
        if dist.get_world_size(group) > 1:
            return collective(output, input, group=group, **options)
        if output.data_ptr() != input.data_ptr():
            output.copy_(input)
        return None

    return call


def load_entry(self: Any, read_item: Any, value: io.BytesIO) -> None:
    """`DefaultLoadPlanner.load_bytes` for an object; CheckpointError, with key and file, if it asks for a program."""
    name = read_item.dest_index.fqn
    stored = self.metadata.storage_data if self.metadata is not None else {}
    info = (stored or {}).get(read_item.storage_index)
    what = f"{name} in {info.relative_path}" if info is not None else name
    loaded = foreign.load_saved(value.getvalue(), what)
    if "_extra_state" in name:
        foreign.refuse_programs_inside(loaded, what)
    if self.flatten_state_dict:
        set_element(self.original_state_dict, self.mappings[name], loaded)
    else:
        self.state_dict[name] = loaded


def restricted_pickle(module: Any) -> Any:
    """Return the part of `pickle` that torch's reader and writer of `.metadata` use; its load runs no programs."""
    theirs = {
        place: getattr(importlib.import_module(place[0]), place[1])
        for place in foreign.METADATA
        if foreign.TORCHS in place[0]
    }
    allowed = foreign.METADATA | theirs | {foreign.MCORE_METADATA: metadata.Metadata}

    def load(file: Any) -> Any:
        try:
            return foreign.AllowListUnpickler(file, allowed).load()
        except CheckpointError as error:
            raise CheckpointError(f"{file.name}: {error}.") from None

    return SimpleNamespace(**vars(module) | {"load": load})


def queue_within_process(_: Any) -> queue.SimpleQueue[Any]:
    """Return a queue in the place of the one through which another process hands over results."""
    return queue.SimpleQueue()


def load_common_method(load: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """`TorchCommonLoadStrategy.load_common` of 0.16; a missing file is left to Megatron, which names it."""
    return lambda self, folder: _load_common(folder, lambda: load(self, folder))


def load_common_function(load: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`load_common` of 0.19; a missing file is left to Megatron, which names it."""
    return lambda checkpoint_dir: _load_common(checkpoint_dir, lambda: load(checkpoint_dir))


def _load_common(folder: Any, otherwise: Callable[[], Any]) -> Any:
    file = Path(folder) / COMMON
    return foreign.load_saved(file.read_bytes(), str(file), "cpu") if file.is_file() else otherwise()
