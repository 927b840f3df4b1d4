"""The arguments that Megatron-LM would have written into a checkpoint of a model, by which it checks its own."""

from argparse import Namespace
from typing import Any

from mcore_rl.config.model import ModelConfig
from mcore_rl.families import family_of
from mcore_rl.families.family import yarn


def model_args(model: ModelConfig) -> Namespace:
    """Return the model's settings as plain values under the names of Megatron-LM's command line."""
    family = family_of(model)
    settings: dict[str, Any] = {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": model.ffn_hidden_size,
        "num_query_groups": 1,
        "group_query_attention": not family.is_latent,
        "multi_latent_attention": family.is_latent,
        "max_position_embeddings": model.max_position,
        "padded_vocab_size": model.padded_vocab_size,
        "untie_embeddings_and_output_weights": not model.tied_embeddings,
        "normalization": "RMSNorm",
        "norm_epsilon": model.norm_eps,
        "swiglu": family.activation == "silu",
        "quick_geglu": family.activation == "quick_gelu",
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "qk_layernorm": False,
        "num_experts": model.moe.num_experts or None,
        "mtp_num_layers": model.mtp_layers or None,
    }
    architecture = family.architecture(model)
    # Megatron-Core's config and Megatron-LM's command line have another name for the number of experts.
    architecture.pop("num_moe_experts", None)
    return Namespace(**(settings | _positions(model, is_latent=family.is_latent) | architecture))


def _positions(model: ModelConfig, *, is_latent: bool) -> dict[str, Any]:
    rope = model.rope
    # Latent attention has YaRN by rope_type.
    is_yarn = rope.scaling == "yarn" and not is_latent
    settings: dict[str, Any] = {
        "position_embedding_type": "yarn" if is_yarn else "rope",
        "rotary_base": rope.theta,
        "rotary_percent": rope.fraction,
        "use_rope_scaling": rope.scaling == "llama3",
        "rope_scaling_factor": rope.factor if rope.scaling == "llama3" else 8.0,
    }
    return settings | (yarn(model) if is_yarn else {})
