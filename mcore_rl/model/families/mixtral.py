"""Mixtral (arXiv 2401.04088): few large experts, the softmax taken over the chosen ones."""

from typing import Any

from mcore_rl.config.model import ModelConfig, MoEConfig, RopeConfig
from mcore_rl.model.family import Family, attention, softmax_experts


def architecture(model: ModelConfig) -> dict[str, Any]:
    """Keyword arguments of Megatron's TransformerConfig."""
    return attention(model, qk_norms=False) | softmax_experts(model)


FAMILY = Family(
    name="mixtral",
    architecture=architecture,
    tiny=ModelConfig(
        family="mixtral",
        num_layers=4,
        hidden_size=64,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        ffn_hidden_size=64,
        vocab_size=120,
        vocab_multiple=16,
        norm_eps=1e-5,
        rope=RopeConfig(theta=1e6),
        moe=MoEConfig(num_experts=4, top_k=2, ffn_hidden_size=64),
    ),
)
