"""Qwen3-MoE (arXiv 2505.09388): normed queries and keys, softmax routing over many small experts."""

from typing import Any

from mcore_rl.config.model import ModelConfig, MoEConfig
from mcore_rl.model.family import Family, attention, softmax_experts


def architecture(model: ModelConfig) -> dict[str, Any]:
    """Keyword arguments of Megatron's TransformerConfig."""
    return attention(model, qk_norms=True) | softmax_experts(model)


FAMILY = Family(
    name="qwen3_moe",
    architecture=architecture,
    tiny=ModelConfig(
        family="qwen3_moe",
        num_layers=4,
        hidden_size=64,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        ffn_hidden_size=128,
        vocab_size=120,
        vocab_multiple=16,
        moe=MoEConfig(num_experts=8, top_k=2, ffn_hidden_size=32, aux_loss_coeff=1e-2, z_loss_coeff=1e-3),
    ),
)
