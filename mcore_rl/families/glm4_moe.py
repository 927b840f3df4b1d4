"""GLM-4.5 and later (arXiv 2508.06471): grouped-query attention that turns half a head, experts as DeepSeek-V3's."""

from collections.abc import Iterator
from typing import Any

from mcore_rl.config.model import ModelConfig, MoEConfig, RopeConfig
from mcore_rl.families.family import Family, attention, sigmoid_experts
from mcore_rl.families.hf_config import HfConfig, common, many_experts, num_mtp_layers, require
from mcore_rl.families.rules import (
    ExpertLayout,
    decoder_layers,
    feed_forward,
    grouped_query,
    mtp,
    mtp_layers,
    outer,
)
from mcore_rl.families.weight_map import WeightRule


def architecture(model: ModelConfig) -> dict[str, Any]:
    """Keyword arguments of Megatron's TransformerConfig."""
    return attention(model) | sigmoid_experts(model)


def rules(model: ModelConfig, experts: ExpertLayout) -> Iterator[WeightRule]:
    """The family's tensors on both sides."""
    yield from outer(model)
    for layer in (*decoder_layers(model), *mtp_layers(model)):
        yield from grouped_query(model, layer)
        yield from feed_forward(model, layer, experts)
    yield from mtp(model)


def from_hf(config: HfConfig) -> ModelConfig:
    """The model that a config.json describes."""
    require(config, {"norm_topk_prob": True})
    return ModelConfig(
        family="glm4_moe",
        # This family's attention_bias is of queries, keys and values alone, which `common` does not know.
        qkv_bias="on" if config.get("attention_bias") else "off",
        qk_norm="on" if config.get("use_qk_norm") else "off",
        moe=MoEConfig(**many_experts(config), balance="none", expert_bias=True),
        mtp_layers=num_mtp_layers(config),
        **common({**config, "attention_bias": False}, fraction=0.5),
    )


FAMILY = Family(
    name="glm4_moe",
    architecture=architecture,
    rules=rules,
    from_hf=from_hf,
    tiny=ModelConfig(
        family="glm4_moe",
        num_layers=4,
        hidden_size=64,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        ffn_hidden_size=128,
        vocab_size=120,
        vocab_multiple=16,
        qk_norm="on",
        rope=RopeConfig(fraction=0.5),
        moe=MoEConfig(
            num_experts=8,
            top_k=2,
            ffn_hidden_size=32,
            shared_experts=1,
            first_dense_layers=1,
            routed_scaling=2.5,
            balance="seq_aux_loss",
            expert_bias=True,
        ),
    ),
)
