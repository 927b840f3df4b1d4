"""gpt-oss (arXiv 2508.10925): biases everywhere, attention sinks, every second layer sees a window only."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from mcore_rl.config.model import ModelConfig, MoEConfig, RopeConfig
from mcore_rl.families.family import Family, attention, softmax_experts
from mcore_rl.families.hf_config import HfConfig, common, needed, refusal, require
from mcore_rl.families.rules import ExpertLayout, LayerNames, decoder_layers, grouped_query, outer
from mcore_rl.families.weight_map import HfRows, WeightRule

LIMIT, ALPHA = 7.0, 1.702
"""Where the experts' activations are cut off, and the slope of their sigmoid, which Megatron has built in."""


def architecture(model: ModelConfig) -> dict[str, Any]:
    """Keyword arguments of Megatron's TransformerConfig."""
    window = model.sliding_window
    return (
        attention(model)
        | softmax_experts(model)
        | {
            "add_bias_linear": True,
            "softmax_type": "learnable",
            "window_size": (window - 1, 0) if window else None,
            "window_attn_skip_freq": 2,
            "activation_func": "quick_gelu",
            "activation_func_clamp_value": LIMIT,
            "glu_linear_offset": 1.0,
        }
    )


def rules(model: ModelConfig, experts: ExpertLayout) -> Iterator[WeightRule]:
    """The family's tensors on both sides; Hugging Face's experts are always fused."""
    yield from outer(model)
    for layer in decoder_layers(model):
        yield from grouped_query(model, layer)
        hidden, num_experts = model.hidden_size, model.moe.num_experts
        yield layer.vector("self_attention.linear_proj.bias", "self_attn.o_proj.bias", hidden)
        yield layer.vector("self_attention.core_attention.softmax_offset", "self_attn.sinks", model.num_heads)
        yield layer.vector("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", hidden)
        yield layer.matrix("mlp.router.weight", hidden, ("mlp.router.weight", num_experts))
        yield layer.vector("mlp.router.bias", "mlp.router.bias", num_experts)
        for e in range(num_experts):
            yield from _expert(model, layer, e)


def _expert(model: ModelConfig, layer: LayerNames, e: int) -> Iterator[WeightRule]:
    """Hugging Face multiplies from the left, and has columns of gate and up-projection in turn."""
    hidden, width = model.hidden_size, model.moe.ffn_hidden_size
    one = replace(layer, index=(*layer.index, e), lead=(*layer.lead, model.moe.num_experts))
    ours, theirs = "mlp.experts.experts.linear_fc", layer.hf + "mlp.experts."
    for kind, suffix, row_in, row_out in (("weight", "", (hidden,), (width,)), ("bias", "_bias", (), ())):
        is_matrix = kind == "weight"
        gate_up = [
            HfRows(f"{theirs}gate_up_proj{suffix}", half, 2 * width, step=2, at=(e,), transposed=is_matrix)
            for half in range(2)
        ]
        down = HfRows(f"{theirs}down_proj{suffix}", 0, hidden, at=(e,), transposed=is_matrix)
        yield one.tensor(f"{ours}1.{kind}", gate_up, row_in)
        yield one.tensor(f"{ours}2.{kind}", [down], row_out)


def from_hf(config: HfConfig) -> ModelConfig:
    """The model that a config.json describes."""
    require(config, {"attention_bias": True, "swiglu_limit": LIMIT, "swiglu_alpha": ALPHA})
    arguments = common({**config, "attention_bias": False}, theta=150000.0)
    layers = arguments["num_layers"]
    alternate = ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)]
    types = config.get("layer_types") or alternate
    has_window = types != ["full_attention"] * layers
    if has_window and types != alternate:
        raise refusal(config, "layer_types", "has a window on the first and then on every second layer")
    moe = MoEConfig(
        num_experts=config.get("num_local_experts") or needed(config, "num_experts"),
        top_k=config.get("num_experts_per_tok") or needed(config, "experts_per_token"),
        ffn_hidden_size=arguments["ffn_hidden_size"],
        aux_loss_coeff=config.get("router_aux_loss_coef", 1e-3),
    )
    window = needed(config, "sliding_window") if has_window else 0
    return ModelConfig(family="gpt_oss", sliding_window=window, moe=moe, **arguments)


FAMILY = Family(
    name="gpt_oss",
    architecture=architecture,
    rules=rules,
    from_hf=from_hf,
    tiny=ModelConfig(
        family="gpt_oss",
        num_layers=4,
        hidden_size=64,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        ffn_hidden_size=48,
        vocab_size=120,
        vocab_multiple=16,
        norm_eps=1e-5,
        sliding_window=8,
        rope=RopeConfig(theta=150000.0, scaling="yarn", factor=32.0, original_length=16, truncate=False),
        moe=MoEConfig(num_experts=8, top_k=2, ffn_hidden_size=48),
    ),
)
