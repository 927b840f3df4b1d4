"""Mixtral and OLMoE: experts in every layer, chosen by a softmax of their scores."""

from typing import Any

from mcore_rl.config.model import ModelConfig
from mcore_rl.families.config_json import HfConfig, common, either, needed, refusal, require, require_keys
from mcore_rl.families.family import Family
from mcore_rl.families.rules import MoENames


class Mixtral(Family):
    """Mixtral (arXiv 2401.04088): few large experts, and a softmax over the chosen experts; its tensors have names of
    their own.
    """

    model_type = "mixtral"
    hf_class = "MixtralForCausalLM"
    router = "softmax"
    settings = ("moe.first_dense_layers",)
    moe_names = MoENames(prefix="block_sparse_moe.", gate="w1", up="w3", down="w2")

    def from_hf(self, config: HfConfig) -> dict[str, Any]:
        require_keys(config, "num_key_value_heads")
        if config.get("sliding_window") is not None:
            raise refusal(config, "sliding_window", "attends to all positions")
        arguments = common(config, theta=1e6)
        moe = {
            "num_experts": needed(config, "num_local_experts"),
            "top_k": needed(config, "num_experts_per_tok"),
            "ffn_hidden_size": arguments["ffn_hidden_size"],
            "aux_loss_coeff": config.get("router_aux_loss_coef", 1e-3),
        }
        return arguments | {"moe": moe}

    def to_hf(self, model: ModelConfig) -> dict[str, Any]:
        return {
            "intermediate_size": model.moe.ffn_hidden_size,
            "num_local_experts": model.moe.num_experts,
            "num_experts_per_tok": model.moe.top_k,
            "router_aux_loss_coef": model.moe.aux_loss_coeff,
            "sliding_window": None,
        }


class Olmoe(Family):
    """OLMoE (arXiv 2409.02060): raw softmax gates; queries and keys are normed over all heads at once."""

    model_type = "olmoe"
    hf_class = "OlmoeForCausalLM"
    has_score_class = False
    router = "softmax"
    qk_norm = ("on",)
    has_full_qk_norm = True
    settings = ("moe.first_dense_layers",)

    def from_hf(self, config: HfConfig) -> dict[str, Any]:
        if config.get("clip_qkv") is not None:
            raise refusal(config, "clip_qkv", "does not clip queries, keys and values")
        arguments = common(config)
        # Norms are as wide as the hidden size in transformers.
        require(config, {"head_dim": arguments["hidden_size"] // (arguments["num_heads"] or 1)})
        moe = {
            "num_experts": either(config, "num_experts", "num_local_experts"),
            "top_k": needed(config, "num_experts_per_tok"),
            "ffn_hidden_size": arguments["ffn_hidden_size"],
            "normalize_top_k": bool(config.get("norm_topk_prob")),
            "aux_loss_coeff": config.get("router_aux_loss_coef", 1e-2),
        }
        return arguments | {"moe": moe}

    def to_hf(self, model: ModelConfig) -> dict[str, Any]:
        return {
            "attention_bias": False,
            "clip_qkv": None,
            "intermediate_size": model.moe.ffn_hidden_size,
            "num_experts": model.moe.num_experts,
            "num_experts_per_tok": model.moe.top_k,
            "norm_topk_prob": model.moe.normalize_top_k,
            "router_aux_loss_coef": model.moe.aux_loss_coeff,
        }
