"""Reading Hugging Face's config.json: each setting is translated, or refused by name if our config has none for it."""

import math
from collections.abc import Mapping
from typing import Any

from mcore_rl.config.model import RopeConfig
from mcore_rl.errors import ConfigError

HfConfig = Mapping[str, Any]
LLAMA3_CONSTANTS = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""Parameters of Llama 3's wavelengths that Megatron has built in."""


def common(config: HfConfig, *, theta: float = 10000.0, fraction: float | None = None) -> dict[str, Any]:
    """Return the arguments of ModelConfig that all families take.

    Args:
        config: The content of config.json.
        theta: The family's default of rope_theta.
        fraction: The family's default of partial_rotary_factor; None for a family that has no such key.

    Raises:
        ConfigError: a key is absent, or has a value that Megatron's model has not.
    """
    require(config, {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False})
    heads = needed(config, "num_attention_heads")
    return {
        "num_layers": needed(config, "num_hidden_layers"),
        "hidden_size": needed(config, "hidden_size"),
        "num_heads": heads,
        "num_kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or needed(config, "hidden_size") // heads,
        "ffn_hidden_size": needed(config, "intermediate_size"),
        "vocab_size": needed(config, "vocab_size"),
        "max_position": needed(config, "max_position_embeddings"),
        "norm_eps": needed(config, "rms_norm_eps"),
        "tied_embeddings": bool(config.get("tie_word_embeddings")),
        "attention_dropout": float(config.get("attention_dropout") or 0.0),
        "init_std": config.get("initializer_range", 0.02),
        "rope": rope(config, theta, fraction),
    }


def grouped_experts(config: HfConfig) -> dict[str, Any]:
    """Return the arguments of MoEConfig that DeepSeek and the families after it name alike."""
    groups, chosen = config.get("n_group") or 1, config.get("topk_group") or 1
    # A choice among all groups restricts nothing, which our config writes as no groups.
    limited = chosen < groups
    return {
        "num_experts": config.get("n_routed_experts") or needed(config, "num_local_experts"),
        "top_k": needed(config, "num_experts_per_tok"),
        "ffn_hidden_size": needed(config, "moe_intermediate_size"),
        "shared_experts": config.get("n_shared_experts") or 0,
        "first_dense_layers": needed(config, "first_k_dense_replace"),
        "num_groups": groups if limited else None,
        "top_groups": chosen if limited else None,
        "routed_scaling": float(config.get("routed_scaling_factor") or 1.0),
    }


def qwen_experts(config: HfConfig) -> dict[str, Any]:
    """Return the arguments of MoEConfig that Qwen's families name alike."""
    return {
        # transformers 5 has another key for it.
        "num_experts": config.get("num_experts") or needed(config, "num_local_experts"),
        "top_k": needed(config, "num_experts_per_tok"),
        "ffn_hidden_size": needed(config, "moe_intermediate_size"),
        "first_dense_layers": _first_dense_layers(config, needed(config, "num_hidden_layers")),
        "normalize_top_k": bool(config.get("norm_topk_prob")),
        "aux_loss_coeff": config.get("router_aux_loss_coef", 1e-3),
    }


def latents(config: HfConfig) -> dict[str, Any]:
    """Return the arguments of MLAConfig: the widths of multi-head latent attention."""
    return {
        "q_lora_rank": config.get("q_lora_rank") or None,
        "kv_lora_rank": needed(config, "kv_lora_rank"),
        "qk_nope_head_dim": needed(config, "qk_nope_head_dim"),
        "qk_rope_head_dim": needed(config, "qk_rope_head_dim"),
        "v_head_dim": needed(config, "v_head_dim"),
    }


def num_mtp_layers(config: HfConfig) -> int:
    """Return the number of multi-token-prediction layers of the checkpoint."""
    return int(config.get("num_nextn_predict_layers", config.get("num_mtp_layers")) or 0)


def needed(config: HfConfig, name: str) -> Any:
    """Return the value of `name`; ConfigError when it is absent."""
    value = config.get(name)
    if value is None:
        raise ConfigError(
            f"config.json lacks {name}. Take the config.json that belongs to the weights, or add the "
            "value that they were trained with."
        )
    return value


def require(config: HfConfig, wanted: Mapping[str, Any]) -> None:
    """Raise ConfigError for a key that has another value than Megatron's model of the family; absent keys pass."""
    for name, value in wanted.items():
        found = config.get(name)
        if found is not None and found != value:
            raise refusal(config, name, f"has only {value!r}")


def refusal(config: HfConfig, name: str, reason: str) -> ConfigError:
    """Return the error that refuses the value of `name`; `reason` continues "Megatron's model of this family"."""
    return ConfigError(
        f"config.json has {name}={config.get(name)!r}, but Megatron's model of this family {reason}. These weights "
        "cannot be run there; changing the setting would make it another model."
    )


def rope(config: HfConfig, default_theta: float, default_fraction: float | None = None) -> RopeConfig:
    """Return the rotary positions, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling`.

    The defaults are the family's, as in `common`.
    """
    settings = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    name = "partial_rotary_factor"
    if default_fraction is None:
        require(config, {name: 1.0})
        require(settings, {name: 1.0})
    fraction = float(settings.get(name) or config.get(name) or default_fraction or 1.0)
    theta = float(settings.get("rope_theta") or config.get("rope_theta") or default_theta)
    kind = settings.get("rope_type") or settings.get("type") or "default"
    if kind == "default":
        return RopeConfig(theta=theta, fraction=fraction)
    if kind not in ("llama3", "yarn"):
        raise refusal({"rope_type": kind}, "rope_type", "knows only default, llama3 and yarn")
    longest = needed(config, "max_position_embeddings")
    # transformers gives the config's own key precedence over that of the rotary settings.
    name = "original_max_position_embeddings"
    settings[name] = config.get(name) or settings.get(name) or longest
    if kind == "yarn" and settings.get("factor") is None:
        settings["factor"] = longest / settings[name]
    settings["factor"] = float(needed(settings, "factor"))
    scaled = (_llama3 if kind == "llama3" else _yarn)(settings, theta)
    return scaled.model_copy(update={"fraction": fraction})


def _first_dense_layers(config: HfConfig, num_layers: int) -> int:
    """Return the number of layers without experts, by Qwen's two keys; ConfigError unless they are the first ones."""
    step, dense = config.get("decoder_sparse_step") or 1, config.get("mlp_only_layers") or []
    is_moe = [i not in dense and (i + 1) % step == 0 for i in range(num_layers)]
    first = is_moe.index(True) if True in is_moe else num_layers
    if not all(is_moe[first:]):
        name = "mlp_only_layers" if dense else "decoder_sparse_step"
        raise refusal(config, name, "has dense layers only before the first layer with experts")
    return first


def _llama3(settings: HfConfig, theta: float) -> RopeConfig:
    require(settings, LLAMA3_CONSTANTS)
    original = settings["original_max_position_embeddings"]
    return RopeConfig(theta=theta, scaling="llama3", factor=settings["factor"], original_length=original)


def _yarn(settings: HfConfig, theta: float) -> RopeConfig:
    factor = settings["factor"]
    mscale, all_dim = float(settings.get("mscale") or 0.0), float(settings.get("mscale_all_dim") or 0.0)
    if all_dim and not mscale:
        raise refusal(settings, "mscale_all_dim", "has it only together with mscale")
    if not all_dim:
        mscale = 1.0  # transformers reads mscale only beside mscale_all_dim
    temperature = _temperature(factor, mscale) / _temperature(factor, all_dim)
    if not math.isclose(settings.get("attention_factor") or temperature, temperature, rel_tol=1e-6):
        raise refusal(
            settings, "attention_factor", f"has {temperature}, which follows from factor and mscale"
        )
    return RopeConfig(
        theta=theta,
        scaling="yarn",
        factor=factor,
        original_length=settings["original_max_position_embeddings"],
        truncate=settings.get("truncate", True),
        beta_fast=float(settings.get("beta_fast") or 32.0),
        beta_slow=float(settings.get("beta_slow") or 1.0),
        mscale=mscale,
        mscale_all_dim=all_dim,
    )


def _temperature(factor: float, mscale: float) -> float:
    """Return YaRN's factor on queries and on keys, which grows with the context (arXiv 2309.00071, section 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
