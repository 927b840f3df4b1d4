"""Write Hugging Face's config.json from our config, with keys that both transformers 4 and 5 read."""

from typing import Any

from mcore_rl.config.model import ModelConfig
from mcore_rl.families.hf_config import ATTENDS, DELTA, LLAMA3_CONSTANTS


def common_to_hf(model: ModelConfig) -> dict[str, Any]:
    """Return the keys that all families have."""
    return {
        "hidden_act": "silu",
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "max_position_embeddings": model.max_position,
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tied_embeddings,
        "attention_dropout": model.attention_dropout,
        "initializer_range": model.init_std,
        "use_cache": True,
    } | _rope_to_hf(model)


def grouped_experts_to_hf(model: ModelConfig) -> dict[str, Any]:
    """Return the keys of the experts that DeepSeek and similar families share."""
    moe = model.moe
    return {
        "n_routed_experts": moe.num_experts,
        "n_shared_experts": moe.shared_experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.ffn_hidden_size,
        "first_k_dense_replace": moe.first_dense_layers,
        "n_group": moe.num_groups or 1,
        "topk_group": moe.top_groups or 1,
        "routed_scaling_factor": moe.routed_scaling,
    }


def qwen_experts_to_hf(model: ModelConfig) -> dict[str, Any]:
    """Return the keys of the experts that Qwen's families share."""
    moe = model.moe
    return {
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.ffn_hidden_size,
        "norm_topk_prob": moe.normalize_top_k,
        "router_aux_loss_coef": moe.aux_loss_coeff,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(range(moe.first_dense_layers)),
    }


def delta_nets_to_hf(model: ModelConfig) -> dict[str, Any]:
    """Return the keys of gated delta nets."""
    delta = model.delta
    return {
        "full_attention_interval": delta.full_every,
        "layer_types": [ATTENDS if mixer == "attention" else DELTA for mixer in model.mixers],
        "linear_num_key_heads": delta.key_heads,
        "linear_num_value_heads": delta.value_heads,
        "linear_key_head_dim": delta.key_dim,
        "linear_value_head_dim": delta.value_dim,
        "linear_conv_kernel_dim": delta.conv_width,
    }


def latents_to_hf(model: ModelConfig) -> dict[str, Any]:
    """Return the keys of multi-head latent attention."""
    mla = model.mla
    return {
        "attention_bias": False,
        # For latent attention, transformers' head_dim is the rotary part of a head.
        "head_dim": mla.qk_rope_head_dim,
        "q_lora_rank": mla.q_lora_rank,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_nope_head_dim": mla.qk_nope_head_dim,
        "qk_rope_head_dim": mla.qk_rope_head_dim,
        "v_head_dim": mla.v_head_dim,
        "num_key_value_heads": model.num_heads,
        "moe_layer_freq": 1,
    }


def _rope_to_hf(model: ModelConfig) -> dict[str, Any]:
    rope = model.rope
    written: dict[str, Any] = {"rope_theta": rope.theta}
    if rope.scaling == "llama3":
        written["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": rope.factor,
            **LLAMA3_CONSTANTS,
        }
    if rope.scaling == "yarn":
        temperatures = (
            {"mscale": rope.mscale, "mscale_all_dim": rope.mscale_all_dim} if rope.mscale_all_dim else {}
        )
        written["rope_scaling"] = {
            "rope_type": "yarn",
            "factor": rope.factor,
            "original_max_position_embeddings": rope.original_length,
            "beta_fast": rope.beta_fast,
            "beta_slow": rope.beta_slow,
            "truncate": rope.truncate,
            **temperatures,
        }
    return written
