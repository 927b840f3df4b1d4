"""What a family of models is to the rest of the code."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from mcore_rl.config.model import ModelConfig
from mcore_rl.families.hf_config import HfConfig
from mcore_rl.families.rules import ExpertLayout
from mcore_rl.families.weight_map import WeightRule


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """One architecture, Hugging Face's `model_type` of the same name."""

    name: str
    architecture: Callable[[ModelConfig], dict[str, Any]]
    """Keyword arguments of Megatron's config that make it."""
    rules: Callable[[ModelConfig, ExpertLayout], Iterator[WeightRule]]
    """How its tensors are made from Hugging Face's, and the other way round."""
    from_hf: Callable[[HfConfig], ModelConfig]
    """The model that a config.json describes; ConfigError where Megatron's has something else."""
    tiny: ModelConfig
    """The family at a size for tests."""
    mla: bool = False
    """Multi-head latent attention: Megatron's MLATransformerConfig."""


def attention(model: ModelConfig) -> dict[str, Any]:
    """Grouped-query attention with rotary positions."""
    return {
        "num_attention_heads": model.num_heads,
        "num_query_groups": model.num_kv_heads,
        "kv_channels": model.head_dim,
        "add_qkv_bias": model.has_qkv_bias,
        "qk_layernorm": model.has_qk_norm,
    }


def latent_attention(model: ModelConfig) -> dict[str, Any]:
    """Multi-head latent attention."""
    mla, rope = model.mla, model.rope
    yarn = rope.scaling == "yarn"
    return {
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
    }


def softmax_experts(model: ModelConfig) -> dict[str, Any]:
    """Experts chosen by softmax scores, with gates that are made to sum to one or not."""
    return _experts(model) | {"moe_router_pre_softmax": not model.moe.normalize_top_k}


def sigmoid_experts(model: ModelConfig) -> dict[str, Any]:
    """Experts chosen by sigmoid scores and a bias, with gates that are made to sum to one."""
    return _experts(model) | {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": model.moe.expert_bias,
        "moe_router_bias_update_rate": model.moe.expert_bias_rate,
    }


def _experts(model: ModelConfig) -> dict[str, Any]:
    moe = model.moe
    layers = [int(is_moe) for is_moe in model.moe_layers]
    return {
        "num_moe_experts": moe.num_experts,
        "moe_router_topk": moe.top_k,
        "moe_router_num_groups": moe.num_groups or None,
        "moe_router_group_topk": moe.top_groups or None,
        "moe_router_topk_scaling_factor": moe.routed_scaling if moe.routed_scaling != 1 else None,
        "moe_ffn_hidden_size": moe.ffn_hidden_size,
        "moe_shared_expert_intermediate_size": moe.shared_width or None,
        # An int keeps the checkpoint keys that Megatron-LM writes for a model whose layers are all alike.
        "moe_layer_freq": 1 if model.layers_alike else layers,
        "moe_router_load_balancing_type": moe.balance,
        "moe_aux_loss_coeff": 0.0 if moe.balance == "none" else moe.aux_loss_coeff,
        "moe_z_loss_coeff": moe.z_loss_coeff or None,
        "moe_expert_capacity_factor": moe.capacity_factor or None,
        "moe_router_dtype": "fp32",
        "moe_grouped_gemm": True,
    }
