"""Llama (arXiv 2307.09288, 2407.21783): the plain dense decoder."""

from typing import Any

from mcore_rl.config.model import ModelConfig
from mcore_rl.model.family import Family, attention


def architecture(model: ModelConfig) -> dict[str, Any]:
    """Keyword arguments of Megatron's TransformerConfig."""
    return attention(model, qk_norms=False)


FAMILY = Family(
    name="llama",
    architecture=architecture,
    tiny=ModelConfig(
        family="llama",
        num_layers=4,
        hidden_size=64,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        ffn_hidden_size=128,
        vocab_size=120,
        vocab_multiple=16,
        tied_embeddings=False,
    ),
)
