"""Latent attention over the keys that an indexer chooses (arXiv 2512.02556), and layers that share a choice.

The choice of a layer travels as its attention mask, which the core attention reads: recomputation saves the mask with
the layer's other inputs, so that it has the choice of its own microbatch. For layers that share a choice, the model's
attention mask is a tensor with room for the choices of a pass, which full recomputation keeps too.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from megatron.core.tensor_parallel import checkpoint
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from mcore_rl.config.model import IndexerConfig
from mcore_rl.megatron.platform import to_device
from mcore_rl.model.layers.attention import (
    KeyValueCache,
    PackedParams,
    SDPAttention,
    gathered_order,
    order_on,
    visible_keys,
)
from mcore_rl.model.layers.cache import StepTokens
from mcore_rl.model.layers.linear import LatentAttention, ReplicatedLinear

BLOCK = 512
"""Number of queries with scores computed at a time."""
HEADS_AT_ONCE = 4
"""Number of heads with products in memory at a time; their sums are then added in order, for any number of keys."""
NORM_EPS = 1e-6
"""Epsilon of the norm of index keys, which no config has."""


class Indexed(NamedTuple):
    """Queries, keys and weights of an indexer."""

    query: Tensor
    """`[S, B, H, D]`."""
    key: Tensor
    """`[S, B, D]`, the same for all heads."""
    weight: Tensor
    """Weight of each head, fp32 `[S, B, H]`."""


class Segment(NamedTuple):
    """Consecutive queries of one sequence, and the keys up to the last of them."""

    begin: int
    """Index of the first query on this rank."""
    end: int
    first: int
    """Index of the sequence's first key in the keys of all ranks, which are in the order of positions."""
    stop: int
    """Index behind the last key that a query of the segment sees."""


class Block(NamedTuple):
    """Queries of a segment that see more keys than are chosen."""

    begin: int
    """Index of the first query in its segment."""
    end: int
    stop: int
    """Number of the segment's keys up to the last of these queries."""


class Indexer(nn.Module):
    """The indexer of a layer, whole on every tensor-parallel rank, as all attend to the same keys. It is not trained: a
    choice has no gradient, and an optimizer would only let its weights decay.
    """

    def __init__(self, config: TransformerConfig, tp_group: torch.distributed.ProcessGroup) -> None:
        super().__init__()
        shape: IndexerConfig = config.indexer
        self._heads, self._in_pairs = shape.heads, config.index_in_pairs
        hidden, rank = config.hidden_size, config.q_lora_rank

        def linear(inputs: int, outputs: int) -> ReplicatedLinear:
            return ReplicatedLinear(inputs, outputs, config=config, init_method=config.init_method, tp_group=tp_group)

        self.linear_wq_b = linear(rank, shape.heads * shape.width)
        self.linear_wk = linear(hidden, shape.width)
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.k_norm = nn.LayerNorm(shape.width, NORM_EPS, device=device, dtype=config.params_dtype)
        self.linear_weights_proj = linear(hidden, shape.heads)
        self.requires_grad_(False)

    def keys_and_weights(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return index keys `[s, B, D]`, not turned, and fp32 weights `[s, B, H]` of `[s, B, hidden]`."""
        # In fp32, as in the published code: the weights' signs decide which keys rank behind keys of score zero.
        weights = nn.functional.linear(hidden.float(), self.linear_weights_proj.weight.float())
        return self.k_norm(self.linear_wk(hidden)[0]), weights

    def forward(self, latent: Tensor, keys: Tensor, weights: Tensor, angles: Tensor, factor: float) -> Indexed:
        """Return queries, keys and weights of `latent` `[S, B, R]`, `keys` `[S, B, D]` not turned yet and `weights`
        `[S, B, H]`. `angles` are `[S, 1, 1, turned]`, each twice, in halves; `factor`, YaRN's, is on the turned
        numbers.
        """
        query = self.linear_wq_b(latent)[0].unflatten(-1, (self._heads, -1))
        query, key = (_turned(part, angles, factor, in_pairs=self._in_pairs) for part in (query, keys[:, :, None]))
        return Indexed(query, key[:, :, 0], weights)


def _turned(heads: Tensor, angles: Tensor, factor: float, *, in_pairs: bool) -> Tensor:
    """Return heads `[S, B, H, D]` with their first numbers turned; pairs come out as halves, for equal products."""
    wide, width = heads.float(), angles.shape[-1]
    front, rest = wide[..., :width], wide[..., width:]
    first, second = (front[..., 0::2], front[..., 1::2]) if in_pairs else front.chunk(2, -1)
    cosine, sine = (part * factor for part in (angles.cos(), angles.sin()))
    swapped = torch.cat([-second, first], -1)
    turned = torch.cat([first, second], -1) * cosine + swapped * sine
    return torch.cat([turned, rest], -1).to(heads.dtype)


def segments(lengths: Sequence[int], rank: int, ranks: int) -> Iterator[Segment]:
    """Yield the segments of a row: its sequences, or chunks `rank` and 2 * ranks - 1 - rank of each."""
    begin = first = 0
    for length in lengths:
        if ranks == 1:
            yield Segment(begin, begin + length, first, first + length)
        else:
            chunk = length // (2 * ranks)
            yield Segment(begin, begin + chunk, first, first + (rank + 1) * chunk)
            yield Segment(begin + chunk, begin + 2 * chunk, first, first + (2 * ranks - rank) * chunk)
        begin, first = begin + length // ranks, first + length


def blocks(num_queries: int, num_keys: int, topk: int) -> Iterator[Block]:
    """Yield the blocks of a segment's last queries, without those that attend to all of at most `topk` keys."""
    before = num_keys - num_queries
    for begin in range(max(0, topk - before), num_queries, BLOCK):
        end = min(begin + BLOCK, num_queries)
        yield Block(begin, end, before + end)


def choose(indexed: Indexed, keys: Tensor, parts: Sequence[Segment], topk: int) -> Tensor:
    """Return the positions in its segment of each query's keys, int32 `[s, B, topk]`, zeros for a query that sees at
    most `topk`; `keys` `[S, B, D]` are of all ranks, in the order of positions.
    """
    query, _, weight = indexed
    chosen = torch.zeros(*query.shape[:2], topk, dtype=torch.int32, device=query.device)
    for begin, end, first, stop in parts:
        for block in blocks(end - begin, stop - first, topk):
            here = slice(begin + block.begin, begin + block.end)
            of_segment = keys[first : first + block.stop]
            visible = causal(block.end - block.begin, block.stop, query.device)
            chosen[here] = best(query[here], of_segment, weight[here], visible[:, None], topk)
    return chosen


def best(query: Tensor, keys: Tensor, weight: Tensor, visible: Tensor, topk: int) -> Tensor:
    """Return the positions of the `topk` visible keys of largest score, int32 `[Q, B, topk]`, then of others where
    fewer are visible, for `query` `[Q, B, H, D]`, `keys` `[K, B, D]`, `weight` `[Q, B, H]`, `visible` `[Q, B or 1, K]`.
    """
    keys_BDK = keys.float().permute(1, 2, 0)
    scores_BQK = torch.zeros((), device=query.device)
    for heads in range(0, query.shape[2], HEADS_AT_ONCE):
        part = slice(heads, heads + HEADS_AT_ONCE)
        products_BHQK = query[:, :, part].float().permute(1, 2, 0, 3) @ keys_BDK[:, None]
        weight_BHQ1 = weight[:, :, part].permute(1, 2, 0)[..., None]
        scores_BQK = scores_BQK + (products_BHQK.relu() * weight_BHQ1).sum(1)
    scores_QBK = scores_BQK.transpose(0, 1).masked_fill(~visible, -torch.inf)
    # Stable: torch.topk takes any of equal scores, and many are zero.
    order_QBK = scores_QBK.sort(dim=-1, descending=True, stable=True).indices
    return order_QBK[..., :topk].int()


def chosen_mask(chosen: Tensor, visible: Tensor) -> Tensor:
    """Return a mask `[B, 1, Q, K]`: true at chosen positions `[Q, B, topk]` that are visible `[Q, B or 1, K]`."""
    mask_QBK = torch.zeros(*chosen.shape[:2], visible.shape[-1], dtype=torch.bool, device=chosen.device)
    mask_QBK.scatter_(-1, chosen.long(), True)
    return (mask_QBK & visible).transpose(0, 1)[:, None]


def causal(num_queries: int, num_keys: int, device: torch.device) -> Tensor:
    """Return which keys queries at the last of their positions may attend to, bool `[Q, K]`."""
    positions = torch.arange(num_keys, device=device)
    return positions <= positions[num_keys - num_queries :, None]


@dataclass(slots=True)
class IndexedCache(KeyValueCache):
    """The cache of attention in a layer with an indexer."""

    index_keys: Tensor = field(kw_only=True)
    """Index keys `[slots, S, D]`."""

    def copy(self, source: int, targets: slice, length: int) -> None:
        """Copy the first `length` positions of slot `source` to the slots `targets`."""
        KeyValueCache.copy(self, source, targets, length)
        self.index_keys[targets, :length] = self.index_keys[source, :length]


class IndexedAttention(SDPAttention):
    """Attention over chosen keys, where there is a choice; the scores of other keys are computed and left out."""

    indexer: Indexer | None
    """Set by the layer; None in a layer that shares another's choice."""
    topk: int

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> Tensor:
        """Return what `SDPAttention` does; `attention_mask` is the choice `[s, B, topk]`, or None to attend to all."""
        if attention_mask is None:
            return super().forward(query, key, value, None, **options)
        if self.cache is not None:
            return self._cached_chosen(query, key, value, attention_mask, self.cache)
        packed, ranks = options.get("packed_seq_params"), self.cp_group.size()
        if packed is not None:
            query, key, value = query[:, None], key[:, None], value[:, None]
        lengths = self.lengths(packed, len(query))
        if ranks > 1:
            key, value = self._gathered(key, value, order_on(lengths, ranks, key.device))
        parts = list(segments(lengths, self.cp_group.rank(), ranks))
        mixed = self._chosen(query, key, value, attention_mask, parts)
        return mixed[:, 0].flatten(1) if packed is not None else mixed.flatten(2)

    def new_cache(self, keys: Tensor, values: Tensor) -> KeyValueCache:
        """Return a cache of these tensors, with index keys if the layer has an indexer."""
        if self.indexer is None:
            return super().new_cache(keys, values)
        index_keys = keys.new_zeros(*keys.shape[:2], self.config.indexer.width)
        return IndexedCache(keys, values, index_keys=index_keys)

    def lengths(self, packed: PackedParams | None, num_tokens: int) -> tuple[int, ...]:
        """Return the lengths, over all context-parallel ranks, of the sequences in rows of this rank's `num_tokens`."""
        return (num_tokens * self.cp_group.size(),) if packed is None else packed.lengths

    def _chosen(self, query: Tensor, key: Tensor, value: Tensor, choice: Tensor, parts: list[Segment]) -> Tensor:
        """Return the output `[s, B, N, Dv]` of queries of these segments."""
        mixed = []
        for begin, end, first, stop in parts:
            queries, keys, values, chosen = (query[begin:end], key[first:stop], value[first:stop], choice[begin:end])
            cut = list(blocks(end - begin, stop - first, self.topk))
            num_all = cut[0].begin if cut else end - begin
            if num_all:
                seen = stop - first - (end - begin) + num_all
                mixed.append(self._prefix(queries[:num_all], keys[:seen], values[:seen]))
            for block in cut:
                operands = (
                    queries[block.begin : block.end],
                    keys[: block.stop],
                    values[: block.stop],
                    chosen[block.begin : block.end],
                )
                # The mask of a block would be kept for the backward pass: more than indices for most lengths.
                is_trained = torch.is_grad_enabled()
                mixed.append(checkpoint(self._block, False, *operands) if is_trained else self._block(*operands))
        return torch.cat(mixed)

    def _block(self, query: Tensor, key: Tensor, value: Tensor, chosen: Tensor) -> Tensor:
        visible = causal(len(query), len(key), key.device)
        return self._attend(query, key, value, chosen_mask(chosen, visible[:, None]))

    def _cached_chosen(self, query: Tensor, key: Tensor, value: Tensor, choice: Tensor, cache: KeyValueCache) -> Tensor:
        """Return the output `[T, 1, N * Dv]` of a step's tokens, zeros for padding."""
        step, num_decode = cache.step, cache.step.num_decode
        where = step.slots_T, step.positions_T
        cache.keys[where], cache.values[where] = key[:, 0], value[:, 0]
        mixed = query.new_zeros(*query.shape[:3], value.shape[3])
        if num_decode and step.longest <= self.topk:
            mixed[:num_decode, 0] = self._newest(query[:num_decode, 0], cache)
        elif num_decode:
            keys, values = (kv[:num_decode, : step.longest].transpose(0, 1) for kv in (cache.keys, cache.values))
            mask = chosen_mask(choice[:num_decode].transpose(0, 1), _seen(step))
            mixed[:num_decode, 0] = self._attend(query[:num_decode].transpose(0, 1), keys, values, mask)[0]
        for begin, end, slot, stop in step.spans:
            whole = [Segment(0, end - begin, 0, stop)]
            keys, values = cache.keys[slot, :stop, None], cache.values[slot, :stop, None]
            mixed[begin:end] = self._chosen(query[begin:end], keys, values, choice[begin:end], whole)
        return mixed.flatten(2)


@cache
def attention_over_choices(attention: type[SDPAttention]) -> type[IndexedAttention]:
    """Return `IndexedAttention` that computes as `attention` does where queries attend to all earlier positions."""
    return IndexedAttention if attention is SDPAttention else type("Indexed", (IndexedAttention, attention), {})


class IndexedLatentAttention(LatentAttention):
    """Latent attention over the keys that its indexer chooses, or over those that another layer's has chosen."""

    def __init__(self, *args: Any, has_indexer: bool, slot: int | None, **kwargs: Any) -> None:
        """Make a layer with an indexer, or with the choice in `slot`; None: none shares it."""
        super().__init__(*args, **kwargs)
        assert has_indexer or slot is not None, "a layer without an indexer shares a choice"
        self.slot = slot
        self.keeps_choice = False
        """Whether `kept_choice` is set by each forward pass."""
        self.kept_choice: Tensor | None = None
        """The choice of the last pass, `[S, B, topk]`; None: there was none."""
        core = self.core_attention
        core.topk = self.config.indexer.top_k
        core.indexer = Indexer(self.config, self.tp_group) if has_indexer else None

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: PackedParams | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output `[s, B, hidden]`, and no bias; the mask is `IndexedBlock`'s room for choices."""
        if self.core_attention.indexer is None:
            choice = None if attention_mask is None else attention_mask[self.slot]
        else:
            choice = self._choice(hidden_states, packed_seq_params)
            self.kept_choice = choice if self.keeps_choice else None
            if choice is not None and self.slot is not None:
                assert attention_mask is not None, "the block makes room where there is a choice"
                # As data: a pass that is computed again writes the same once more, which autograd need not know.
                attention_mask.data[self.slot] = choice
                choice = attention_mask[self.slot]
        output: tuple[Tensor, Tensor | None] = super().forward(
            hidden_states, choice, packed_seq_params=packed_seq_params, **options
        )
        return output

    @torch.no_grad()
    def _choice(self, hidden: Tensor, packed: PackedParams | None) -> Tensor | None:
        """Collective over the tensor- and context-parallel groups: return the choice `[S, B, topk]` of all positions of
        this context-parallel rank; None where each query attends to all keys.
        """
        core, tp = self.core_attention, self.tp_group.size() if self.config.sequence_parallel else 1
        lengths = core.lengths(packed, len(hidden) * tp)
        if core.cache is None and max(lengths) <= core.topk:
            return None
        latent = self.q_layernorm(self.linear_q_down_proj(hidden)[0])
        keys, weights = core.indexer.keys_and_weights(hidden)
        if tp > 1:
            latent, keys, weights = (
                gather_from_sequence_parallel_region(part, group=self.tp_group) for part in (latent, keys, weights)
            )
        if core.cache is not None:
            return self._cached_choice(core.indexer(latent, keys, weights, *self._table(0)), core.cache)
        rank, ranks = core.cp_group.rank(), core.cp_group.size()
        angles, factor = self._table(max(lengths))
        at = _positions(lengths, rank, ranks, latent.device)
        indexed = core.indexer(latent, keys, weights, angles[at], factor)
        all_keys = indexed.key
        if ranks > 1:
            gathered = gather_from_sequence_parallel_region(all_keys.contiguous(), group=core.cp_group)
            all_keys = gathered.index_select(0, order_on(lengths, ranks, latent.device))
        return choose(indexed, all_keys, list(segments(lengths, rank, ranks)), core.topk)

    def _cached_choice(self, indexed: Indexed, cache: IndexedCache) -> Tensor | None:
        """Return the choice `[T, 1, topk]` of a step's tokens, and put their index keys into the cache."""
        step, topk, index_keys = cache.step, self.core_attention.topk, cache.index_keys
        index_keys[step.slots_T, step.positions_T] = indexed.key[:, 0]
        if not is_choosing(step, topk):
            return None
        choice = torch.zeros(len(indexed.query), 1, topk, dtype=torch.int32, device=index_keys.device)
        count = step.num_decode
        if count and step.longest > topk:
            # Slots are rows of one query each.
            query, weight = (part[:count].transpose(0, 1) for part in (indexed.query, indexed.weight))
            keys = index_keys[:count, : step.longest].transpose(0, 1)
            choice[:count] = best(query, keys, weight, _seen(step), topk).transpose(0, 1)
        for begin, end, slot, stop in step.spans:
            of_span = Indexed(*(part[begin:end] for part in indexed))
            whole = [Segment(0, end - begin, 0, stop)]
            choice[begin:end] = choose(of_span, index_keys[slot, :stop, None], whole, topk)
        return choice

    def _table(self, length: int) -> tuple[Tensor, float]:
        """Return angles of positions up to `length`, or of a step's tokens, and the factor on the turned numbers."""
        table = self.rotary_pos_emb(length, packed_seq=True)
        return table if isinstance(table, tuple) else (table, 1.0)


class IndexedBlock(TransformerBlock):
    """Megatron's TransformerBlock, with room for the key choices that layers share during a pass."""

    def forward(
        self,
        hidden_states: Tensor | None,
        attention_mask: Tensor | None,
        *args: Any,
        packed_seq_params: PackedParams | None = None,
        **kwargs: Any,
    ) -> Any:
        """Return what Megatron's block does; attention is causal, without a mask of the caller's."""
        assert attention_mask is None, "attention over chosen keys is causal"
        # Behind the first stage Megatron's schedule has set the input before.
        room = self._room(hidden_states if self.pre_process else self.input_tensor, packed_seq_params)
        return super().forward(hidden_states, room, *args, packed_seq_params=packed_seq_params, **kwargs)

    def _room(self, tokens: Any, packed: PackedParams | None) -> Tensor | None:
        """Return room for the chunk's shared choices, int32 `[slots, S, B, topk]`; None where none is made."""
        attentions = [layer.self_attention for layer in self.layers]
        num_slots = 1 + max((each.slot for each in attentions if each.slot is not None), default=-1)
        if not num_slots:
            return None
        core, topk = attentions[0].core_attention, self.config.indexer.top_k
        num_tokens = len(tokens) * (self.pg_collection.tp.size() if self.config.sequence_parallel else 1)
        if core.cache is not None:
            has_choice = is_choosing(core.cache.step, topk)
        else:
            has_choice = max(core.lengths(packed, num_tokens)) > topk
        if not has_choice:
            return None
        return torch.empty(num_slots, num_tokens, tokens.shape[1], topk, dtype=torch.int32, device=tokens.device)


def is_choosing(step: StepTokens, topk: int) -> bool:
    """Return whether a token of the step sees more keys than are chosen."""
    longest = step.longest if step.num_decode else 0
    return max((longest, *(span.stop for span in step.spans))) > topk


def _seen(step: StepTokens) -> Tensor:
    """Return which keys each decoding slot sees, bool `[1, num_decode, longest]`."""
    return visible_keys(step, None)[:, 0, 0][None]


@lru_cache(8)
def _positions(lengths: tuple[int, ...], rank: int, ranks: int, device: torch.device) -> Tensor:
    at = torch.cat([torch.arange(length) for length in lengths])
    if ranks > 1:
        at = at[gathered_order(lengths, ranks).argsort()].chunk(ranks)[rank]
    return to_device(at, device)
