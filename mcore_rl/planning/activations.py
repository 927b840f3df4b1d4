"""The activations that one transformer layer keeps for its backward pass, in closed form, by part of the layer.

TransformerEngine's layers ("te") follow arXiv 2205.05198, with attention that keeps no scores; ours ("torch") were
counted tensor by tensor (tests/unit/planning/test_kept_activations.py).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.model import LayerKind, ModelConfig
from mcore_rl.config.run import PlatformConfig
from mcore_rl.families import family_of

Layers = Literal["torch", "te"]
STATISTIC_BYTES = 4
"""Bytes of a norm's or a softmax's statistic, which is fp32 in every precision."""
ANGLE_BYTES = 4
"""Bytes of an angle of rotary embeddings, which is fp32 in every precision."""
DELTA_RULE = "delta_rule"
"""Part of a layer that every backward pass recomputes: its inputs are a fiftieth of the activations it would keep."""
CHUNK = 64
"""Positions that the delta rule computes at once."""
CHOICE_BYTES = 4
"""Bytes of the position of a chosen key."""
INDEX_BYTES = 8
"""Bytes of torch's index of a row."""


def layers_of(platform: PlatformConfig, *, allows_te: bool) -> Layers:
    """Return the kind of layers of a run on GPUs; `auto` assumes that TransformerEngine is installed there."""
    is_ours = platform.layers in ("torch", "cpu") or (platform.layers == "auto" and not allows_te)
    return "torch" if is_ours or platform.device == "cpu" else "te"


def load_of_fullest_rank(model: ModelConfig, mesh: MeshConfig, imbalance: float) -> float:
    """Return the tokens that the experts of the fullest rank compute, as a multiple of the mean; so is `imbalance`, the
    tokens sent to them before a capacity drops choices.
    """
    load, capacity = imbalance if mesh.ep > 1 else 1.0, model.moe.capacity_factor
    return load if capacity is None else min(load, capacity)


@dataclass(frozen=True)
class LayerActivations:
    """Bytes of the activations that one transformer layer keeps of one microbatch on one rank."""

    model: ModelConfig
    mesh: MeshConfig
    platform: PlatformConfig
    tokens: int
    """Number of the microbatch's tokens on a rank, before sequence parallelism cuts them."""
    layers: Layers = "te"
    imbalance: float = 1.0
    """Tokens sent to the rank's experts, as a multiple of the mean over ranks."""

    @property
    def element(self) -> int:
        """Bytes of one number of an activation."""
        return 2 if self.platform.precision == "bf16" else 4

    @property
    def residual(self) -> int:
        """Bytes of the residual stream at one point of the layer."""
        return self._slice * self.model.hidden_size * self.element

    def all_parts(self, kind: LayerKind) -> dict[str, int]:
        """Return the bytes by part of the layer, without recomputation."""
        return dict(self._parts(kind))

    def kept(self, kind: LayerKind) -> int:
        """Return the bytes kept with `platform.recompute` none or selective."""
        modules = self.platform.recompute_modules if self.platform.recompute == "selective" else ()
        parts_of: dict[str, tuple[str, ...]] = {
            # Attention that keeps no scores has little to drop but statistics; its inputs stay.
            "core_attn": ("softmax_statistics", "with_sinks", "mask", "padded_values"),
            "layernorm": ("normed", "norm_statistics"),
            "mla_up_proj": ("queries_keys_values", "rotary") if self._is_latent else (),
            "moe": ("router", "routes", "routed_in", "routed_up", "routed_act", *SHARED),
            "moe_act": ("routed_act",),
            "mlp": ("up", "act"),
            "shared_experts": ("shared_up", "shared_act", "shared_out"),
        }
        dropped = {part for module in modules for part in parts_of[module]} | {DELTA_RULE}
        return sum(size for part, size in self.all_parts(kind).items() if part not in dropped)

    @property
    def choice(self) -> int:
        """Bytes of an indexer's choice of keys, if the microbatch is one sequence; shorter ones may need none."""
        topk = self.model.indexer.top_k
        has_choice = topk is not None and self.tokens * self.mesh.cp > topk
        return self.tokens * (topk or 0) * CHOICE_BYTES if has_choice else 0

    @cached_property
    def _is_latent(self) -> bool:
        return family_of(self.model).is_latent

    @cached_property
    def _slice(self) -> int:
        return self.tokens // (self.mesh.tp if self.mesh.sequence_parallel else 1)

    @cached_property
    def _fp8_element(self) -> int:
        return self.element if self.platform.fp8 == "none" else 1

    def _parts(self, kind: LayerKind) -> Iterator[tuple[str, int]]:
        yield "inputs", 2 * self.residual  # of both norms
        # The products behind the norms read their outputs.
        yield "normed", 2 * self.residual // self.element * self._fp8_element
        if self.layers == "torch":
            yield "norm_statistics", 2 * self._slice * STATISTIC_BYTES
        if kind.mixer == "delta":
            yield from self._delta_net()
        elif self._is_latent:
            yield from self._latent_attention()
        elif self.layers == "te":
            yield from self._grouped_queries_te()
        else:
            yield from self._grouped_queries_torch()
        if kind.is_moe:
            yield from self._experts()
        else:
            numbers = self.tokens * self.model.ffn_hidden_size // self.mesh.tp
            yield "up", 2 * numbers * self.element
            yield "act", numbers * self._fp8_element
        if kind.mixer == "indexed":
            yield "choice", self.choice

    def _delta_net(self) -> Iterator[tuple[str, int]]:
        delta, tp = self.model.delta, self.mesh.tp
        projected = 2 * (delta.query_width + delta.value_width + delta.value_heads) // tp
        yield "projected", self.tokens * projected * self.element
        yield "attended", self._attended(delta.value_width // tp)
        # Measured with the rule in torch, in fp32 numbers of a token and a value head, within 1 %.
        key, value = delta.key_dim, delta.value_dim
        numbers = 8.5 * (key + value) + key * value / CHUNK + 5 * CHUNK
        yield DELTA_RULE, int(self.tokens * delta.value_heads // tp * numbers * 4)

    def _latent_attention(self) -> Iterator[tuple[str, int]]:
        model, mla, each = self.model, self.model.mla, self.tokens * self.element
        heads = model.num_heads // self.mesh.tp
        width = mla.qk_nope_head_dim + mla.qk_rope_head_dim
        # Each latent is kept before and after its norm, cut as the residual stream is.
        latents = 2 * (mla.q_lora_rank or 0) + 2 * mla.kv_lora_rank + mla.qk_rope_head_dim
        yield "latents", self.residual * latents // model.hidden_size
        yield "queries_keys_values", each * heads * (2 * width + mla.v_head_dim)
        is_up_recomputed = self.platform.recompute == "selective" and "mla_up_proj" in self.platform.recompute_modules
        if self.layers == "torch":
            # Values are padded to the width of keys, and replace the values counted above unless those are computed
            # again; the output has that width too.
            values = width if is_up_recomputed else width - mla.v_head_dim
            yield "padded_values", each * heads * (values + width)
        yield "attended", self._attended(heads * mla.v_head_dim)
        if is_up_recomputed:
            # Its inputs: the angles of each position in fp32, and the part of the keys that is turned, which
            # tensor-parallel ranks gather.
            gathered = self.element if self.mesh.tp > 1 and self.mesh.sequence_parallel else 0
            yield "up_projected", self.tokens * mla.qk_rope_head_dim * (ANGLE_BYTES + gathered)
        if self.layers == "torch":
            yield "rotary", 4 * each * mla.qk_rope_head_dim
            yield "latent_statistics", self._slice * (1 + bool(mla.q_lora_rank)) * STATISTIC_BYTES
            yield "softmax_statistics", self.tokens * heads * STATISTIC_BYTES

    def _grouped_queries_te(self) -> Iterator[tuple[str, int]]:
        model, each = self.model, self.tokens * self.element
        heads, kv_heads = self._heads
        if family_of(model).has_qk_norm(model):
            yield "unnormed_queries_keys", each * (heads + kv_heads) * model.head_dim
        yield "queries_keys_values", each * (heads + 2 * kv_heads) * model.head_dim
        yield "attended", self._attended(heads * model.head_dim)

    def _grouped_queries_torch(self) -> Iterator[tuple[str, int]]:
        model, each, family = self.model, self.tokens * self.element, family_of(self.model)
        heads, kv_heads = self._heads
        width = model.head_dim
        cp = self.mesh.cp
        if family.has_qk_norm(model) and family.has_full_qk_norm:
            # In fp32: the heads, and the heads divided by the root, for the gradient of the norm's weight.
            yield "unnormed_queries_keys", 2 * 4 * self.tokens * (heads + kv_heads) * width
        elif family.has_qk_norm(model):
            # A view of the product if it has one key/value head, else a copy in the order of heads.
            yield "unnormed_queries_keys", each * heads * width if kv_heads > 1 else 0
            yield "head_statistics", self.tokens * (heads + kv_heads) * STATISTIC_BYTES
        if family.has_attention_sinks:
            if self.platform.recompute == "selective" and "core_attn" in self.platform.recompute_modules:
                # Its inputs: turned queries and keys, and the values, a view of the product that makes all three.
                yield "queries_keys_values", each * (self._projected_heads + heads + kv_heads) * width
            # Queries, keys, values and the output with the columns of the sinks, and an additional key and value of
            # zeros.
            wide = -(-(width + 1) // 8) * 8
            yield "with_sinks", each * 2 * wide * (heads + cp * kv_heads)
            # torch's kernels take a sink by a mask over all pairs of positions, of one long sequence at most.
            yield "mask", self.tokens * self.tokens * cp * self.element
        else:
            # Values, and keys before their norm, are views of the product that makes all three.
            projected = each * self._projected_heads * width
            # Context-parallel ranks gather keys and values.
            keys = each * kv_heads * width if cp == 1 else 2 * cp * each * kv_heads * width
            views = cp == 1 or family.has_qk_norm(model)
            yield "queries_keys_values", (projected if views else 0) + each * heads * width + keys
        yield "rotary", 4 * each * int(width * model.rope.fraction)
        yield "attended", self._attended(heads * width)
        if family.has_output_gate:
            # Attention's output and the gate in fp32 make the input of the projection.
            yield "gates", self.tokens * heads * width * (4 + self.element)
        yield "softmax_statistics", self.tokens * heads * STATISTIC_BYTES

    @property
    def _heads(self) -> tuple[int, int]:
        return self.model.num_heads // self.mesh.tp, max(1, self.model.num_kv_heads // self.mesh.tp)

    @property
    def _projected_heads(self) -> int:
        # With fewer key/value heads than ranks the product is gathered, and values are a view of the whole.
        model, (heads, kv_heads) = self.model, self._heads
        if model.num_kv_heads < self.mesh.tp:
            heads, kv_heads = model.num_heads, model.num_kv_heads
        return heads * (2 if family_of(model).has_output_gate else 1) + 2 * kv_heads

    def _attended(self, width: int) -> int:
        # Bytes; the 8-bit product behind attention keeps its own copy of the output.
        copy = 1 if self.platform.fp8 != "none" else 0
        return self.tokens * width * (self.element + copy)

    def _experts(self) -> Iterator[tuple[str, int]]:
        model, moe, tp = self.model, self.model.moe, self.mesh.tp
        family = family_of(model)
        # Tokens are spread over tp * cp * dp ranks; an expert cut over etp ranks works on the tokens of all of them.
        routed = self.tokens * moe.top_k * self.mesh.etp // tp
        routed = int(routed * load_of_fullest_rank(model, self.mesh, self.imbalance))
        numbers = routed * moe.ffn_hidden_size // self.mesh.etp
        scores = moe.num_experts * STATISTIC_BYTES
        router = scores
        if self.layers == "torch":
            # The choice with its gates, and scores of all experts before the choice and for the balance.
            router += moe.num_experts + moe.top_k * (STATISTIC_BYTES + INDEX_BYTES)
            router += scores if family.router == "sigmoid" else 0
            router += scores if moe.balance != "none" and moe.aux_loss_coeff else 0
        yield "router", self.tokens // tp * router
        yield "routed_in", routed * model.hidden_size * self._fp8_element
        if self.layers == "te":
            yield "routed_up", 2 * numbers * self.element
            yield "routed_act", numbers * self._fp8_element
        else:
            # Each row's gate, and its index in the order of tokens.
            yield "routes", routed * (STATISTIC_BYTES + INDEX_BYTES)
            biases = family.has_linear_bias
            yield "routed_up", 2 * numbers * self.element
            # The activation's four steps, each a tensor: activated gate, up, their product, and the product times the
            # route's gate; biases and clamps add two, and a row of the output's bias with its index, twice.
            yield "routed_act", (6 if biases else 4) * numbers * self.element
            if biases:
                yield "routed_bias", routed * (model.hidden_size * self.element + 2 * INDEX_BYTES)
        shared = self.tokens * moe.shared_width // tp
        yield "shared_up", 2 * shared * self.element
        yield "shared_act", shared * self._fp8_element
        if self.layers == "torch" and family.has_shared_expert_gate:
            yield "shared_out", self.residual


SHARED = ("shared_up", "shared_act", "shared_out", "routed_bias")
"""Parts of an MoE layer apart from the routed experts."""
