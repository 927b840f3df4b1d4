"""Qwen3-MoE and Qwen2-MoE: softmax routing over many small experts, without a shared expert, or with a gated one."""

from typing import Any

from mcore_rl.config.model import ModelConfig
from mcore_rl.families import config_json as hf
from mcore_rl.families.config_json import HfConfig, common, qwen_experts, qwen_experts_to_hf, require, require_keys
from mcore_rl.families.family import Family
from mcore_rl.families.rules import MoENames


class Qwen3Moe(Family):
    """Qwen3-MoE: the first layers may be dense; there are no shared experts."""

    model_type = "qwen3_moe"
    hf_class = "Qwen3MoeForCausalLM"
    router = "softmax"
    qk_norm = ("on",)
    settings = ("moe.first_dense_layers",)

    def from_hf(self, config: HfConfig) -> dict[str, Any]:
        require_keys(config, "num_key_value_heads")
        require(config, {"use_sliding_window": False})
        return common(config) | {"moe": qwen_experts(config)}

    def to_hf(self, model: ModelConfig) -> dict[str, Any]:
        return {"attention_bias": False} | qwen_experts_to_hf(model)


class Qwen2Moe(Family):
    """Qwen2-MoE: a single shared expert with its own width."""

    model_type = "qwen2_moe"
    hf_class = "Qwen2MoeForCausalLM"
    router = "softmax"
    qkv_bias = ("on", "off")
    has_shared_expert_gate = True
    settings = ("moe.first_dense_layers", "moe.shared_experts", "moe.shared_ffn_hidden_size")
    moe_names = MoENames(shared="shared_expert")

    def from_hf(self, config: HfConfig) -> dict[str, Any]:
        hf.require_keys(config, "num_key_value_heads")
        hf.require(config, {"use_sliding_window": False})
        shared = {"shared_experts": 1, "shared_ffn_hidden_size": hf.needed(config, "shared_expert_intermediate_size")}
        return hf.common(config) | {
            "qkv_bias": "on" if config.get("qkv_bias", True) else "off",
            "moe": hf.qwen_experts(config) | shared,
        }

    def to_hf(self, model: ModelConfig) -> dict[str, Any]:
        return hf.qwen_experts_to_hf(model) | {
            "attention_bias": False,
            "qkv_bias": self.has_qkv_bias(model),
            "shared_expert_intermediate_size": model.moe.shared_width,
            "use_sliding_window": False,
        }
