"""gpt-oss (arXiv 2508.10925): biases everywhere, attention sinks, and a window in every second layer."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from mcore_rl.config.model import ModelConfig
from mcore_rl.families.config_json import HfConfig, common, either, needed, refusal, require, require_keys
from mcore_rl.families.family import Family
from mcore_rl.families.rules import ExpertLayout, LayerNames, decoder_layers, outer
from mcore_rl.families.weight_map import HfRows, WeightRule

LIMIT, ALPHA = 7.0, 1.702
"""Limit to which the experts' activations are clamped, and slope of their sigmoid, which is built into Megatron."""

UNSCALED = {"rope_type": "default", "factor": 1.0, "beta_fast": 32.0, "beta_slow": 1.0}
"""Settings of unscaled positions. Without settings, transformers has the YaRN of the published models; vLLM runs YaRN
whatever the type is, which changes nothing with the factor 1."""


class GptOss(Family):
    """gpt-oss: every layer has experts, with a clamped GELU approximated by a sigmoid."""

    model_type = "gpt_oss"
    hf_class = "GptOssForCausalLM"
    router = "softmax"
    qkv_bias = ("on",)
    has_linear_bias = True
    has_attention_sinks = True
    activation = "quick_gelu"
    settings = ("sliding_window",)

    def architecture(self, model: ModelConfig) -> dict[str, Any]:
        """Return the keyword arguments of Megatron's TransformerConfig."""
        window = model.sliding_window
        return super().architecture(model) | {
            # Megatron counts only the positions before a token; our setting includes the token itself.
            "window_size": (window - 1, 0) if window else None,
            "window_attn_skip_freq": 2,
            "activation_func_clamp_value": LIMIT,
            "glu_linear_offset": 1.0,
        }

    def rules(self, model: ModelConfig, experts: ExpertLayout) -> Iterator[WeightRule]:
        """Yield the rules of all tensors; Hugging Face's experts are always fused."""
        yield from outer(model)
        hidden, num_experts = model.hidden_size, model.moe.num_experts
        for layer in decoder_layers(model):
            yield from self.attention_rules(model, layer)
            yield layer.vector("self_attention.linear_proj.bias", "self_attn.o_proj.bias", hidden)
            yield layer.vector("self_attention.core_attention.softmax_offset", "self_attn.sinks", model.num_heads)
            yield layer.vector("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", hidden)
            yield layer.matrix("mlp.router.weight", hidden, ("mlp.router.weight", num_experts))
            yield layer.vector("mlp.router.bias", "mlp.router.bias", num_experts)
            for expert in range(num_experts):
                yield from _expert(model, layer, expert)

    def from_hf(self, config: HfConfig) -> dict[str, Any]:
        require_keys(config, "num_key_value_heads", "head_dim")
        if not (config.get("rope_parameters") or config.get("rope_scaling")):
            # transformers would take the YaRN of the published models.
            needed(config, "rope_parameters")
        require(config, {"attention_bias": True, "swiglu_limit": LIMIT, "swiglu_alpha": ALPHA})
        arguments = common({**config, "attention_bias": False}, theta=150000.0)
        layers = arguments["num_layers"]
        alternate = ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)]
        types = config.get("layer_types") or alternate
        has_window = types != ["full_attention"] * layers
        if has_window and types != alternate:
            raise refusal(config, "layer_types", "has a window on the first and then on every second layer")
        if has_window:
            arguments["sliding_window"] = needed(config, "sliding_window")
        moe = {
            "num_experts": either(config, "num_local_experts", "num_experts"),
            "top_k": either(config, "num_experts_per_tok", "experts_per_token"),
            "ffn_hidden_size": arguments["ffn_hidden_size"],
            "aux_loss_coeff": config.get("router_aux_loss_coef", 1e-3),
        }
        return arguments | {"moe": moe}

    def to_hf(self, model: ModelConfig) -> dict[str, Any]:
        window = model.sliding_window
        first = "sliding_attention" if window else "full_attention"
        unscaled = {"rope_scaling": UNSCALED | {"original_max_position_embeddings": model.max_position}}
        return (unscaled if model.rope.scaling == "none" else {}) | {
            "attention_bias": True,
            "intermediate_size": model.moe.ffn_hidden_size,
            "num_local_experts": model.moe.num_experts,
            "num_experts_per_tok": model.moe.top_k,
            "router_aux_loss_coef": model.moe.aux_loss_coeff,
            # Without windows: transformers cannot run null, and vLLM has a window whatever `layer_types` are.
            "sliding_window": model.max_position if window is None else window,
            "layer_types": ["full_attention" if i % 2 else first for i in range(model.num_layers)],
            "swiglu_limit": LIMIT,
            "swiglu_alpha": ALPHA,
        }


def _expert(model: ModelConfig, layer: LayerNames, expert: int) -> Iterator[WeightRule]:
    """Yield the rules of one expert. Hugging Face's matrices are transposed; gate and up columns alternate."""
    hidden, width = model.hidden_size, model.moe.ffn_hidden_size
    slice_of_expert = replace(layer, index=(*layer.index, expert), lead=(*layer.lead, model.moe.num_experts))
    key, name = "mlp.experts.experts.linear_fc", layer.hf + "mlp.experts."
    for kind, suffix, row_in, row_out in (("weight", "", (hidden,), (width,)), ("bias", "_bias", (), ())):
        is_matrix = kind == "weight"
        gate_up = [
            HfRows(f"{name}gate_up_proj{suffix}", half, 2 * width, step=2, at=(expert,), transposed=is_matrix)
            for half in range(2)
        ]
        down = HfRows(f"{name}down_proj{suffix}", 0, hidden, at=(expert,), transposed=is_matrix)
        yield slice_of_expert.tensor(f"{key}1.{kind}", gate_up, row_in)
        yield slice_of_expert.tensor(f"{key}2.{kind}", [down], row_out)
