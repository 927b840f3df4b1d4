"""Read and write Hugging Face's config.json: each setting is translated, or refused by name if our config has none."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from mcore_rl.config.model import ModelConfig, RopeConfig
from mcore_rl.errors import ConfigError

HfConfig = Mapping[str, Any]
LLAMA3_CONSTANTS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Parameters of Llama 3's rotary scaling that are built into Megatron."""
ATTENDS, DELTA = "full_attention", "linear_attention"
"""Layer types of models with gated delta nets."""
LATENT_WIDTHS = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
"""Keys of latent attention, which are fields of MLAConfig too."""
DELTA_WIDTHS = {
    "key_heads": "linear_num_key_heads",
    "value_heads": "linear_num_value_heads",
    "key_dim": "linear_key_head_dim",
    "value_dim": "linear_value_head_dim",
    "conv_width": "linear_conv_kernel_dim",
}
"""Field of DeltaConfig -> key of gated delta nets."""
MAX_LAYERS = 10_000
"""Largest number of layers, as for model.num_layers, because code iterates over them."""


class Kind(NamedTuple):
    """Values that a key of config.json may have."""

    description: str
    includes: Callable[[object], bool]


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


WHOLE = Kind("a whole number", _is_whole)
LAYERS = Kind(
    f"a whole number of at most {MAX_LAYERS}",
    lambda value: isinstance(value, int) and _is_whole(value) and value <= MAX_LAYERS,
)
NUMBER = Kind("a number", lambda value: _is_whole(value) or (isinstance(value, float) and math.isfinite(value)))
SIZE = Kind("a whole number other than 0", lambda value: _is_whole(value) and value != 0)
FACTOR = Kind("a number other than 0", lambda value: NUMBER.includes(value) and value != 0)
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
LIST = Kind("a list", lambda value: isinstance(value, list))
OBJECT = Kind("an object", lambda value: isinstance(value, Mapping))
KINDS = {
    name: kind
    for kind, names in (
        (LAYERS, "num_hidden_layers"),
        # Where null stands for a default, 0 does not.
        (SIZE, "num_key_value_heads head_dim rotary_dim q_lora_rank n_group topk_group decoder_sparse_step"),
        (FACTOR, "rope_theta partial_rotary_factor routed_scaling_factor attention_factor beta_fast beta_slow"),
        (WHOLE, "hidden_size num_attention_heads vocab_size intermediate_size moe_intermediate_size"),
        (WHOLE, "shared_expert_intermediate_size max_position_embeddings original_max_position_embeddings"),
        (WHOLE, "sliding_window kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim"),
        (WHOLE, "num_experts num_local_experts n_routed_experts n_shared_experts num_experts_per_tok"),
        (WHOLE, "experts_per_token first_k_dense_replace"),
        (WHOLE, "num_mtp_layers num_nextn_predict_layers mtp_num_hidden_layers max_window_layers"),
        (WHOLE, "linear_num_key_heads linear_num_value_heads linear_key_head_dim linear_value_head_dim"),
        (WHOLE, "linear_conv_kernel_dim full_attention_interval"),
        (WHOLE, "index_topk index_n_heads index_head_dim index_topk_freq index_skip_topk_offset"),
        (NUMBER, "rms_norm_eps attention_dropout initializer_range router_aux_loss_coef aux_loss_alpha"),
        (NUMBER, "factor mscale mscale_all_dim residual_dropout"),
        (FLAG, "tie_word_embeddings attention_bias mlp_bias qkv_bias use_qk_norm norm_topk_prob seq_aux"),
        (FLAG, "use_sliding_window truncate attn_output_gate mtp_use_dedicated_embeddings"),
        (FLAG, "rope_interleave indexer_rope_interleave"),
        (LIST, "layer_types mlp_only_layers mlp_layer_types attn_type_list indexer_types"),
    )
    for name in names.split()
}
"""Kind of each key that is read, including the keys of rotary positions."""
BESIDE_ROPE_SETTINGS = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
"""Keys of rotary positions that a config has in its object of rotary settings, next to this object, or in both."""


def check_types(config: HfConfig, kinds: Mapping[str, Kind]) -> None:
    """Raise ConfigError for a value not of its key's kind; null passes. A string is no flag: "false" would be true."""
    for name, kind in kinds.items():
        value = config.get(name)
        if value is not None and not kind.includes(value):
            raise ConfigError(
                f"config.json has {name}={value!r}; wanted {kind.description}. Correct it as the weights have it."
            )


def common(config: HfConfig, *, theta: float = 10000.0, fraction: float | None = None) -> dict[str, Any]:
    """Return the arguments of ModelConfig that all families have; `theta` and `fraction` are the family's defaults of
    rope_theta and partial_rotary_factor (None: no such key). Raises ConfigError for absent, ill-typed or unsupported
    values.
    """
    check_types(config, KINDS)
    require(config, {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False})
    heads = needed(config, "num_attention_heads")
    return {
        "num_layers": needed(config, "num_hidden_layers"),
        "hidden_size": needed(config, "hidden_size"),
        "num_heads": heads,
        "num_kv_heads": config.get("num_key_value_heads") or heads,
        # ModelConfig refuses 0 heads.
        "head_dim": config.get("head_dim") or needed(config, "hidden_size") // (heads or 1),
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
    """Return the arguments of MoEConfig, from the keys that DeepSeek and similar families share."""
    check_types(config, KINDS)
    require_keys(config, "n_group", "topk_group", "n_shared_experts", "routed_scaling_factor")
    groups, chosen = config.get("n_group") or 1, config.get("topk_group") or 1
    # A choice among all groups restricts nothing; our config writes this as no groups.
    limited = chosen < groups
    return {
        "num_experts": either(config, "n_routed_experts", "num_local_experts"),
        "top_k": needed(config, "num_experts_per_tok"),
        "ffn_hidden_size": needed(config, "moe_intermediate_size"),
        "shared_experts": config.get("n_shared_experts") or 0,
        "first_dense_layers": needed(config, "first_k_dense_replace"),
        "num_groups": groups if limited else None,
        "top_groups": chosen if limited else None,
        "routed_scaling": float(config.get("routed_scaling_factor") or 1.0),
    }


def qwen_experts(config: HfConfig) -> dict[str, Any]:
    """Return the arguments of MoEConfig, from the keys that Qwen's families share."""
    return {
        # transformers 5 uses another key.
        "num_experts": either(config, "num_experts", "num_local_experts"),
        "top_k": needed(config, "num_experts_per_tok"),
        "ffn_hidden_size": needed(config, "moe_intermediate_size"),
        "first_dense_layers": _first_dense_layers(config, needed(config, "num_hidden_layers")),
        "normalize_top_k": bool(config.get("norm_topk_prob")),
        "aux_loss_coeff": config.get("router_aux_loss_coef", 1e-3),
    }


def delta_nets(config: HfConfig) -> dict[str, Any]:
    """Return the arguments of DeltaConfig: the widths of gated delta nets, and which layers use attention instead."""
    check_types(config, KINDS)
    every, num_layers = config.get("full_attention_interval"), needed(config, "num_hidden_layers")
    if (kinds := config.get("layer_types")) is not None:
        first = kinds.index(ATTENDS) + 1 if ATTENDS in kinds else num_layers + 1
        every = first if every is None else every
        wanted = [ATTENDS if every and (layer + 1) % every == 0 else DELTA for layer in range(num_layers)]
        if kinds != wanted:
            raise refusal(config, "layer_types", f"attends in every layer of a number divisible by {every}")
    return {
        "full_every": 4 if every is None else every,
        **{name: needed(config, key) for name, key in DELTA_WIDTHS.items()},
    }


def latents(config: HfConfig) -> dict[str, Any]:
    """Return the arguments of MLAConfig: the widths of multi-head latent attention."""
    require_keys(config, "q_lora_rank")
    return {"q_lora_rank": config.get("q_lora_rank") or None} | {name: needed(config, name) for name in LATENT_WIDTHS}


def num_mtp_layers(config: HfConfig) -> int:
    """Return the number of multi-token-prediction layers in the checkpoint."""
    return int(alias(config, "num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers") or 0)


def needed(config: HfConfig, name: str) -> Any:
    """Return the value of `name`. Raises ConfigError if it is absent."""
    value = config.get(name)
    if value is None:
        raise ConfigError(
            f"config.json lacks {name}. Take the config.json that belongs to the weights, or add the "
            "value that they were trained with."
        )
    return value


def either(config: HfConfig, *names: str) -> Any:
    """Return the value of a setting with several names. Raises ConfigError if it is absent or contradictory."""
    value = alias(config, *names)
    return needed(config, names[0]) if value is None else value


def require_keys(config: HfConfig, *names: str) -> None:
    """Raise ConfigError if a key is absent, as transformers' default is some model's value. Null passes."""
    for name in names:
        if name not in config:
            needed(config, name)


def require(config: HfConfig, wanted: Mapping[str, Any]) -> None:
    """Raise ConfigError if a key has a value that Megatron's model of the family does not have; absent keys pass."""
    for name, value in wanted.items():
        found = config.get(name)
        if found is not None and found != value:
            raise refusal(config, name, f"has only {value!r}")


def refusal(config: HfConfig, name: str, reason: str) -> ConfigError:
    """Return the error that refuses the value of `name`; `reason` completes "Megatron's model of this family ..."."""
    return ConfigError(
        f"config.json has {name}={config.get(name)!r}, but Megatron's model of this family {reason}. These weights "
        "cannot be run there; changing the setting would make it another model."
    )


def rope(config: HfConfig, default_theta: float, default_fraction: float | None = None) -> RopeConfig:
    """Return the rotary positions, from `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (4),
    with the family's defaults. Raises ConfigError if they contradict each other or Megatron lacks them.
    """
    given: dict[str, dict[str, Any]] = {}
    for name in ("rope_parameters", "rope_scaling"):
        found = config.get(name) or {}
        if not isinstance(found, Mapping) or any(isinstance(value, Mapping) for value in found.values()):
            reason = "has the same positions in all layers, which one object of plain values describes"
            raise refusal(config, name, reason)
        check_types(found, KINDS)
        if settings := {key: value for key, value in found.items() if value is not None}:
            given[name] = settings
    stated: dict[str, Any] = {}
    places = {"": config} | {f"{name}.": settings for name, settings in given.items()}
    for key in BESIDE_ROPE_SETTINGS:
        values = {place + key: known[key] for place, known in places.items() if known.get(key) is not None}
        if values:
            stated[key] = _agreed(values)
    read = {
        name: _rope_of(config, settings | stated, default_theta, default_fraction)
        for name, settings in (given or {"rope_theta": {}}).items()
    }
    one, *others = read.values()
    if others and others[0] != one:
        fields = [field for field, value in one if getattr(others[0], field) != value]
        raise _contradiction([f"{name}={config[name]}" for name in read], f" They differ in {', '.join(fields)}.")
    return one


def alias(config: HfConfig, *names: str) -> Any:
    """Return the value of a setting with several names, None if absent; ConfigError if their values differ."""
    values = {name: config[name] for name in names if config.get(name) is not None}
    return _agreed(values) if values else None


def _rope_of(
    config: HfConfig, settings: dict[str, Any], default_theta: float, default_fraction: float | None
) -> RopeConfig:
    if default_fraction is None:
        require(settings, {"partial_rotary_factor": 1.0})
    fraction = float(settings.get("partial_rotary_factor") or default_fraction or 1.0)
    theta = float(settings.get("rope_theta") or default_theta)
    kind = alias(settings, "rope_type", "type") or "default"
    if kind == "default":
        # Without a rope type, the factor would be ignored.
        require(settings, {"factor": 1.0})
        return RopeConfig(theta=theta, fraction=fraction)
    if kind not in ("llama3", "yarn"):
        raise refusal({"rope_type": kind}, "rope_type", "knows only default, llama3 and yarn")
    # As in transformers: without its own key, the length before the scaling is max_position_embeddings.
    settings.setdefault("original_max_position_embeddings", needed(config, "max_position_embeddings"))
    settings["factor"] = float(needed(settings, "factor"))
    if kind == "yarn":
        scaled = _yarn(settings, theta)
    else:
        require_keys(settings, "low_freq_factor", "high_freq_factor")
        require(settings, LLAMA3_CONSTANTS)
        original = settings["original_max_position_embeddings"]
        scaled = RopeConfig(theta=theta, scaling="llama3", factor=settings["factor"], original_length=original)
    return scaled.model_copy(update={"fraction": fraction})


def _agreed(values: Mapping[str, Any]) -> Any:
    first, *others = values.values()
    if any(other != first for other in others):
        raise _contradiction([f"{name}={value!r}" for name, value in values.items()])
    return first


def _contradiction(keys: Sequence[str], differences: str = "") -> ConfigError:
    return ConfigError(
        f"config.json contradicts itself: {' beside '.join(keys)}.{differences} Which of them counts depends on the "
        "program that reads it, and the model with it. Keep the one that the weights were trained with."
    )


def _first_dense_layers(config: HfConfig, num_layers: int) -> int:
    """Return the number of layers without experts, from Qwen's two keys. Raises ConfigError unless they come first."""
    step, dense = config.get("decoder_sparse_step") or 1, config.get("mlp_only_layers") or []
    is_moe = [i not in dense and (i + 1) % step == 0 for i in range(num_layers)]
    first = is_moe.index(True) if True in is_moe else num_layers
    if not all(is_moe[first:]):
        name = "mlp_only_layers" if dense else "decoder_sparse_step"
        raise refusal(config, name, "has dense layers only before the first layer with experts")
    return first


def _yarn(settings: HfConfig, theta: float) -> RopeConfig:
    factor = settings["factor"]
    mscale, all_dim = float(settings.get("mscale") or 0.0), float(settings.get("mscale_all_dim") or 0.0)
    if all_dim and not mscale:
        raise refusal(settings, "mscale_all_dim", "has it only together with mscale")
    if not all_dim:
        mscale = 1.0  # transformers reads mscale only together with mscale_all_dim
    temperature = _temperature(factor, mscale) / _temperature(factor, all_dim)
    if not math.isclose(settings.get("attention_factor") or temperature, temperature, rel_tol=1e-6):
        raise refusal(settings, "attention_factor", f"has {temperature}, which follows from factor and mscale")
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
    """Return YaRN's factor on queries and keys, which grows with the context (arXiv 2309.00071, section 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def common_to_hf(model: ModelConfig) -> dict[str, Any]:
    """Return the keys that all families have."""
    return {
        "hidden_act": "silu",
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "max_position_embeddings": model.max_position,
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tied_embeddings,
        "attention_dropout": model.attention_dropout,
        "initializer_range": model.init_std,
        "use_cache": True,
    } | _rope_to_hf(model)


def grouped_experts_to_hf(model: ModelConfig) -> dict[str, Any]:
    """Return the keys of the experts that DeepSeek and similar families share."""
    moe = model.moe
    return {
        "n_routed_experts": moe.num_experts,
        "n_shared_experts": moe.shared_experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.ffn_hidden_size,
        "first_k_dense_replace": moe.first_dense_layers,
        "n_group": moe.num_groups or 1,
        "topk_group": moe.top_groups or 1,
        "routed_scaling_factor": moe.routed_scaling,
    }


def qwen_experts_to_hf(model: ModelConfig) -> dict[str, Any]:
    """Return the keys of the experts that Qwen's families share."""
    moe = model.moe
    return {
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.ffn_hidden_size,
        "norm_topk_prob": moe.normalize_top_k,
        "router_aux_loss_coef": moe.aux_loss_coeff,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(range(moe.first_dense_layers)),
    }


def delta_nets_to_hf(model: ModelConfig) -> dict[str, Any]:
    """Return the keys of gated delta nets."""
    delta = model.delta
    return {
        "full_attention_interval": delta.full_every,
        "layer_types": [ATTENDS if mixer == "attention" else DELTA for mixer in model.mixers],
        **{key: getattr(delta, name) for name, key in DELTA_WIDTHS.items()},
    }


def latents_to_hf(model: ModelConfig) -> dict[str, Any]:
    """Return the keys of multi-head latent attention."""
    mla = model.mla
    return {
        "attention_bias": False,
        # For latent attention, transformers' head_dim is the rotary part of a head.
        "head_dim": mla.qk_rope_head_dim,
        **{name: getattr(mla, name) for name in ("q_lora_rank", *LATENT_WIDTHS)},
        "num_key_value_heads": model.num_heads,
        "moe_layer_freq": 1,
    }


def _rope_to_hf(model: ModelConfig) -> dict[str, Any]:
    rope = model.rope
    written: dict[str, Any] = {"rope_theta": rope.theta}
    if rope.scaling == "llama3":
        written["rope_scaling"] = {"rope_type": "llama3", "factor": rope.factor, **LLAMA3_CONSTANTS}
    if rope.scaling == "yarn":
        temperatures = {"mscale": rope.mscale, "mscale_all_dim": rope.mscale_all_dim} if rope.mscale_all_dim else {}
        written["rope_scaling"] = {
            "rope_type": "yarn",
            "factor": rope.factor,
            "original_max_position_embeddings": rope.original_length,
            "beta_fast": rope.beta_fast,
            "beta_slow": rope.beta_slow,
            "truncate": rope.truncate,
            **temperatures,
        }
    return written
