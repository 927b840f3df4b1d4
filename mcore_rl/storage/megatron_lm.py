"""The arguments of Megatron-LM's command line in its checkpoints: written as for one of its own, and compared."""

from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mcore_rl.config.changes import ConfigChange
from mcore_rl.config.model import ModelConfig
from mcore_rl.families import family_of
from mcore_rl.families.family import Family, yarn
from mcore_rl.families.same_model import model_changes
from mcore_rl.storage.checkpoint import COMMON, OWN_ENTRY
from mcore_rl.storage.foreign import load_common

ABSENT: dict[str, tuple[Any, ...]] = {
    "rotary_interleaved": (False, None),
    "rotary_seq_len_interpolation_factor": (None, 1),
    "no_rope_freq": (None,),
    "moe_apply_probs_on_input": (False, None),
    "normalization": ("RMSNorm",),
}
"""Arguments for which every family of this package has these values, though the tensors' shapes would be the same."""


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
    # Megatron-Core's config and Megatron-LM's command line have other names for the number of experts and for norms.
    architecture.pop("num_moe_experts", None)
    if architecture.pop("layernorm_zero_centered_gamma", False):
        settings["apply_layernorm_1p"] = True
    if "linear_attention_freq" in architecture:
        settings["experimental_attention_variant"] = "gated_delta_net"
    if model.indexer.top_k is not None:
        settings |= {
            "experimental_attention_variant": "dsa",
            "dsa_indexer_n_heads": model.indexer.heads,
            "dsa_indexer_head_dim": model.indexer.width,
            "dsa_indexer_topk": model.indexer.top_k,
        }
    rope = model.rope
    is_yarn = rope.scaling == "yarn" and not family.is_latent  # latent attention has YaRN by rope_type
    settings |= {
        "position_embedding_type": "yarn" if is_yarn else "rope",
        "rotary_base": rope.theta,
        "rotary_percent": rope.fraction,
        "use_rope_scaling": rope.scaling == "llama3",
        "rope_scaling_factor": rope.factor if rope.scaling == "llama3" else 8.0,
    }
    return Namespace(**(settings | (yarn(model) if is_yarn else {}) | architecture))


SHARDING_METADATA = {
    "singleton_local_shards": False,
    # Megatron's default cannot be saved any more, and `dp_reshardable` cannot be loaded on another mesh.
    "distrib_optim_sharding_type": "fully_reshardable",
    "chained_optim_avoid_prefix": True,
}
"""Megatron's switches for the layout of a state, which in this package is the same on every mesh."""


def common_state(
    model: ModelConfig, mesh: Mapping[str, int], world_size: int, step: int, own: dict[str, Any]
) -> dict[str, Any]:
    """Return the state that all ranks of a mesh share: what Megatron-LM looks for, and OWN_ENTRY."""
    args = model_args(model)
    args.tensor_model_parallel_size = mesh["tp"]
    args.pipeline_model_parallel_size = mesh["pp"]
    args.world_size = world_size
    args.data_parallel_size = mesh["dp"]
    args.ckpt_format = "torch_dist"
    # Random states are saved here by rank and mesh; Megatron-LM would look for them by tensor and pipeline rank.
    args.no_save_rng = True
    return {
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": step,
        "content_metadata": dict(SHARDING_METADATA),
        OWN_ENTRY: own,
    }


def hybrid_args(model: ModelConfig) -> dict[str, Any]:
    """Return HybridModel's own arguments; without a pattern Megatron-LM 0.19 expects GPTModel's names."""
    pattern = "".join("*E" if is_moe else "*-" for is_moe in model.moe_layers)
    return {"num_layers": len(pattern), "hybrid_layer_pattern": pattern, "moe_layer_freq": 1}


def read_args(path: Path) -> dict[str, Any]:
    """Return the plain values among the arguments in a checkpoint; none where its writer has left none."""
    common = path / COMMON
    args = load_common(common.read_bytes(), str(common)).get("args") if common.is_file() else None
    found = vars(args) if isinstance(args, Namespace) else {}
    return {name: value for name, value in found.items() if _is_plain(value)}


def args_changes(args: Mapping[str, Any], model: ModelConfig) -> list[ConfigChange]:
    """Return the settings by which Megatron-LM, with these arguments, computes something else of the same weights."""
    family = family_of(model)
    before = model.model_dump(mode="json")
    for key, value in _settings(args, model, family):
        *section, name = key.split(".")
        (before[section[0]] if section else before)[name] = value
    changes = model_changes(before, model)
    return changes + [
        ConfigChange(key="model.family", before=said, now=model.family) for said in _foreign(args, family)
    ]


def _settings(args: Mapping[str, Any], model: ModelConfig, family: Family) -> Iterator[tuple[str, Any]]:
    """Yield the fields of `model` that arguments decide, with the values that these stand for."""
    names = {
        "norm_epsilon": "norm_eps",
        "rotary_base": "rope.theta",
        "rotary_percent": "rope.fraction",
        "moe_router_topk": "moe.top_k",
        "moe_router_num_groups": "moe.num_groups",
        "moe_router_group_topk": "moe.top_groups",
    }
    if "delta" in model.mixers:
        names |= {f"linear_num_{part}_heads": f"delta.{part}_heads" for part in ("key", "value")}
    if model.indexer.top_k is not None:
        names |= {"dsa_indexer_n_heads": "indexer.heads", "dsa_indexer_topk": "indexer.top_k"}
    yield from ((field, args[name]) for name, field in names.items() if name in args)
    if "moe_router_topk_scaling_factor" in args:
        yield "moe.routed_scaling", args["moe_router_topk_scaling_factor"] or 1.0
    if "moe_router_pre_softmax" in args and family.router == "softmax":
        yield "moe.normalize_top_k", not args["moe_router_pre_softmax"]
    if "window_size" in args:
        yield "sliding_window", args["window_size"] and args["window_size"][0] + 1
    yield from _latent_rope(args) if family.is_latent else _rope(args)


def _rope(args: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    if args.get("position_embedding_type") == "yarn":
        # Megatron-LM's YaRN turns whole heads whatever rotary_percent is.
        yield from (("rope.scaling", "yarn"), ("rope.fraction", 1.0))
        yield from _yarn(args, "yarn_rotary_scaling_factor", "yarn_")
        if "yarn_correction_range_round_to_int" in args:
            yield "rope.truncate", args["yarn_correction_range_round_to_int"]
    elif args.get("use_rope_scaling"):
        yield from (("rope.scaling", "llama3"), ("rope.factor", args.get("rope_scaling_factor", 8.0)))
    elif "position_embedding_type" in args or "use_rope_scaling" in args:
        yield "rope.scaling", "none"


def _latent_rope(args: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    if "rope_type" not in args:
        return
    # Without the argument it is YaRN, and YaRN of the factor 1 is none.
    if args["rope_type"] == "rope" or args.get("rotary_scaling_factor", 1) == 1:
        yield "rope.scaling", "none"
    else:
        yield "rope.scaling", "yarn"
        yield from _yarn(args, "rotary_scaling_factor", "")


def _yarn(args: Mapping[str, Any], factor: str, prefix: str) -> Iterator[tuple[str, Any]]:
    names = {
        factor: "factor",
        f"{prefix}original_max_position_embeddings": "original_length",
        f"{prefix}beta_fast": "beta_fast",
        f"{prefix}beta_slow": "beta_slow",
        f"{prefix}mscale": "mscale",
        f"{prefix}mscale_all_dim": "mscale_all_dim",
    }
    yield from ((f"rope.{field}", args[name]) for name, field in names.items() if name in args)


def _foreign(args: Mapping[str, Any], family: Family) -> Iterator[str]:
    wanted = dict(ABSENT)
    wanted["apply_layernorm_1p"] = (True,) if family.has_zero_centered_norms else (False, None)
    if family.router != "none":
        wanted["moe_router_score_function"] = (family.router,)
    if "swiglu" in args:
        wanted |= {"swiglu": (family.activation == "silu",)}
    for name, values in wanted.items():
        if name in args and args[name] not in values:
            yield f"{name}={args[name]}"


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)
