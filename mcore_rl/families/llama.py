"""Llama (arXiv 2307.09288, 2407.21783): the plain dense decoder, described by the defaults of `Family`."""

from typing import Any

from mcore_rl.config.model import ModelConfig
from mcore_rl.families.family import Family
from mcore_rl.families.hf_config import HfConfig, common


class Llama(Family):
    """Llama: grouped-query attention, gated MLPs, no biases."""

    model_type = "llama"
    hf_class = "LlamaForCausalLM"

    def from_hf(self, config: HfConfig) -> dict[str, Any]:
        """Return the keyword arguments of ModelConfig."""
        return common(config)

    def to_hf(self, model: ModelConfig) -> dict[str, Any]:
        """Return the family's keys of config.json."""
        return {"attention_bias": False, "mlp_bias": False}
