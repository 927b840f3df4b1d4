"""DeepSeek-V2 (arXiv 2405.04434): latent attention, raw softmax gates, groups ranked by their best expert."""

from collections.abc import Iterator
from typing import Any

from mcore_rl.config.model import MLAConfig, ModelConfig, MoEConfig
from mcore_rl.families.family import Family, latent_attention, softmax_experts
from mcore_rl.families.hf_config import HfConfig, common, latents, many_experts, needed, refusal, require
from mcore_rl.families.rules import ExpertLayout, decoder_layers, feed_forward, latent, outer
from mcore_rl.families.weight_map import WeightRule


def architecture(model: ModelConfig) -> dict[str, Any]:
    """Keyword arguments of Megatron's MLATransformerConfig."""
    return latent_attention(model) | softmax_experts(model)


def rules(model: ModelConfig, experts: ExpertLayout) -> Iterator[WeightRule]:
    """The family's tensors on both sides."""
    yield from outer(model)
    for layer in decoder_layers(model):
        yield from latent(model, layer)
        yield from feed_forward(model, layer, experts)


def from_hf(config: HfConfig) -> ModelConfig:
    """The model that a config.json describes."""
    require(
        config,
        {
            "scoring_func": "softmax",
            "norm_topk_prob": False,
            "moe_layer_freq": 1,
            "num_key_value_heads": needed(config, "num_attention_heads"),
        },
    )
    moe = many_experts(config)
    method = config.get("topk_method") or "greedy"
    if method == "greedy":
        moe |= {"num_groups": 0, "top_groups": 0}
    elif method != "group_limited_greedy":
        raise refusal(config, "topk_method", "has only 'greedy' and 'group_limited_greedy'")
    return ModelConfig(
        family="deepseek_v2",
        mla=latents(config),
        moe=MoEConfig(
            **moe,
            normalize_top_k=False,
            balance="seq_aux_loss" if config.get("seq_aux", True) else "aux_loss",
            aux_loss_coeff=config.get("aux_loss_alpha", 1e-3),
        ),
        **common(config),
    )


FAMILY = Family(
    name="deepseek_v2",
    architecture=architecture,
    rules=rules,
    from_hf=from_hf,
    mla=True,
    tiny=ModelConfig(
        family="deepseek_v2",
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
            top_k=3,
            ffn_hidden_size=32,
            shared_experts=2,
            first_dense_layers=1,
            num_groups=4,
            top_groups=2,
            normalize_top_k=False,
            routed_scaling=4.0,
            balance="seq_aux_loss",
        ),
    ),
)
