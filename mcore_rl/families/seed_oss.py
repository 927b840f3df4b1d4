"""Seed-OSS: a dense decoder with biases of queries, keys and values."""

from typing import Any

from mcore_rl.config.model import ModelConfig
from mcore_rl.families.family import Family
from mcore_rl.families.hf_config import HfConfig, common, require, require_keys

DROPOUT = 0.1
"""transformers' default for both dropout probabilities; published configs have the same value."""


class SeedOss(Family):
    """Seed-OSS: Llama with biases, and with dropout in training, which Megatron also applies to the embeddings."""

    model_type = "seed_oss"
    hf_class = "SeedOssForCausalLM"
    qkv_bias = ("on", "off")

    def from_hf(self, config: HfConfig) -> dict[str, Any]:
        """Return the keyword arguments of ModelConfig."""
        require_keys(config, "num_key_value_heads", "head_dim")
        require(config, {"attention_out_bias": False})
        # In this family `attention_bias` means only queries, keys and values; `common` would refuse it.
        arguments = common({"attention_dropout": DROPOUT, **config, "attention_bias": False})
        return arguments | {
            "qkv_bias": "on" if config.get("attention_bias", True) else "off",
            "hidden_dropout": float(config.get("residual_dropout", DROPOUT) or 0.0),
        }

    def to_hf(self, model: ModelConfig) -> dict[str, Any]:
        """Return the family's keys of config.json."""
        return {
            "attention_bias": self.has_qkv_bias(model),
            "attention_out_bias": False,
            "mlp_bias": False,
            "residual_dropout": model.hidden_dropout,
        }
