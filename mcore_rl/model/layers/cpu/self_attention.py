"""Megatron's self-attention with fewer passes over memory on a CPU, and the provider of all compiled layers."""

from typing import Any, NamedTuple

import torch
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import _yarn_get_concentration_factor_from_config
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.autograd.function import once_differentiable

from mcore_rl.megatron.compiled import causal_attention, library
from mcore_rl.megatron.patches.gpu_packages import as_experts_entry
from mcore_rl.model.layers.attention import KeyValueCache, PackedParams, SDPAttention
from mcore_rl.model.layers.cpu import experts
from mcore_rl.model.spec import TorchSpecProvider


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


OF_INFERENCE = ("inference_context", "inference_params", "rotary_pos_cos", "rotary_pos_sin", "rotary_pos_cos_sin")
"""Arguments that Megatron's own inference passes to a layer."""


class Angles(NamedTuple):
    """Angles of a rotary embedding."""

    cos: Tensor
    """Cosines `[angles, width]`, float32, contiguous."""
    sin: Tensor
    """Sines `[angles, width]`, float32, contiguous."""
    positions_S: Tensor | None
    """Row of each position's angles, int64 `[S]`, contiguous; None if position s has row s."""


class HeadNorms(NamedTuple):
    """RMSNorms over the width of a head."""

    query: Tensor
    """Weight of the queries' norm, `[width]`."""
    key: Tensor
    """Weight of the keys' norm, `[width]`."""
    eps: float


OnePass = tuple[HeadNorms | None, Angles | None]
"""Norms and angles by which the heads of a layer are split, normalized and rotated in one pass."""


class FusedSelfAttention(SelfAttention):
    """Megatron's self-attention; the compiled library splits, normalizes and rotates the heads in one pass on a CPU.

    Megatron's separate steps are used for norms over all heads, zero-centered norms, output gates, fewer groups than
    tensor-parallel ranks, models with rotation in only some layers, rotation of a part of a head, interleaved or scaled
    rotation, packed sequences under context parallelism, and Megatron's own inference.
    """

    _pass: OnePass | None = None
    """Set during `forward` if the heads are split in one pass."""

    def __init__(self, config: TransformerConfig, *args: Any, **options: Any) -> None:
        super().__init__(config, *args, **options)
        norms = self.q_layernorm, self.k_layernorm
        self._has_norms = all(type(norm) is experts.CompiledRMSNorm for norm in norms)
        is_without = all(norm is None or isinstance(norm, IdentityOp) for norm in norms)
        self._is_plain = (
            (is_without or (self._has_norms and self._norms() is not None))
            and not getattr(config, "attention_output_gate", False)
            and not config.test_mode
            and not config.no_rope_freq
            and config.num_query_groups is not None
            and config.num_query_groups >= self.world_size
        )
        self._rotates_halves = (
            not config.rotary_interleaved and _yarn_get_concentration_factor_from_config(config) == 1.0
        )

    def forward(
        self,
        hidden_states: Tensor,
        *args: Any,
        rotary_pos_emb: Any = None,
        packed_seq_params: PackedSeqParams | None = None,
        **options: Any,
    ) -> Any:
        """Return output and bias; arguments and results are the same as Megatron's."""
        if not any(options.get(name) is not None for name in OF_INFERENCE):
            self._pass = self._one_pass(hidden_states, rotary_pos_emb, packed_seq_params)
        if self._pass is not None:
            rotary_pos_emb = None  # Megatron would rotate again.
        options |= {"rotary_pos_emb": rotary_pos_emb, "packed_seq_params": packed_seq_params}
        try:
            return super().forward(hidden_states, *args, **options)
        finally:
            self._pass = None

    def get_query_key_value_tensors(self, hidden_states: Tensor, *args: Any, **options: Any) -> Any:
        """Return queries, keys and values of `hidden_states`; inside `forward` they may already be rotated."""
        if self._pass is None:
            return super().get_query_key_value_tensors(hidden_states, *args, **options)
        norms, angles = self._pass
        mixed, _ = self.linear_qkv(hidden_states)
        mixed = mixed.unflatten(-1, (self.num_query_groups_per_partition, -1))
        return split_heads(mixed, self.hidden_size_per_attention_head, norms, angles)

    def _one_pass(self, hidden: Tensor, rotary: Any, packed: PackedSeqParams | None) -> OnePass | None:
        if not self._is_plain:
            return None
        norms = self._norms() if self._has_norms else None
        if rotary is None:
            return norms, None
        # Under sequence parallelism the projection gathers the positions of all ranks.
        num_positions = len(hidden) * (self.world_size if self.config.sequence_parallel else 1)
        angles = self._angles(rotary, packed, num_positions)
        return None if angles is None else (norms, angles)

    def _norms(self) -> HeadNorms | None:
        query, key = self.q_layernorm, self.k_layernorm
        if query.eps != key.eps:
            return None
        return HeadNorms(query.weight, key.weight, query.eps)

    def _angles(self, rotary: Any, packed: PackedSeqParams | None, num_positions: int) -> Angles | None:
        """Return the angles of Megatron's rotary embedding; None unless it rotates the two halves of whole heads."""
        width = self.hidden_size_per_attention_head
        if not (self._rotates_halves and isinstance(rotary, Tensor) and rotary.shape[1:] == (1, 1, width)):
            return None
        positions_S = None
        # With as many angles as positions, each position has its own angles, packed or not.
        if len(rotary) != num_positions:
            if packed is None or self.pg_collection.cp.size() > 1:
                return None
            bounds = packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded
            begins_S = bounds[:-1].long().repeat_interleave(bounds.diff(), output_size=num_positions)
            positions_S = torch.arange(num_positions) - begins_S  # in each position's sequence
            if int(positions_S.max()) >= len(rotary):
                return None
        elif packed is not None and self.pg_collection.cp.size() > 1:
            return None
        angles = rotary.float().view(-1, width)
        return Angles(angles.cos(), angles.sin(), positions_S)


def split_heads(
    mixed: Tensor, width: int, norms: HeadNorms | None, angles: Angles | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries `[S, B, groups * queries, width]`, keys and values `[S, B, groups, width]`, normed, then rotated,
    of `mixed` `[S, B, groups, (queries + 2) * width]`, fp32: for each group its queries, key and value.
    """
    weights = (None, None) if norms is None else (norms.query, norms.key)
    eps = 0.0 if norms is None else norms.eps
    split = _SplitHeads.apply if torch.is_grad_enabled() else _split
    operands: Any = mixed, *weights, *(angles or (None, None, None)), width, eps
    query, key, value, *_ = split(*operands)
    return query, key, value


def _split(
    mixed: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    positions_S: Tensor | None,
    width: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return queries, keys, values, 1 / rms of each head, and the contiguous projection."""
    mixed = mixed.contiguous()
    *rows, groups, columns = mixed.shape
    queries = columns // width - 2
    query = mixed.new_empty(*rows, groups * queries, width)
    key, value = (mixed.new_empty(*rows, groups, width) for _ in range(2))
    inverse = mixed.new_empty(*rows, groups, queries + 1)
    operands = mixed, query_weight, key_weight, cos, sin, positions_S, *rows, groups, queries, width, eps
    library().split_heads(*operands, query, key, value, inverse)
    return query, key, value, inverse, mixed


class _SplitHeads(torch.autograd.Function):
    """`split_heads` with its gradient."""

    @staticmethod
    def forward(ctx: Any, *operands: Any) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, inverse, mixed = _split(*operands)
        *weights_and_angles, ctx.width, _ = operands[1:]
        ctx.save_for_backward(mixed, *weights_and_angles, inverse)
        return query, key, value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        mixed, query_weight, key_weight, cos, sin, positions_S, inverse = ctx.saved_tensors
        *rows, groups, columns = mixed.shape
        sizes = *rows, groups, columns // ctx.width - 2, ctx.width
        # Attention's gradients have a layout of their own, which the library reads by strides.
        heads = [gradient if gradient.stride(3) == 1 else gradient.contiguous() for gradient in gradients]
        strides = torch.tensor([gradient.stride()[:3] for gradient in heads])
        d_mixed, d_weights = torch.empty_like(mixed), mixed.new_empty(2, ctx.width)
        operands = *heads, strides, mixed, query_weight, key_weight, cos, sin, positions_S, *sizes, inverse
        library().join_heads(*operands, d_mixed, d_weights, mixed.new_empty(3, ctx.width))
        d_query_weight, d_key_weight = d_weights if query_weight is not None else (None, None)
        return d_mixed, d_query_weight, d_key_weight, *[None] * 5


class CpuSpecProvider(TorchSpecProvider):
    """Provider of the layers for `platform.layers = "cpu"`; layers without a compiled form are torch's."""

    norm = experts.CompiledRMSNorm
    zero_centered_norm = experts.CompiledZeroCenteredRMSNorm
    attention = CompiledAttention
    self_attention = FusedSelfAttention

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        if config.rounds_products:
            self.output_layer = experts.RoundedOutputLayer

    def column_parallel_linear(self) -> type:
        """Return Megatron's layer, or ours with `platform.bf16_products`."""
        layer: type = experts.RoundedColumnLinear if self.config.rounds_products else super().column_parallel_linear()
        return layer

    def row_parallel_linear(self) -> type:
        """Return Megatron's layer, or ours with `platform.bf16_products`."""
        layer: type = experts.RoundedRowLinear if self.config.rounds_products else super().row_parallel_linear()
        return layer

    def grouped_mlp_modules(self, *_: Any, **__: Any) -> Any:
        """Return experts that the compiled library computes block by block."""
        return as_experts_entry(experts.CompiledExperts)
