"""Dense decoders that differ little from Llama, which the defaults of `Family` describe."""

from typing import Any

from mcore_rl.config.model import ModelConfig
from mcore_rl.families.config_json import HfConfig, common, refusal, require, require_keys
from mcore_rl.families.family import Family

DROPOUT = 0.1
"""transformers' default for both dropout probabilities of Seed-OSS; published configs have the same value."""


class Llama(Family):
    """Llama (arXiv 2307.09288, 2407.21783): grouped-query attention, gated MLPs, no biases."""

    model_type = "llama"
    hf_class = "LlamaForCausalLM"

    def from_hf(self, config: HfConfig) -> dict[str, Any]:
        return common(config)

    def to_hf(self, model: ModelConfig) -> dict[str, Any]:
        return {"attention_bias": False, "mlp_bias": False}


class Mistral(Family):
    """Mistral (arXiv 2310.06825) with a window as long as its context or none, such as Nemo, Small and Codestral."""

    model_type = "mistral"
    hf_class = "MistralForCausalLM"

    def from_hf(self, config: HfConfig) -> dict[str, Any]:
        require_keys(config, "num_key_value_heads", "sliding_window")
        arguments = common(config)
        window = config["sliding_window"]
        if window is not None and window < arguments["max_position"]:
            raise refusal(config, "sliding_window", "attends to all positions")
        return arguments

    def to_hf(self, model: ModelConfig) -> dict[str, Any]:
        return {"sliding_window": None}


class Qwen2(Family):
    """Qwen2 and Qwen2.5 (arXiv 2407.10671): queries, keys and values always have biases."""

    model_type = "qwen2"
    hf_class = "Qwen2ForCausalLM"
    qkv_bias = ("on",)

    def from_hf(self, config: HfConfig) -> dict[str, Any]:
        require_keys(config, "num_key_value_heads")
        require(config, {"use_sliding_window": False})
        return common(config)

    def to_hf(self, model: ModelConfig) -> dict[str, Any]:
        return {"use_sliding_window": False}


class Qwen3(Family):
    """Qwen3 (arXiv 2505.09388): queries and keys are always normed, separately for each head."""

    model_type = "qwen3"
    hf_class = "Qwen3ForCausalLM"
    qk_norm = ("on",)

    def from_hf(self, config: HfConfig) -> dict[str, Any]:
        """Return the keyword arguments of ModelConfig; an absent head_dim is 128 in this family."""
        require_keys(config, "num_key_value_heads")
        require(config, {"use_sliding_window": False})
        return common({"head_dim": 128} | dict(config))

    def to_hf(self, model: ModelConfig) -> dict[str, Any]:
        return {"attention_bias": False}


class SeedOss(Family):
    """Seed-OSS: Llama with biases, and with dropout in training, which Megatron also applies to the embeddings."""

    model_type = "seed_oss"
    hf_class = "SeedOssForCausalLM"
    qkv_bias = ("on", "off")

    def from_hf(self, config: HfConfig) -> dict[str, Any]:
        require_keys(config, "num_key_value_heads", "head_dim")
        require(config, {"attention_out_bias": False})
        # In this family `attention_bias` means only queries, keys and values; `common` would refuse it.
        arguments = common({"attention_dropout": DROPOUT, **config, "attention_bias": False})
        return arguments | {
            "qkv_bias": "on" if config.get("attention_bias", True) else "off",
            "hidden_dropout": float(config.get("residual_dropout", DROPOUT) or 0.0),
        }

    def to_hf(self, model: ModelConfig) -> dict[str, Any]:
        return {
            "attention_bias": self.has_qkv_bias(model),
            "attention_out_bias": False,
            "mlp_bias": False,
            "residual_dropout": model.hidden_dropout,
        }
