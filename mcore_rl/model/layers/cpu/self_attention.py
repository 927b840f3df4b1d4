"""Megatron's self-attention with fewer passes over memory on a CPU."""

from typing import Any, NamedTuple

from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import (
    _yarn_get_concentration_factor_from_config,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mcore_rl.backend.cpu.compiled import Library, compiled_for
from mcore_rl.backend.cpu.megatron_speed import FORMATS, positions_in_sequences
from mcore_rl.model.layers.cpu.heads import Angles, HeadNorms, split_heads
from mcore_rl.model.layers.norm import RMSNorm

OF_INFERENCE = (
    "inference_context",
    "inference_params",
    "rotary_pos_cos",
    "rotary_pos_sin",
    "rotary_pos_cos_sin",
)
"""Arguments that Megatron's own inference gives to a layer."""


class _OnePass(NamedTuple):
    """The parts that one pass needs to split, normalize and rotate the heads of a layer."""

    library: Library
    norms: HeadNorms | None
    angles: Angles | None


class FusedSelfAttention(SelfAttention):
    """Megatron's self-attention, whose heads the compiled file splits, normalizes and rotates in one pass on a CPU.

    Layers and calls that it does not compute take Megatron's steps, one after another: those with norms over all heads
    or zero-centered ones, output gates, fewer groups than tensor-parallel ranks, layers without rotation among others,
    rotations of a part of a head, interleaved or scaled ones, packed sequences under context parallelism, and
    Megatron's own inference.
    """

    _pass: _OnePass | None = None
    """Set while `forward` runs and the heads are split in one pass."""

    def __init__(self, config: TransformerConfig, *args: Any, **options: Any) -> None:
        super().__init__(config, *args, **options)
        norms = self.q_layernorm, self.k_layernorm
        self._has_norms = all(type(norm) is RMSNorm for norm in norms)
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
        """Return Megatron's output and bias; arguments are Megatron's."""
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
        """Return queries, keys and values of `hidden_states`; inside `forward` they may be rotated already."""
        if self._pass is None:
            return super().get_query_key_value_tensors(hidden_states, *args, **options)
        library, norms, angles = self._pass
        mixed, _ = self.linear_qkv(hidden_states)
        mixed = mixed.unflatten(-1, (self.num_query_groups_per_partition, -1))
        return split_heads(library, mixed, self.hidden_size_per_attention_head, norms, angles)

    def _one_pass(self, hidden: Tensor, rotary: Any, packed: PackedSeqParams | None) -> _OnePass | None:
        """Return what one pass needs, None where Megatron's steps are needed."""
        if not self._is_plain:
            return None
        norms = self._norms() if self._has_norms else None
        library = compiled_for(hidden, self.linear_qkv.weight, *(norms or ())[:2], formats=FORMATS)
        if library is None or rotary is None:
            return None if library is None else _OnePass(library, norms, None)
        # Under sequence parallelism the projection gathers the positions of all ranks.
        num_positions = len(hidden) * (self.world_size if self.config.sequence_parallel else 1)
        angles = self._angles(rotary, packed, num_positions)
        return None if angles is None else _OnePass(library, norms, angles)

    def _norms(self) -> HeadNorms | None:
        query, key = self.q_layernorm, self.k_layernorm
        if query.eps != key.eps or query.zero_centered or key.zero_centered:
            return None
        return HeadNorms(query.weight, key.weight, query.eps)

    def _angles(self, rotary: Any, packed: PackedSeqParams | None, num_positions: int) -> Angles | None:
        """Return the angles of Megatron's rotary embedding; None where it is not one of whole heads in halves."""
        width = self.hidden_size_per_attention_head
        if not (self._rotates_halves and isinstance(rotary, Tensor) and rotary.shape[1:] == (1, 1, width)):
            return None
        positions_S = None
        # With as many angles as positions, each position has its own, packed or not.
        if len(rotary) != num_positions:
            if packed is None or self.pg_collection.cp.size() > 1:
                return None
            bounds = packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded
            positions_S = positions_in_sequences(bounds, num_positions)
            if int(positions_S.max()) >= len(rotary):
                return None
        elif packed is not None and self.pg_collection.cp.size() > 1:
            return None
        angles = rotary.float().view(-1, width)
        return Angles(angles.cos(), angles.sin(), positions_S)
