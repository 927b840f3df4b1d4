"""Llama (arXiv 2307.09288, 2407.21783): the plain dense decoder."""

from collections.abc import Iterator
from typing import Any

from mcore_rl.config.model import ModelConfig
from mcore_rl.families.family import Family, attention
from mcore_rl.families.hf_config import HfConfig, common
from mcore_rl.families.rules import ExpertLayout, decoder_layers, feed_forward, grouped_query, outer
from mcore_rl.families.weight_map import WeightRule


def architecture(model: ModelConfig) -> dict[str, Any]:
    """Keyword arguments of Megatron's TransformerConfig."""
    return attention(model)


def rules(model: ModelConfig, experts: ExpertLayout) -> Iterator[WeightRule]:
    """The family's tensors on both sides; it has no experts."""
    yield from outer(model)
    for layer in decoder_layers(model):
        yield from grouped_query(model, layer)
        yield from feed_forward(model, layer, experts)


def from_hf(config: HfConfig) -> ModelConfig:
    """The model that a config.json describes."""
    return ModelConfig(family="llama", **common(config))


FAMILY = Family(
    name="llama",
    architecture=architecture,
    rules=rules,
    from_hf=from_hf,
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
