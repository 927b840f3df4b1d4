"""Mixtral (arXiv 2401.04088): few large experts, the softmax taken over the chosen ones."""

from collections.abc import Iterator
from typing import Any

from mcore_rl.config.model import ModelConfig, MoEConfig, RopeConfig
from mcore_rl.families.family import Family, attention, softmax_experts
from mcore_rl.families.hf_config import HfConfig, common, needed, refusal
from mcore_rl.families.rules import ExpertLayout, MoENames, decoder_layers, feed_forward, grouped_query, outer
from mcore_rl.families.weight_map import WeightRule

NAMES = MoENames(prefix="block_sparse_moe.", gate="w1", up="w3", down="w2")


def architecture(model: ModelConfig) -> dict[str, Any]:
    """Keyword arguments of Megatron's TransformerConfig."""
    return attention(model) | softmax_experts(model)


def rules(model: ModelConfig, experts: ExpertLayout) -> Iterator[WeightRule]:
    """The family's tensors on both sides."""
    yield from outer(model)
    for layer in decoder_layers(model):
        yield from grouped_query(model, layer)
        yield from feed_forward(model, layer, experts, NAMES)


def from_hf(config: HfConfig) -> ModelConfig:
    """The model that a config.json describes."""
    if config.get("sliding_window") is not None:
        raise refusal(config, "sliding_window", "attends to all positions")
    arguments = common(config, theta=1e6)
    moe = MoEConfig(
        num_experts=needed(config, "num_local_experts"),
        top_k=needed(config, "num_experts_per_tok"),
        ffn_hidden_size=arguments["ffn_hidden_size"],
        aux_loss_coeff=config.get("router_aux_loss_coef", 1e-3),
    )
    return ModelConfig(family="mixtral", moe=moe, **arguments)


FAMILY = Family(
    name="mixtral",
    architecture=architecture,
    rules=rules,
    from_hf=from_hf,
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
