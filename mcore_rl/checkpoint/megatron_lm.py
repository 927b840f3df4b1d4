"""What Megatron-LM would have written of a model among the arguments of a checkpoint: it checks its own by them."""

from argparse import Namespace
from typing import Any

from mcore_rl.config.model import ModelConfig
from mcore_rl.families import FAMILIES

FUNCTIONS = ("activation_func",)
"""Of Megatron-Core's config, for which Megatron-LM has switches."""


def model_args(model: ModelConfig) -> Namespace:
    """Plain values only, under the names of Megatron-LM's command line."""
    family = FAMILIES[model.family]
    architecture = family.architecture(model)
    # The one family whose experts have another activation than SwiGLU.
    is_quick = model.family == "gpt_oss"
    settings: dict[str, Any] = {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": model.ffn_hidden_size,
        "num_query_groups": 1,
        "group_query_attention": not family.mla,
        "multi_latent_attention": family.mla,
        "max_position_embeddings": model.max_position,
        "padded_vocab_size": model.padded_vocab_size,
        "untie_embeddings_and_output_weights": not model.tied_embeddings,
        "normalization": "RMSNorm",
        "norm_epsilon": model.norm_eps,
        "swiglu": not is_quick,
        "quick_geglu": is_quick,
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "qk_layernorm": False,
        "num_experts": model.moe.num_experts or None,
        "mtp_num_layers": model.mtp_layers or None,
    }
    plain = {name: value for name, value in architecture.items() if name not in FUNCTIONS}
    # Megatron-Core's config and Megatron-LM's command line have another name for the number of experts.
    plain.pop("num_moe_experts", None)
    return Namespace(**(settings | _positions(model) | plain))


def _positions(model: ModelConfig) -> dict[str, Any]:
    rope, latent = model.rope, FAMILIES[model.family].mla
    # Latent attention has its YaRN in rope_type.
    yarn = rope.scaling == "yarn" and not latent
    settings: dict[str, Any] = {
        "position_embedding_type": "yarn" if yarn else "rope",
        "rotary_base": rope.theta,
        "rotary_percent": rope.fraction,
        "use_rope_scaling": rope.scaling == "llama3",
        "rope_scaling_factor": rope.factor if rope.scaling == "llama3" else 8.0,
    }
    if yarn:
        settings |= {
            "yarn_rotary_scaling_factor": rope.factor,
            "yarn_original_max_position_embeddings": rope.original_length,
            "yarn_beta_fast": rope.beta_fast,
            "yarn_beta_slow": rope.beta_slow,
            "yarn_mscale": rope.mscale,
            "yarn_mscale_all_dim": rope.mscale_all_dim,
            "yarn_correction_range_round_to_int": rope.truncate,
        }
    return settings
