"""DeepSeek-V3 (arXiv 2412.19437), also Kimi-K2 and Moonlight: latent attention, sigmoid routing, shared experts."""

from collections.abc import Iterator
from typing import Any

from mcore_rl.config.model import MLAConfig, ModelConfig, MoEConfig
from mcore_rl.model.family import Family, experts
from mcore_rl.model.hf_config import HfConfig, common, needed, require
from mcore_rl.model.rules import ExpertLayout, decoder_layers, feed_forward, latent, mtp, mtp_layers, outer
from mcore_rl.model.weight_map import Rule


def architecture(model: ModelConfig) -> dict[str, Any]:
    """Keyword arguments of Megatron's MLATransformerConfig."""
    moe, mla, rope = model.moe, model.mla, model.rope
    yarn = rope.scaling == "yarn"
    return experts(model) | {
        "num_attention_heads": model.num_heads,
        "q_lora_rank": mla.q_lora_rank or None,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_head_dim": mla.qk_nope_head_dim,
        "qk_pos_emb_head_dim": mla.qk_rope_head_dim,
        "v_head_dim": mla.v_head_dim,
        "qk_layernorm": True,
        "rope_type": "yarn" if yarn else "rope",
        "rotary_base": rope.theta,
        # Megatron scales the softmax by these whatever rope_type says: 1 leaves it alone.
        "rotary_scaling_factor": rope.factor if yarn else 1.0,
        "original_max_position_embeddings": rope.original_length,
        "beta_fast": rope.beta_fast,
        "beta_slow": rope.beta_slow,
        "mscale": rope.mscale if yarn else 1.0,
        "mscale_all_dim": rope.mscale_all_dim if yarn else 1.0,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": moe.expert_bias,
        "moe_router_bias_update_rate": moe.expert_bias_rate,
        "moe_router_num_groups": moe.num_groups or None,
        "moe_router_group_topk": moe.top_groups or None,
        "moe_router_topk_scaling_factor": moe.routed_scaling,
        "moe_shared_expert_intermediate_size": moe.shared_experts * moe.ffn_hidden_size or None,
        "mtp_num_layers": model.mtp_layers or None,
        "mtp_loss_scaling_factor": model.mtp_loss_coeff,
    }


def rules(model: ModelConfig, experts: ExpertLayout) -> Iterator[Rule]:
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
    mla = MLAConfig(
        q_lora_rank=config.get("q_lora_rank") or 0,
        kv_lora_rank=needed(config, "kv_lora_rank"),
        qk_nope_head_dim=needed(config, "qk_nope_head_dim"),
        qk_rope_head_dim=needed(config, "qk_rope_head_dim"),
        v_head_dim=needed(config, "v_head_dim"),
    )
    mtp_count = config.get("num_nextn_predict_layers", config.get("num_mtp_layers")) or 0
    return ModelConfig(
        family="deepseek_v3", mla=mla, moe=_moe(config), mtp_layers=mtp_count, **common(config)
    )


def _moe(config: HfConfig) -> MoEConfig:
    groups, chosen = config.get("n_group") or 1, config.get("topk_group") or 1
    limited = chosen < groups
    return MoEConfig(
        num_experts=config.get("n_routed_experts") or needed(config, "num_local_experts"),
        top_k=needed(config, "num_experts_per_tok"),
        ffn_hidden_size=needed(config, "moe_intermediate_size"),
        shared_experts=config.get("n_shared_experts") or 0,
        first_dense_layers=needed(config, "first_k_dense_replace"),
        num_groups=groups if limited else 0,
        top_groups=chosen if limited else 0,
        routed_scaling=float(config.get("routed_scaling_factor") or 1.0),
        balance="none",
        expert_bias=True,
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
