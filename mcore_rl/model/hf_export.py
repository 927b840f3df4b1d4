"""Writing Hugging Face's config.json from ours: `model_from_hf` undone. The keys are those that transformers 4 and 5 read."""

from collections.abc import Callable
from typing import Any

from mcore_rl.config.model import ModelConfig
from mcore_rl.errors import ConfigError

Written = dict[str, Any]


def hf_config(model: ModelConfig) -> Written:
    """A config.json with which transformers opens the model; ConfigError for a family that is not known there."""
    if model.family not in FAMILIES:
        raise ConfigError(
            f"There is no way to write a config.json of the family {model.family}. Give a folder that has one: --reference."
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
            **temperatures,
        }
    return written


def _dense(model: ModelConfig) -> Written:
    return {"attention_bias": False}


def _llama(model: ModelConfig) -> Written:
    return {"attention_bias": False, "mlp_bias": False}


def _mixtral(model: ModelConfig) -> Written:
    return {
        "num_local_experts": model.moe.num_experts,
        "num_experts_per_tok": model.moe.top_k,
        "router_aux_loss_coef": model.moe.aux_loss_coeff,
        "sliding_window": None,
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


def _deepseek_v3(model: ModelConfig) -> Written:
    mla, moe = model.mla, model.moe
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
        "n_routed_experts": moe.num_experts,
        "n_shared_experts": moe.shared_experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.ffn_hidden_size,
        "moe_layer_freq": 1,
        "first_k_dense_replace": moe.first_dense_layers,
        "n_group": moe.num_groups or 1,
        "topk_group": moe.top_groups or 1,
        "routed_scaling_factor": moe.routed_scaling,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "num_nextn_predict_layers": model.mtp_layers,
    }


FAMILIES: dict[str, tuple[str, Callable[[ModelConfig], Written]]] = {
    "llama": ("LlamaForCausalLM", _llama),
    "qwen3": ("Qwen3ForCausalLM", _dense),
    "mixtral": ("MixtralForCausalLM", _mixtral),
    "qwen3_moe": ("Qwen3MoeForCausalLM", _qwen3_moe),
    "deepseek_v3": ("DeepseekV3ForCausalLM", _deepseek_v3),
}
"""By family: the class in transformers, and the keys that are its own."""
