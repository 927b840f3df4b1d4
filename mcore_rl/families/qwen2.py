"""Qwen2 and Qwen2.5 (arXiv 2407.10671), dense: Llama with biases of queries, keys and values."""

from typing import Any

from mcore_rl.config.model import ModelConfig
from mcore_rl.families.family import Family
from mcore_rl.families.hf_config import HfConfig, common, require, require_keys


class Qwen2(Family):
    """Qwen2: queries, keys and values always have biases."""

    model_type = "qwen2"
    hf_class = "Qwen2ForCausalLM"
    qkv_bias = ("on",)

    def from_hf(self, config: HfConfig) -> dict[str, Any]:
        """Return the keyword arguments of ModelConfig."""
        require_keys(config, "num_key_value_heads")
        require(config, {"use_sliding_window": False})
        return common(config)

    def to_hf(self, model: ModelConfig) -> dict[str, Any]:
        """Return the family's keys of config.json."""
        return {"use_sliding_window": False}
