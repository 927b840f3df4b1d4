"""Qwen3-MoE (arXiv 2505.09388): query and key norms, softmax routing over many small experts."""

from typing import Any

from mcore_rl.config.model import ModelConfig
from mcore_rl.families.config_json import HfConfig, common, qwen_experts, qwen_experts_to_hf, require, require_keys
from mcore_rl.families.family import Family


class Qwen3Moe(Family):
    """Qwen3-MoE: the first layers may be dense; there are no shared experts."""

    model_type = "qwen3_moe"
    hf_class = "Qwen3MoeForCausalLM"
    router = "softmax"
    qk_norm = ("on",)
    settings = ("moe.first_dense_layers",)

    def from_hf(self, config: HfConfig) -> dict[str, Any]:
        """Return the keyword arguments of ModelConfig."""
        require_keys(config, "num_key_value_heads")
        require(config, {"use_sliding_window": False})
        return common(config) | {"moe": qwen_experts(config)}

    def to_hf(self, model: ModelConfig) -> dict[str, Any]:
        """Return the family's keys of config.json."""
        return {"attention_bias": False} | qwen_experts_to_hf(model)
