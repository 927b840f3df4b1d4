"""Qwen3 (arXiv 2505.09388), dense: Llama with normed queries and keys."""

from typing import Any

from mcore_rl.config.model import ModelConfig
from mcore_rl.model.family import Family, attention


def architecture(model: ModelConfig) -> dict[str, Any]:
    """Keyword arguments of Megatron's TransformerConfig."""
    return attention(model, qk_norms=True)


FAMILY = Family(
    name="qwen3",
    architecture=architecture,
    tiny=ModelConfig(
        family="qwen3",
        num_layers=4,
        hidden_size=64,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        ffn_hidden_size=128,
        vocab_size=120,
        vocab_multiple=16,
        tied_embeddings=True,
    ),
)
