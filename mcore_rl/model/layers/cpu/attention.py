"""Core attention by the compiled library."""

from torch import Tensor

from mcore_rl.megatron.cpu.attention import causal_attention
from mcore_rl.megatron.cpu.compiled import library
from mcore_rl.model.layers.attention import KeyValueCache, SDPAttention
from mcore_rl.model.layers.indexed import IndexedAttention
from mcore_rl.model.layers.packed import PackedParams


class CompiledAttention(SDPAttention):
    """`SDPAttention` with compiled causal attention if there is no window, sink or dropout."""

    @property
    def _is_plain(self) -> bool:
        has_dropout = self.dropout > 0.0 and self.training
        return self.window is None and self.softmax_offset is None and not has_dropout

    def _prefix(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if not self._is_plain:
            return super()._prefix(query, key, value)
        return causal_attention(query, key, value, self.scale)

    def _at_once(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedParams) -> Tensor | None:
        if not self._is_plain or self.cp_group.size() > 1:
            return None
        rows = query[:, None], key[:, None], value[:, None]
        return causal_attention(*rows, self.scale, packed.lengths).flatten(1)

    def _newest(self, query_BND: Tensor, cache: KeyValueCache) -> Tensor:
        if self.softmax_offset is not None:
            return super()._newest(query_BND, cache)
        rows, heads, width = query_BND.shape
        keys, values = cache.keys, cache.values
        room, groups, value_width = keys.shape[1], keys.shape[2], values.shape[3]
        mixed = query_BND.new_empty(rows, heads, value_width)
        library().decode_attention(
            query_BND.contiguous(),
            keys,
            values,
            cache.step.positions_T.contiguous(),
            *(rows, room, groups, heads // groups, width, value_width),
            room if self.window is None else self.window,
            self.scale,
            mixed,
            query_BND.new_empty(heads // groups * room),
        )
        return mixed


class CompiledIndexedAttention(IndexedAttention, CompiledAttention):
    """`IndexedAttention`, compiled for queries that attend to all earlier positions."""
