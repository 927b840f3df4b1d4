"""Qwen1.5-MoE and Qwen2-MoE (arXiv 2407.10671): raw softmax gates, and a shared expert with a sigmoid gate."""

from collections.abc import Iterator
from typing import Any

from mcore_rl.config.model import ModelConfig, MoEConfig
from mcore_rl.families.family import Family, attention, softmax_experts
from mcore_rl.families.hf_config import HfConfig, common, first_dense_layers, needed, require
from mcore_rl.families.rules import ExpertLayout, MoENames, decoder_layers, feed_forward, grouped_query, outer
from mcore_rl.families.weight_map import WeightRule

NAMES = MoENames(shared="shared_expert", shared_gate="shared_expert_gate")


def architecture(model: ModelConfig) -> dict[str, Any]:
    """Keyword arguments of Megatron's TransformerConfig."""
    return attention(model) | softmax_experts(model) | {"moe_shared_expert_gate": True}


def rules(model: ModelConfig, experts: ExpertLayout) -> Iterator[WeightRule]:
    """The family's tensors on both sides."""
    yield from outer(model)
    for layer in decoder_layers(model):
        yield from grouped_query(model, layer)
        yield from feed_forward(model, layer, experts, NAMES)


def from_hf(config: HfConfig) -> ModelConfig:
    """The model that a config.json describes."""
    require(config, {"use_sliding_window": False})
    arguments = common(config)
    moe = MoEConfig(
        num_experts=config.get("num_experts") or needed(config, "num_local_experts"),
        top_k=needed(config, "num_experts_per_tok"),
        ffn_hidden_size=needed(config, "moe_intermediate_size"),
        shared_experts=1,
        shared_ffn_hidden_size=needed(config, "shared_expert_intermediate_size"),
        first_dense_layers=first_dense_layers(config, arguments["num_layers"]),
        normalize_top_k=bool(config.get("norm_topk_prob")),
        aux_loss_coeff=config.get("router_aux_loss_coef", 1e-3),
    )
    return ModelConfig(
        family="qwen2_moe",
        qkv_bias="on" if config.get("qkv_bias", True) else "off",
        moe=moe,
        **arguments,
    )


FAMILY = Family(
    name="qwen2_moe",
    architecture=architecture,
    rules=rules,
    from_hf=from_hf,
    tiny=ModelConfig(
        family="qwen2_moe",
        num_layers=4,
        hidden_size=64,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        ffn_hidden_size=128,
        vocab_size=120,
        vocab_multiple=16,
        moe=MoEConfig(
            num_experts=8,
            top_k=2,
            ffn_hidden_size=32,
            shared_experts=1,
            shared_ffn_hidden_size=96,
            normalize_top_k=False,
        ),
    ),
)
