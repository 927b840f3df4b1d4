"""Mixtral (arXiv 2401.04088): few large experts, with the softmax over the chosen experts."""

from typing import Any

from mcore_rl.config.model import ModelConfig
from mcore_rl.families.config_json import HfConfig, common, needed, refusal, require_keys
from mcore_rl.families.family import Family
from mcore_rl.families.rules import MoENames


class Mixtral(Family):
    """Mixtral: every layer has experts, with names of their own in Hugging Face's checkpoints."""

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
