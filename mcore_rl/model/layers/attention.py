"""Core attention without TransformerEngine, for Megatron's self-attention and latent attention."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeVar

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from megatron.core.utils import divide
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention

from mcore_rl.megatron import batch_invariant
from mcore_rl.megatron.kernels import Bounds, attend_packed, has_kernel, kernel_takes
from mcore_rl.megatron.mesh import layer_groups
from mcore_rl.megatron.platform import to_device
from mcore_rl.model.layers.cache import NO_TOKENS, StepTokens
from mcore_rl.model.layers.linear import sharded_weights

T = TypeVar("T")
SHORT = 64
"""Sequences up to this length are padded to a multiple of WIDTH_MULTIPLE, so that more of them share a batch."""
WIDTH_MULTIPLE = 8
"""The widths of batches of short sequences are multiples of this."""
FUSED_MULTIPLE = 8
"""torch's fused kernels accept head widths that are multiples of this."""


@dataclass(frozen=True, slots=True)
class SideBySide:
    """Batches of rows, a sequence each, padded by repeating its last position, which causal attention ignores."""

    shapes: tuple[tuple[int, int], ...]
    """Number of rows and width of each batch."""
    positions_N: Tensor
    """Index in the packed row of each position of the concatenated batches."""
    back_T: Tensor
    """Index in the batches of each position of the packed row."""


@dataclass(frozen=True, slots=True)
class RankChunks:
    """The two chunks of every sequence that a context-parallel rank computes, with the keys up to their ends."""

    queries: Bounds
    """Bounds of the chunks in this rank's queries."""
    keys: Bounds
    """Bounds of each chunk's keys."""
    order_U: Tensor
    """Index of each of these keys in the concatenated parts of the ranks; U is (2 * ranks + 1) / (2 * ranks) times the
    length of the row."""


@dataclass
class PackedParams(PackedSeqParams):
    """Megatron's description of a packed row, plus its lengths on the host, where reading them does not synchronize."""

    lengths: tuple[int, ...] = ()
    """Number of positions of each sequence, including padding, over all context-parallel ranks."""
    _computed: dict[tuple[Any, ...], Any] = field(default_factory=dict, repr=False)

    def once(self, compute: Callable[..., T], *arguments: Any) -> T:
        """Return `compute(self.lengths, *arguments)`, computed once for all layers."""
        key = (compute, *arguments)
        if key not in self._computed:
            self._computed[key] = compute(self.lengths, *arguments)
        found: T = self._computed[key]
        return found


def packed_params(lengths: tuple[int, ...], device: torch.device) -> PackedParams:
    """Return the description of a row of sequences with these lengths."""
    packed = PackedParams(qkv_format="thd", lengths=lengths)
    cumulative, longest = packed.once(bounds_of, device)
    packed.cu_seqlens_q = packed.cu_seqlens_kv = cumulative
    packed.max_seqlen_q = packed.max_seqlen_kv = longest
    return packed


def bounds_of(lengths: tuple[int, ...], device: torch.device) -> Bounds:
    """Return the bounds of sequences of these lengths."""
    cumulative = torch.tensor((0, *lengths), dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return Bounds(to_device(cumulative, device), max(lengths))


@lru_cache(8)
def order_on(lengths: tuple[int, ...], ranks: int, device: torch.device) -> Tensor:
    """Return `gathered_order(lengths, ranks)` on a device; it is cached, as all layers of a pass share it."""
    return to_device(gathered_order(lengths, ranks), device)


def gathered_order(lengths: tuple[int, ...], ranks: int) -> Tensor:
    """Return each position's index in the ranks' parts: rank r has chunks r and 2 * ranks - 1 - r."""
    tokens_of_rank = sum(lengths) // ranks
    parts, begin = [], 0
    for length in lengths:
        chunk = length // (2 * ranks)
        first = torch.arange(ranks)[:, None] * tokens_of_rank + begin + torch.arange(chunk)
        # The second chunks are in reverse order of the ranks.
        parts += [first.flatten(), (first + chunk).flip(0).flatten()]
        begin += 2 * chunk
    return torch.cat(parts)


def rank_chunks(lengths: tuple[int, ...], rank: int, ranks: int, device: torch.device) -> RankChunks:
    """Return the chunks of a context-parallel rank, `rank` and then `2 * ranks - 1 - rank` of each sequence."""
    order_T = gathered_order(lengths, ranks)
    sizes: list[int] = []
    ends: list[int] = []
    parts, begin = [], 0
    for length in lengths:
        size = length // (2 * ranks)
        of_chunks = (rank + 1) * size, (2 * ranks - rank) * size
        sizes += [size, size]
        ends += of_chunks
        parts += [order_T[begin : begin + end] for end in of_chunks]
        begin += length
    queries, keys = (
        Bounds(to_device(torch.tensor((0, *counts)).cumsum(0).to(torch.int32), device), max(counts))
        for counts in (sizes, ends)
    )
    return RankChunks(queries, keys, to_device(torch.cat(parts), device))


def side_by_side(lengths: tuple[int, ...], device: torch.device) -> SideBySide | None:
    """Return the sequences in fewer batches than there are sequences; None if no two have the same width."""
    members: dict[int, list[int]] = {}
    for index, length in enumerate(lengths):
        width = -(-length // WIDTH_MULTIPLE) * WIDTH_MULTIPLE if length <= SHORT else length
        members.setdefault(width, []).append(index)
    if len(members) == len(lengths):
        return None
    lengths_R = torch.tensor(lengths)
    begins_R = lengths_R.cumsum(0) - lengths_R
    parts, back_T, begin = [], torch.empty(sum(lengths), dtype=torch.int64), 0
    for width, sequences in members.items():
        inside_W = torch.arange(width)
        positions_BW = begins_R[sequences, None] + torch.minimum(inside_W, lengths_R[sequences, None] - 1)
        is_real_BW = inside_W < lengths_R[sequences, None]
        back_T[positions_BW[is_real_BW]] = begin + is_real_BW.flatten().nonzero().flatten()
        parts.append(positions_BW.flatten())
        begin += positions_BW.numel()
    shapes = tuple((len(sequences), width) for width, sequences in members.items())
    positions_N = to_device(torch.cat(parts), device)
    return SideBySide(shapes, positions_N, to_device(back_T, device))


@dataclass(slots=True)
class KeyValueCache:
    """The native engine's cache of earlier positions."""

    keys: Tensor
    """Keys `[slots, S, G, D]` of G groups."""
    values: Tensor
    """Values `[slots, S, G, Dv]`."""
    step: StepTokens = NO_TOKENS
    """Tokens that the layer is computing."""

    def copy(self, source: int, targets: slice, length: int) -> None:
        """Copy the first `length` positions of the slot `source` to the slots `targets`."""
        self.keys[targets, :length] = self.keys[source, :length]
        self.values[targets, :length] = self.values[source, :length]


class SDPAttention(MegatronModule):
    """Attention by torch's `scaled_dot_product_attention`, and on a GPU by its kernel for packed sequences.

    Supports grouped queries, values with a different width than keys, dropout, sliding windows, sinks (Megatron's
    learnable softmax) and packed sequences. With context parallelism keys and values are gathered, and each rank
    computes its two chunks of each sequence.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        softmax_scale: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__(config=config)
        groups = options.get("pg_collection")
        if groups is None:
            groups = layer_groups("tp", "cp")
        self.tp_group, self.cp_group = groups.tp, groups.cp
        self.softmax_offset = self._sinks() if config.softmax_type == "learnable" else None
        width = options.get("k_channels") or config.kv_channels
        self.scale = 1.0 / math.sqrt(width) if softmax_scale is None else softmax_scale
        dropout = options.get("attention_dropout")
        self.dropout = config.attention_dropout if dropout is None else dropout
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, max(1, layer_number))
        self.window: int | None = config.window_size[0] if windowed else None
        self._is_invariant = batch_invariant.is_on()
        self._has_packed_kernel = has_kernel()
        self.cache: KeyValueCache | None = None
        """Cache of earlier positions, set only while generating."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> Tensor:
        """Return the output `[s, B, N * Dv]` of `query` `[s, B, N, D]`, `key` `[s, B, G, D]` and `value` `[s, B, G,
        Dv]`, where G divides N; packed sequences (`packed_seq_params`) have no axis B. Attention is causal; the mask is
        None.
        """
        assert attention_mask is None, "attention is causal"
        if self.cache is not None:
            return self._cached(query, key, value, self.cache)
        packed = options.get("packed_seq_params")
        if packed is not None:
            return self._packed(query, key, value, packed)
        ranks = self.cp_group.size()
        if ranks == 1:
            return self._prefix(query, key, value).flatten(2)
        key, value = self._gathered(key, value, order_on((query.shape[0] * ranks,), ranks, key.device))
        return torch.cat([self._prefix(*part) for part in self._chunks(query, key, value)]).flatten(2)

    def new_cache(self, keys: Tensor, values: Tensor) -> KeyValueCache:
        """Return a cache of these tensors."""
        return KeyValueCache(keys, values)

    def _cached(self, query: Tensor, key: Tensor, value: Tensor, cache: KeyValueCache) -> Tensor:
        """Return the output `[T, 1, N * Dv]`: each token attends to its slot up to its own position; padding is 0."""
        step, num_decode = cache.step, cache.step.num_decode
        where = step.slots_T, step.positions_T
        cache.keys[where], cache.values[where] = key[:, 0], value[:, 0]
        mixed = query.new_zeros(*query.shape[:3], value.shape[3])
        if num_decode:
            mixed[:num_decode, 0] = self._newest(query[:num_decode, 0], cache)
        for begin, end, slot, stop in step.spans:
            keys, values = cache.keys[slot, :stop, None], cache.values[slot, :stop, None]
            mixed[begin:end] = self._prefix(query[begin:end], keys, values)
        return mixed.flatten(2)

    def _newest(self, query_BND: Tensor, cache: KeyValueCache) -> Tensor:
        """Return the output `[B, N, Dv]` for the query of each decoding slot, over its visible keys."""
        longest, visible = cache.step.longest, visible_keys(cache.step, self.window)
        key, value = (kv[: len(query_BND), :longest].transpose(0, 1) for kv in (cache.keys, cache.values))
        if self._is_invariant:
            return self._invariant(query_BND[None], key, value, visible)[0]
        if self.softmax_offset is not None:
            return self._attend(query_BND[None], key, value, visible)[0]
        # Pass heads that share a key as positions, so that no key or value is repeated.
        rows, heads, width = query_BND.shape
        groups = key.shape[2]
        query = query_BND.view(rows, groups, heads // groups, width).permute(2, 0, 1, 3)
        return self._attend(query, key, value, visible).permute(1, 2, 0, 3).reshape(rows, heads, -1)

    def _packed(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedParams) -> Tensor:
        ranks, lengths = self.cp_group.size(), packed.lengths
        if (at_once := self._at_once(query, key, value, packed)) is not None:
            return at_once
        if ranks > 1:
            key, value = self._gathered(key, value, order_on(lengths, ranks, key.device))
        elif batches := packed.once(side_by_side, key.device):
            return self._side_by_side(query, key, value, batches)
        parts = zip(
            query.split([length // ranks for length in lengths]), key.split(lengths), value.split(lengths), strict=True
        )
        mixed = []
        for one_query, one_key, one_value in parts:
            rows = one_query[:, None], one_key[:, None], one_value[:, None]
            chunks = self._chunks(*rows) if ranks > 1 else [rows]
            mixed += [self._prefix(*chunk) for chunk in chunks]
        return torch.cat(mixed).flatten(1)

    def _at_once(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedParams) -> Tensor | None:
        """Collective over the context-parallel group: return the output by one kernel; None, on all, without."""
        rank, ranks = self.cp_group.rank(), self.cp_group.size()
        has_dropout = self.dropout > 0.0 and self.training
        if has_dropout or self._is_invariant or not self._has_packed_kernel:
            return None
        if not kernel_takes(query, value.shape[-1]):
            return None
        bounds, key_bounds = packed.once(bounds_of, query.device), None
        if ranks > 1:
            chunks = packed.once(rank_chunks, rank, ranks, query.device)
            bounds, key_bounds = chunks.queries, chunks.keys
            key, value = self._gathered(key, value, chunks.order_U)
        mixed = attend_packed(
            query, key, value, bounds, self.scale, self.window, key_bounds=key_bounds, sinks_N=self.softmax_offset
        )
        return mixed.flatten(1)

    def _side_by_side(self, query: Tensor, key: Tensor, value: Tensor, batches: SideBySide) -> Tensor:
        """Return the output of all sequences, computed in few batches: a call per short sequence would cost more."""
        sizes = [rows * width for rows, width in batches.shapes]
        parts = [heads.index_select(0, batches.positions_N).split(sizes) for heads in (query, key, value)]
        mixed = []
        for shape, *of_batch in zip(batches.shapes, *parts, strict=True):
            rows = [part.unflatten(0, shape).transpose(0, 1) for part in of_batch]
            mixed.append(self._prefix(*rows).transpose(0, 1).flatten(0, 1))
        return torch.cat(mixed).index_select(0, batches.back_T).flatten(1)

    def _gathered(self, key: Tensor, value: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
        """Collective over the context-parallel group: return keys and values of all ranks' positions in this order."""
        # A single collective for both.
        both = gather_from_sequence_parallel_region(torch.cat([key, value], -1), group=self.cp_group)
        ordered_key, ordered_value = both.index_select(0, order).split([key.shape[-1], value.shape[-1]], -1)
        return ordered_key, ordered_value

    def _chunks(self, query: Tensor, key: Tensor, value: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Return this rank's two chunks of a sequence, each with the keys and values up to its end."""
        rank, ranks = self.cp_group.rank(), self.cp_group.size()
        first, second = query.chunk(2)
        # Rank r holds chunks r and 2 * ranks - 1 - r.
        ends = (rank + 1) * first.shape[0], (2 * ranks - rank) * first.shape[0]
        return [(part, key[:end], value[:end]) for part, end in zip((first, second), ends, strict=True)]

    def _prefix(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return causal attention; the queries are at the last positions of the keys."""
        is_plain = self.window is None and self.softmax_offset is None
        if self._is_invariant:
            return self._invariant(query, key, value, self._visible(query, key))
        if query.shape[0] == key.shape[0] and is_plain:
            return self._attend(query, key, value, None, is_causal=True)
        return self._attend(query, key, value, self._visible(query, key))

    def _invariant(self, query: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> Tensor:
        """Return the output of batch-invariant attention: a query's result depends only on its visible keys."""
        assert self.softmax_offset is None and (self.dropout == 0.0 or not self.training), "checks refuse these"
        return batch_invariant.attention(query, key, value, visible, self.scale)

    def _visible(self, query: Tensor, key: Tensor) -> Tensor:
        """Return a mask, True where a key is not after its query and is inside the window."""
        length = key.shape[0]
        positions = torch.arange(length, device=key.device)
        distance = positions[length - query.shape[0] :, None] - positions
        return (distance >= 0) if self.window is None else (distance >= 0) & (distance <= self.window)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, is_causal: bool = False
    ) -> Tensor:
        if self.softmax_offset is not None:
            scores_N = self.softmax_offset / self.scale
            query, key, value, visible = with_sinks(query, key, value, visible, scores_N)
        query_BNSD, key_BGSD, value_BGSD = (heads.permute(1, 2, 0, 3) for heads in (query, key, value))
        width, value_width = query.shape[-1], value.shape[-1]
        if value_width < width:
            # torch's fused kernels need equal widths; without a fused kernel the scores of all heads would be stored.
            value_BGSD = pad(value_BGSD, (0, width - value_width))
        dropout = self.dropout if self.training else 0.0
        # Under sequence parallelism the whole layer already draws from this rank's random state.
        needs_rank_state = dropout > 0.0 and not self.config.sequence_parallel
        with get_cuda_rng_tracker().fork() if needs_rank_state else nullcontext():
            mixed_BNSD = scaled_dot_product_attention(
                query_BNSD,
                key_BGSD,
                value_BGSD,
                attn_mask=visible,
                dropout_p=dropout,
                is_causal=is_causal,
                scale=self.scale,
                enable_gqa=query.shape[2] != key.shape[2],
            )
        return mixed_BNSD[..., :value_width].permute(2, 0, 1, 3)

    def _sinks(self) -> nn.Parameter:
        config = self.config
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        heads = divide(config.num_attention_heads, self.tp_group.size())
        scores = nn.Parameter(torch.empty(heads, dtype=config.params_dtype, device=device))
        if config.perform_initialization:
            with get_cuda_rng_tracker().fork():
                config.init_method(scores)
        set_tensor_model_parallel_attributes(scores, True, 0, 1)
        return scores

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the sinks, if the model has them, as a single tensor over all heads."""
        return sharded_weights(self, prefix, {"softmax_offset": 0}, sharded_offsets, metadata)


def visible_keys(step: StepTokens, window: int | None) -> Tensor:
    """Return the mask of keys that each decoding slot's query attends to, bool `[num_decode, 1, 1, longest]`."""
    if window not in step.masks:
        positions_L = torch.arange(step.longest, device=step.positions_T.device)
        behind_BL = step.positions_T[: step.num_decode, None] - positions_L
        seen_BL = behind_BL >= 0 if window is None else (behind_BL >= 0) & (behind_BL <= window)
        step.masks[window] = seen_BL[:, None, None]
    return step.masks[window]


def with_sinks(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, scores_N: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the arguments of attention with a first key, the sink, whose score for head n is `scores_N[n]` and whose
    value is zero. In added columns each query has its head's score, the new key a 1, and other keys a 0: any attention
    then computes sinks, even if heads share keys. Shapes are as in `SDPAttention.forward`.
    """
    width = query.shape[-1]
    more = FUSED_MULTIPLE - width % FUSED_MULTIPLE
    scores = scores_N.to(query.dtype)[:, None].expand(*query.shape[:-1], 1)
    query = pad(torch.cat([query, scores], -1), (0, more - 1))
    sink = key.new_zeros(1, *key.shape[1:-1], width + more)
    sink[..., width] = 1.0
    key = torch.cat([sink, pad(key, (0, more))])
    value = torch.cat([value.new_zeros(1, *value.shape[1:]), value])
    return query, key, value, None if visible is None else pad(visible, (1, 0), value=True)
