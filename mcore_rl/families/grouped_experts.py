"""Grouped-query attention with experts as in DeepSeek-V3: GLM-4.5, dots.llm1, Solar Open."""

from typing import Any

from mcore_rl.config.model import ModelConfig
from mcore_rl.families import config_json as hf
from mcore_rl.families.config_json import HfConfig
from mcore_rl.families.family import GROUPED_EXPERTS, Family


class Glm4Moe(Family):
    """GLM-4.5: attention biases and norms differ between the published sizes."""

    model_type = "glm4_moe"
    hf_class = "Glm4MoeForCausalLM"
    has_score_class = False
    router = "sigmoid"
    qkv_bias = ("on", "off")
    qk_norm = ("off", "on")
    settings = (*GROUPED_EXPERTS, "moe.expert_bias", "mtp_layers", "rope.fraction")
    experts_in_group_score = 2

    def from_hf(self, config: HfConfig) -> dict[str, Any]:
        hf.require_keys(config, "num_key_value_heads")
        hf.require(config, {"norm_topk_prob": True})
        # In this family `attention_bias` means only queries, keys and values; `common` would refuse it.
        arguments = hf.common({**config, "attention_bias": False}, fraction=0.5)
        return arguments | {
            "qkv_bias": "on" if config.get("attention_bias") else "off",
            "qk_norm": "on" if config.get("use_qk_norm") else "off",
            "moe": hf.grouped_experts(config) | {"balance": "none", "expert_bias": True},
            "mtp_layers": hf.num_mtp_layers(config),
        }

    def to_hf(self, model: ModelConfig) -> dict[str, Any]:
        return hf.grouped_experts_to_hf(model) | {
            "attention_bias": self.has_qkv_bias(model),
            "use_qk_norm": self.has_qk_norm(model),
            "partial_rotary_factor": model.rope.fraction,
            "norm_topk_prob": True,
            "num_nextn_predict_layers": model.mtp_layers,
        }


class Dots1(Family):
    """dots.llm1: a bias on the choice of experts balances their load; every layer attends to all positions."""

    model_type = "dots1"
    hf_class = "Dots1ForCausalLM"
    has_score_class = False
    router = "sigmoid"
    qk_norm = ("on",)
    settings = (*GROUPED_EXPERTS, "moe.expert_bias")
    experts_in_group_score = 2

    def from_hf(self, config: HfConfig) -> dict[str, Any]:
        hf.require_keys(config, "num_key_value_heads", "norm_topk_prob")
        if config.get("norm_topk_prob") is not True:
            raise hf.refusal(config, "norm_topk_prob", "has only True")
        # Published configs have the balancing method in `scoring_func`; other models have the score function there.
        if config.get("scoring_func") != "noaux_tc":
            hf.require(config, {"scoring_func": "sigmoid"})
        arguments = hf.common(config)
        types, num_layers = config.get("layer_types"), arguments["num_layers"]
        if types is not None and types != ["full_attention"] * num_layers:
            raise hf.refusal(config, "layer_types", "attends to all positions in all layers")
        first = config.get("max_window_layers", 62)
        has_window = types is None and config.get("sliding_window", 4096) is not None
        if has_window and (first is None or first < num_layers):
            reason = f"has no window (sliding_window) in any of {num_layers} layers"
            raise hf.refusal(config, "max_window_layers", reason)
        moe = hf.grouped_experts({"n_group": 1, "topk_group": 1, **config})
        return arguments | {"moe": moe | {"balance": "none", "expert_bias": True}}

    def to_hf(self, model: ModelConfig) -> dict[str, Any]:
        return hf.grouped_experts_to_hf(model) | {
            "attention_bias": False,
            "norm_topk_prob": True,
            "scoring_func": "noaux_tc",
            "sliding_window": None,
            "max_window_layers": model.num_layers,
        }


class SolarOpen(Family):
    """Solar Open: a bias on the choice of experts balances their load; no layer is dense."""

    model_type = "solar_open"
    hf_class = "SolarOpenForCausalLM"
    has_score_class = False
    router = "sigmoid"
    qkv_bias = ("off", "on")
    settings = (*(name for name in GROUPED_EXPERTS if name != "moe.first_dense_layers"), "moe.expert_bias")
    experts_in_group_score = 2

    def from_hf(self, config: HfConfig) -> dict[str, Any]:
        hf.require_keys(config, "num_key_value_heads", "head_dim")
        hf.require(
            config,
            {
                "norm_topk_prob": True,
                "use_qk_norm": False,
                "first_k_dense_replace": 0,
                "num_nextn_predict_layers": 0,
                "scoring_func": "sigmoid",
                "topk_method": "noaux_tc",
            },
        )
        # In this family `attention_bias` means only queries, keys and values; the width of dense layers is unused.
        width = hf.needed(config, "moe_intermediate_size")
        arguments = hf.common({**config, "attention_bias": False, "intermediate_size": width}, theta=1e6)
        # Absent groups are none, as for transformers: published configs leave them out.
        moe = hf.grouped_experts({"n_group": 1, "topk_group": 1, **config, "first_k_dense_replace": 0})
        return arguments | {
            "qkv_bias": "on" if config.get("attention_bias") else "off",
            "moe": moe | {"balance": "none", "expert_bias": True},
        }

    def to_hf(self, model: ModelConfig) -> dict[str, Any]:
        return hf.grouped_experts_to_hf(model) | {
            "attention_bias": self.has_qkv_bias(model),
            "norm_topk_prob": True,
            "use_qk_norm": False,
        }
