"""Qwen3 (arXiv 2505.09388), dense: Llama with query and key norms."""

from typing import Any

from mcore_rl.config.model import ModelConfig
from mcore_rl.families.family import Family
from mcore_rl.families.hf_config import HfConfig, common, require, require_keys


class Qwen3(Family):
    """Qwen3: queries and keys are always normed, separately for each head."""

    model_type = "qwen3"
    hf_class = "Qwen3ForCausalLM"
    qk_norm = ("on",)

    def from_hf(self, config: HfConfig) -> dict[str, Any]:
        """Return the keyword arguments of ModelConfig; an absent head_dim is 128 in this family."""
        require_keys(config, "num_key_value_heads")
        require(config, {"use_sliding_window": False})
        return common({"head_dim": 128} | dict(config))

    def to_hf(self, model: ModelConfig) -> dict[str, Any]:
        """Return the family's keys of config.json."""
        return {"attention_bias": False}
