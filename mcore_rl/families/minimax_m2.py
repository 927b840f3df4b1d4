"""MiniMax-M2 and later M2.x: norms over all heads at once, half a head rotated, sigmoid routing with a bias."""

from typing import Any

from mcore_rl.config.model import ModelConfig
from mcore_rl.families import config_json as hf
from mcore_rl.families.config_json import HfConfig
from mcore_rl.families.family import Family
from mcore_rl.families.rules import MoENames


class MiniMaxM2(Family):
    """MiniMax-M2: every layer has experts; the bias on their choice is a tensor next to the router's matrix."""

    model_type = "minimax_m2"
    hf_class = "MiniMaxM2ForCausalLM"
    has_score_class = False
    router = "sigmoid"
    qk_norm = ("on",)
    has_full_qk_norm = True
    settings = ("rope.fraction", "moe.expert_bias")
    moe_names = MoENames(prefix="block_sparse_moe.", gate="w1", up="w3", down="w2", bias="e_score_correction_bias")

    def from_hf(self, config: HfConfig) -> dict[str, Any]:
        """Return the arguments of ModelConfig. Published configs count MTP modules that no folder has."""
        hf.check_types(config, hf.KINDS)
        hf.require_keys(config, "num_key_value_heads", "head_dim")
        hf.require(
            config,
            {
                "scoring_func": "sigmoid",
                "use_routing_bias": True,
                "use_qk_norm": True,
                "qk_norm_type": "per_layer",
                "shared_intermediate_size": 0,
                "router_jitter_noise": 0.0,
            },
        )
        turned = config.get("rotary_dim")
        # Published configs have the number of rotated dimensions of a head; other configs have their fraction.
        stated = {
            "partial_rotary_factor": config.get("partial_rotary_factor"),
            "rotary_dim / head_dim": None if turned is None else turned / (config["head_dim"] or 1),
        }
        fraction = hf.alias(stated, *stated)
        arguments = hf.common({**config, "partial_rotary_factor": fraction}, theta=5e6, fraction=1.0)
        kinds = config.get("attn_type_list")
        if kinds is not None and kinds != [1] * arguments["num_layers"]:
            raise hf.refusal(config, "attn_type_list", "has softmax attention (1) in every layer")
        moe = {
            "num_experts": hf.either(config, "num_local_experts", "num_experts"),
            "top_k": hf.needed(config, "num_experts_per_tok"),
            "ffn_hidden_size": arguments["ffn_hidden_size"],
            "balance": "none",
            "expert_bias": True,
        }
        return arguments | {"moe": moe}

    def to_hf(self, model: ModelConfig) -> dict[str, Any]:
        return {
            "intermediate_size": model.moe.ffn_hidden_size,
            "num_local_experts": model.moe.num_experts,
            "num_experts_per_tok": model.moe.top_k,
            "rotary_dim": int(model.head_dim * model.rope.fraction),
            "scoring_func": "sigmoid",
            "use_routing_bias": True,
            "use_qk_norm": True,
            "qk_norm_type": "per_layer",
        }
