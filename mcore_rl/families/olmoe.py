"""OLMoE (arXiv 2409.02060): raw softmax gates; queries and keys are normed over all heads at once."""

from collections.abc import Iterator
from typing import Any

from mcore_rl.config.model import ModelConfig, MoEConfig
from mcore_rl.families.family import Family, attention, softmax_experts
from mcore_rl.families.hf_config import HfConfig, common, needed, refusal
from mcore_rl.families.rules import ExpertLayout, decoder_layers, feed_forward, grouped_query, outer
from mcore_rl.families.weight_map import WeightRule


def architecture(model: ModelConfig) -> dict[str, Any]:
    """Keyword arguments of Megatron's TransformerConfig."""
    return attention(model) | softmax_experts(model)


def rules(model: ModelConfig, experts: ExpertLayout) -> Iterator[WeightRule]:
    """The family's tensors on both sides."""
    yield from outer(model)
    for layer in decoder_layers(model):
        yield from grouped_query(model, layer)
        yield from feed_forward(model, layer, experts)


def from_hf(config: HfConfig) -> ModelConfig:
    """The model that a config.json describes."""
    if config.get("clip_qkv") is not None:
        raise refusal(config, "clip_qkv", "does not clip queries, keys and values")
    arguments = common(config)
    moe = MoEConfig(
        num_experts=config.get("num_experts") or needed(config, "num_local_experts"),
        top_k=needed(config, "num_experts_per_tok"),
        ffn_hidden_size=arguments["ffn_hidden_size"],
        normalize_top_k=bool(config.get("norm_topk_prob")),
        aux_loss_coeff=config.get("router_aux_loss_coef", 1e-2),
    )
    return ModelConfig(family="olmoe", moe=moe, **arguments)


FAMILY = Family(
    name="olmoe",
    architecture=architecture,
    rules=rules,
    from_hf=from_hf,
    tiny=ModelConfig(
        family="olmoe",
        num_layers=4,
        hidden_size=64,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        ffn_hidden_size=32,
        vocab_size=120,
        vocab_multiple=16,
        norm_eps=1e-5,
        moe=MoEConfig(num_experts=8, top_k=2, ffn_hidden_size=32, normalize_top_k=False, aux_loss_coeff=1e-2),
    ),
)
