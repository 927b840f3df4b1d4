"""Qwen3-Next and the text models of Qwen3.5 and Qwen3.6: three gated delta nets, then gated attention; dense or MoE."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from mcore_rl.config.model import ModelConfig
from mcore_rl.families import config_json as hf
from mcore_rl.families import rules as weight_rules
from mcore_rl.families.config_json import HfConfig
from mcore_rl.families.family import Family
from mcore_rl.families.weight_map import DuplicateTensor, HfRows, WeightRule

FRACTION = 0.25
"""Fraction of a head that is rotated if config.json does not set it."""


class Qwen3Next(Family):
    """Qwen3-Next: norms are zero-centered; an MTP layer uses attention, and its tensors have names of their own."""

    model_type = "qwen3_next"
    hf_class = "Qwen3NextForCausalLM"
    router: Literal["none", "softmax", "sigmoid"] = "softmax"
    qk_norm = ("on",)
    has_output_gate = True
    has_zero_centered_norms = True
    has_shared_expert_gate = True
    settings: tuple[str, ...] = (
        *("delta.full_every", "rope.fraction", "mtp_layers", "moe.first_dense_layers", "moe.shared_experts"),
        *("moe.shared_ffn_hidden_size",),
    )
    moe_names = weight_rules.MoENames(shared="shared_expert")
    mtp_prefix = "mtp."

    def from_hf(self, config: HfConfig) -> dict[str, Any]:
        hf.require_keys(config, "num_key_value_heads", "head_dim")
        hf.require(config, {"attn_output_gate": True, "mtp_use_dedicated_embeddings": False})
        shared = {"shared_experts": 1, "shared_ffn_hidden_size": hf.needed(config, "shared_expert_intermediate_size")}
        return hf.common(config, fraction=FRACTION) | {
            # transformers' default is gates that sum to 1.
            "moe": hf.qwen_experts({"norm_topk_prob": True, **config}) | shared,
            "delta": hf.delta_nets(config),
            "mtp_layers": hf.num_mtp_layers(config),
        }

    def to_hf(self, model: ModelConfig) -> dict[str, Any]:
        """Return the family's keys of config.json; transformers ignores the keys of MTP layers."""
        experts = hf.qwen_experts_to_hf(model) | {"shared_expert_intermediate_size": model.moe.shared_width}
        return self._positions_and_layers(model) | experts

    def violations(self, model: ModelConfig) -> Iterator[str]:
        """Yield a sentence for each number of heads, layers or shared experts that the family does not support."""
        delta = model.delta
        if delta.full_every is None:
            yield (
                f'model.delta.full_every="none" with model.family="{model.family}": most of its layers are gated delta '
                "nets. Set it to 4, as in the published models, or to 1, with which all layers attend."
            )
        if delta.value_heads % delta.key_heads:
            yield (
                f"model.delta.value_heads={delta.value_heads} is not a multiple of model.delta.key_heads="
                f"{delta.key_heads}: each head of queries and keys serves as many heads of values. Change one of them."
            )
        yield from super().violations(model)
        if model.mtp_layers > 1:
            yield f"model.mtp_layers={model.mtp_layers}: {self.model_type} has one. Set it to 1 or 0."

    def rules(self, model: ModelConfig, experts: weight_rules.ExpertLayout) -> Iterator[WeightRule]:
        """Yield a rule for each Megatron tensor or slice of a tensor."""
        yield from weight_rules.outer(model)
        for layer in weight_rules.decoder_layers(model):
            yield from self.layer_rules(model, layer, experts)
        hidden = model.hidden_size
        for layer in weight_rules.mtp_layers(model):
            yield from self.layer_rules(model, replace(layer, hf="mtp.layers.0."), experts)
            around = weight_rules.LayerNames(hf="mtp.", mcore="mtp.layers.0.", is_moe=False)
            yield around.vector("enorm.weight", "pre_fc_norm_embedding.weight", hidden)
            yield around.vector("hnorm.weight", "pre_fc_norm_hidden.weight", hidden)
            yield around.matrix("eh_proj.weight", 2 * hidden, ("fc.weight", hidden))
            yield around.vector("final_layernorm.weight", "norm.weight", hidden)

    def duplicates(self, model: ModelConfig) -> Iterator[DuplicateTensor]:
        """Yield the output layer if it is tied; MTP layers have no embeddings of their own."""
        return weight_rules.tied_output(model)

    def attention_rules(self, model: ModelConfig, layer: weight_rules.LayerNames) -> Iterator[WeightRule]:
        """Yield the rules of one layer's attention or gated delta net, and of the norm before it."""
        if layer.mixer == "attention":
            return super().attention_rules(model, layer)
        return weight_rules.delta_net(model, layer, self.projections(model, layer.hf + "linear_attn."))

    def projections(self, model: ModelConfig, prefix: str) -> Mapping[str, Sequence[HfRows]]:
        """Return the rows of a delta net's projection, contiguous for each key head: query, key, values and gates in
        one tensor, the betas and alphas of its values in another; names begin with `prefix`.
        """
        delta, values = model.delta, model.delta.value_heads // model.delta.key_heads
        wide = {"query": delta.key_dim, "key": delta.key_dim}
        wide |= dict.fromkeys(("value", "z"), values * delta.value_dim)
        parts: dict[str, Sequence[HfRows]] = {}
        for tensor, sizes in (("in_proj_qkvz", wide), ("in_proj_ba", {"beta": values, "alpha": values})):
            together, begin = sum(sizes.values()), 0
            for part, size in sizes.items():
                starts = [head * together + begin for head in range(delta.key_heads)]
                parts[part] = [HfRows(f"{prefix}{tensor}.weight", start, start + size) for start in starts]
                begin += size
        return parts

    def _positions_and_layers(self, model: ModelConfig) -> dict[str, Any]:
        mtp = {"mtp_num_hidden_layers": model.mtp_layers} if model.mtp_layers else {}
        common = {"attention_bias": False, "partial_rotary_factor": model.rope.fraction}
        return common | hf.delta_nets_to_hf(model) | mtp


class Qwen35Moe(Qwen3Next):
    """Qwen3.5-MoE: every layer has experts, and their gates sum to 1."""

    model_type = "qwen3_5_moe_text"
    hf_class = "Qwen3_5MoeForCausalLM"
    has_score_class = False
    settings = tuple(name for name in Qwen3Next.settings if name != "moe.first_dense_layers")

    def from_hf(self, config: HfConfig) -> dict[str, Any]:
        hf.require(config, {"norm_topk_prob": True, "mlp_only_layers": [], "decoder_sparse_step": 1})
        # Published configs have no dense layers, and therefore no width for them.
        width = config.get("intermediate_size") or config.get("moe_intermediate_size")
        return super().from_hf({**config, "intermediate_size": width})

    def violations(self, model: ModelConfig) -> Iterator[str]:
        """Yield a sentence for each setting that transformers' class does not have."""
        yield from super().violations(model)
        if not model.moe.normalize_top_k:
            yield f"model.moe.normalize_top_k=false: {self.model_type} always norms its gates. Set it to true."

    def projections(self, model: ModelConfig, prefix: str) -> Mapping[str, Sequence[HfRows]]:
        """Return the rows of each part of a delta net's projection; queries, keys and values are concatenated."""
        delta = model.delta
        query, value, qkv = delta.query_width, delta.value_width, prefix + "in_proj_qkv.weight"
        return {
            "query": [HfRows(qkv, 0, query)],
            "key": [HfRows(qkv, query, 2 * query)],
            "value": [HfRows(qkv, 2 * query, 2 * query + value)],
            "z": [HfRows(prefix + "in_proj_z.weight", 0, value)],
            "beta": [HfRows(prefix + "in_proj_b.weight", 0, delta.value_heads)],
            "alpha": [HfRows(prefix + "in_proj_a.weight", 0, delta.value_heads)],
        }


class Qwen35(Qwen3Next):
    """Qwen3.5, dense."""

    model_type = "qwen3_5_text"
    hf_class = "Qwen3_5ForCausalLM"
    score_class = "Qwen3_5TextForSequenceClassification"
    router = "none"
    has_shared_expert_gate = False
    settings = ("delta.full_every", "rope.fraction", "mtp_layers")
    projections = Qwen35Moe.projections

    def from_hf(self, config: HfConfig) -> dict[str, Any]:
        hf.require_keys(config, "num_key_value_heads", "head_dim")
        hf.require(config, {"attn_output_gate": True, "mtp_use_dedicated_embeddings": False})
        return hf.common(config, fraction=FRACTION) | {
            "delta": hf.delta_nets(config),
            "mtp_layers": hf.num_mtp_layers(config),
        }

    def to_hf(self, model: ModelConfig) -> dict[str, Any]:
        return self._positions_and_layers(model)
