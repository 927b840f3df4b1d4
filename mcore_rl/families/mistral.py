"""Mistral (arXiv 2310.06825), dense, without its window: Nemo, Small, Codestral, Devstral and Magistral as text."""

from typing import Any

from mcore_rl.config.model import ModelConfig
from mcore_rl.families.family import Family
from mcore_rl.families.hf_config import HfConfig, common, refusal, require_keys


class Mistral(Family):
    """Mistral: the same as Llama; a window as long as the context counts as no window."""

    model_type = "mistral"
    hf_class = "MistralForCausalLM"

    def from_hf(self, config: HfConfig) -> dict[str, Any]:
        """Return the keyword arguments of ModelConfig."""
        require_keys(config, "num_key_value_heads", "sliding_window")
        arguments = common(config)
        window = config["sliding_window"]
        if window is not None and window < arguments["max_position"]:
            raise refusal(config, "sliding_window", "attends to all positions")
        return arguments

    def to_hf(self, model: ModelConfig) -> dict[str, Any]:
        """Return the family's keys of config.json."""
        return {"sliding_window": None}
