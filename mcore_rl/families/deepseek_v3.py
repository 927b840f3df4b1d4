"""DeepSeek-V3 (arXiv 2412.19437), also Kimi-K2 and Moonlight: latent attention, sigmoid routing, shared experts."""

from collections.abc import Iterator
from typing import Any

from mcore_rl.config.model import MLAConfig, ModelConfig, MoEConfig
from mcore_rl.families.family import Family, latent_attention, sigmoid_experts
from mcore_rl.families.hf_config import (
    HfConfig,
    common,
    latents,
    many_experts,
    needed,
    num_mtp_layers,
    require,
)
from mcore_rl.families.rules import ExpertLayout, decoder_layers, feed_forward, latent, mtp, mtp_layers, outer
from mcore_rl.families.weight_map import WeightRule


def architecture(model: ModelConfig) -> dict[str, Any]:
    """Keyword arguments of Megatron's MLATransformerConfig."""
    return latent_attention(model) | sigmoid_experts(model)


def rules(model: ModelConfig, experts: ExpertLayout) -> Iterator[WeightRule]:
    """The family's tensors on both sides."""
    yield from outer(model)
    for layer in (*decoder_layers(model), *mtp_layers(model)):
        yield from latent(model, layer)
        yield from feed_forward(model, layer, experts)
    yield from mtp(model)


def from_hf(config: HfConfig) -> ModelConfig:
    """The model that a config.json describes."""
    require(
        config,
        {
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "norm_topk_prob": True,
            "moe_layer_freq": 1,
            "rope_interleave": True,
            "num_key_value_heads": needed(config, "num_attention_heads"),
        },
    )
    return ModelConfig(
        family="deepseek_v3",
        mla=latents(config),
        moe=MoEConfig(**many_experts(config), balance="none", expert_bias=True),
        mtp_layers=num_mtp_layers(config),
        **common(config),
    )


FAMILY = Family(
    name="deepseek_v3",
    architecture=architecture,
    rules=rules,
    from_hf=from_hf,
    mla=True,
    tiny=ModelConfig(
        family="deepseek_v3",
        num_layers=4,
        hidden_size=64,
        num_heads=4,
        num_kv_heads=4,
        head_dim=16,
        ffn_hidden_size=128,
        vocab_size=120,
        vocab_multiple=16,
        mla=MLAConfig(
            q_lora_rank=32, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16
        ),
        moe=MoEConfig(
            num_experts=8,
            top_k=4,
            ffn_hidden_size=32,
            shared_experts=1,
            first_dense_layers=1,
            num_groups=4,
            top_groups=2,
            routed_scaling=2.5,
            balance="seq_aux_loss",
            expert_bias=True,
        ),
    ),
)
