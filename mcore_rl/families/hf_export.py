"""Writing Hugging Face's config.json from ours: `model_from_hf` undone, in keys that transformers 4 and 5 read."""

from collections.abc import Callable
from typing import Any

from mcore_rl.config.model import ModelConfig
from mcore_rl.errors import ConfigError

Written = dict[str, Any]


def hf_config(model: ModelConfig) -> Written:
    """A config.json with which transformers opens the model; ConfigError for a family that is not known there."""
    if model.family not in FAMILIES:
        raise ConfigError(
            f"No config.json can be written for the family {model.family}. Give a folder that has one: --reference."
        )
    architecture, own = FAMILIES[model.family]
    return {"architectures": [architecture], "model_type": model.family} | _common(model) | own(model)


def _common(model: ModelConfig) -> Written:
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
    } | _rope(model)


def _rope(model: ModelConfig) -> Written:
    rope = model.rope
    written: Written = {"rope_theta": rope.theta}
    if rope.scaling == "llama3":
        written["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": rope.factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
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
            **({} if rope.truncate else {"truncate": False}),
            **temperatures,
        }
    return written


def _dense(model: ModelConfig) -> Written:
    return {"attention_bias": False}


def _llama(model: ModelConfig) -> Written:
    return {"attention_bias": False, "mlp_bias": False}


def _mixtral(model: ModelConfig) -> Written:
    return {
        "intermediate_size": model.moe.ffn_hidden_size,
        "num_local_experts": model.moe.num_experts,
        "num_experts_per_tok": model.moe.top_k,
        "router_aux_loss_coef": model.moe.aux_loss_coeff,
        "sliding_window": None,
    }


def _qwen2(model: ModelConfig) -> Written:
    return {"use_sliding_window": False}


def _qwen2_moe(model: ModelConfig) -> Written:
    return _qwen3_moe(model) | {
        "qkv_bias": model.has_qkv_bias,
        "shared_expert_intermediate_size": model.moe.shared_width,
        "use_sliding_window": False,
    }


def _olmoe(model: ModelConfig) -> Written:
    if model.num_heads * model.head_dim != model.hidden_size:
        raise ConfigError(
            f"model.num_heads={model.num_heads} x model.head_dim={model.head_dim} is not "
            f"model.hidden_size={model.hidden_size}: transformers' olmoe has no other heads. Such a model cannot be "
            "exported; train one whose heads fill the hidden size."
        )
    return {
        "attention_bias": False,
        "clip_qkv": None,
        "intermediate_size": model.moe.ffn_hidden_size,
        "num_experts": model.moe.num_experts,
        "num_experts_per_tok": model.moe.top_k,
        "norm_topk_prob": model.moe.normalize_top_k,
        "router_aux_loss_coef": model.moe.aux_loss_coeff,
    }


def _gpt_oss(model: ModelConfig) -> Written:
    window = model.sliding_window
    first = "sliding_attention" if window else "full_attention"
    return {
        "attention_bias": True,
        "intermediate_size": model.moe.ffn_hidden_size,
        "num_local_experts": model.moe.num_experts,
        "num_experts_per_tok": model.moe.top_k,
        "router_aux_loss_coef": model.moe.aux_loss_coeff,
        "sliding_window": window or None,
        "layer_types": ["full_attention" if i % 2 else first for i in range(model.num_layers)],
        "swiglu_limit": 7.0,
    }


def _qwen3_moe(model: ModelConfig) -> Written:
    return {
        "attention_bias": False,
        "num_experts": model.moe.num_experts,
        "num_experts_per_tok": model.moe.top_k,
        "moe_intermediate_size": model.moe.ffn_hidden_size,
        "norm_topk_prob": model.moe.normalize_top_k,
        "router_aux_loss_coef": model.moe.aux_loss_coeff,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(range(model.moe.first_dense_layers)),
    }


def _many_experts(model: ModelConfig) -> Written:
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


def _latent(model: ModelConfig) -> Written:
    mla = model.mla
    return {
        "attention_bias": False,
        # What transformers calls a head here is the part that turns.
        "head_dim": mla.qk_rope_head_dim,
        "q_lora_rank": mla.q_lora_rank or None,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_nope_head_dim": mla.qk_nope_head_dim,
        "qk_rope_head_dim": mla.qk_rope_head_dim,
        "v_head_dim": mla.v_head_dim,
        "num_key_value_heads": model.num_heads,
        "moe_layer_freq": 1,
    }


def _deepseek_v2(model: ModelConfig) -> Written:
    return (
        _many_experts(model)
        | _latent(model)
        | {
            "norm_topk_prob": False,
            "scoring_func": "softmax",
            "topk_method": "group_limited_greedy" if model.moe.num_groups else "greedy",
            "aux_loss_alpha": model.moe.aux_loss_coeff,
            "seq_aux": model.moe.balance != "aux_loss",
        }
    )


def _deepseek_v3(model: ModelConfig) -> Written:
    return (
        _many_experts(model)
        | _latent(model)
        | {
            "norm_topk_prob": True,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "num_nextn_predict_layers": model.mtp_layers,
        }
    )


def _glm4_moe(model: ModelConfig) -> Written:
    return _many_experts(model) | {
        "attention_bias": model.has_qkv_bias,
        "use_qk_norm": model.has_qk_norm,
        "partial_rotary_factor": model.rope.fraction,
        "norm_topk_prob": True,
        "num_nextn_predict_layers": model.mtp_layers,
    }


FAMILIES: dict[str, tuple[str, Callable[[ModelConfig], Written]]] = {
    "llama": ("LlamaForCausalLM", _llama),
    "qwen3": ("Qwen3ForCausalLM", _dense),
    "mixtral": ("MixtralForCausalLM", _mixtral),
    "qwen3_moe": ("Qwen3MoeForCausalLM", _qwen3_moe),
    "deepseek_v3": ("DeepseekV3ForCausalLM", _deepseek_v3),
    "qwen2": ("Qwen2ForCausalLM", _qwen2),
    "qwen2_moe": ("Qwen2MoeForCausalLM", _qwen2_moe),
    "glm4_moe": ("Glm4MoeForCausalLM", _glm4_moe),
    "olmoe": ("OlmoeForCausalLM", _olmoe),
    "deepseek_v2": ("DeepseekV2ForCausalLM", _deepseek_v2),
    "gpt_oss": ("GptOssForCausalLM", _gpt_oss),
}
"""By family: the class in transformers, and the keys that are its own."""
