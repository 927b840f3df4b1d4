"""Qwen3 (arXiv 2505.09388), dense: Llama with normed queries and keys."""

from collections.abc import Iterator
from typing import Any

from mcore_rl.config.model import ModelConfig
from mcore_rl.families.family import Family, attention
from mcore_rl.families.hf_config import HfConfig, common, require
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
    require(config, {"use_sliding_window": False})
    return ModelConfig(family="qwen3", **common({"head_dim": 128} | dict(config)))


FAMILY = Family(
    name="qwen3",
    architecture=architecture,
    rules=rules,
    from_hf=from_hf,
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
