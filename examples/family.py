"""A model family of your own: model.family = "examples.family:BiasedQwen3Moe".

A family is one class: its tables, and how its weights and its config.json correspond to Hugging Face's.
"""

from typing import Any

from mcore_rl.config.model import ModelConfig
from mcore_rl.families.qwen3_moe import Qwen3Moe


class BiasedQwen3Moe(Qwen3Moe):
    """Qwen3-MoE with biases of queries, keys and values, as Qwen2 has them.

    The checks, the memory plan, Megatron's layers, FLOPs, import and export follow from the one attribute.
    """

    model_type = "biased_qwen3_moe"
    hf_class = "BiasedQwen3MoeForCausalLM"
    qkv_bias = ("on",)

    def to_hf(self, model: ModelConfig) -> dict[str, Any]:
        """Return the keys of config.json; `attention_bias` would mean a bias of the output projection too."""
        return super().to_hf(model) | {"attention_bias": False}
