"""Whether two configs describe the same model: find settings with which the same weights give other results."""

from collections.abc import Iterator, Mapping
from typing import Any

from mcore_rl.config.changes import ConfigChange, as_recorded, leaves
from mcore_rl.config.model import ModelConfig
from mcore_rl.families import family_of
from mcore_rl.families.family import Family

TRAINING_ONLY = (
    "path",
    *("attention_dropout", "hidden_dropout", "init_std", "vocab_multiple", "max_position"),
    *("head", "mtp_layers", "mtp_loss_coeff"),
    *("moe.balance", "moe.aux_loss_coeff", "moe.expert_bias_rate", "moe.z_loss_coeff"),
    *("moe.capacity_factor", "moe.dispatcher"),
)
"""Settings that do not change the results of the same weights, or that are evident from the tensors' names."""
YARN_ONLY = ("original_length", "truncate", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
"""Settings of `model.rope` that only YaRN reads."""


def model_changes(before: Mapping[str, Any], now: ModelConfig) -> list[ConfigChange]:
    """Return the changed settings with which the same weights would give other results, if both use them."""
    recorded, family = as_recorded(before, ModelConfig), family_of(now)
    here = _in_use(now, family)
    if isinstance(recorded, ModelConfig):
        there = _in_use(recorded, family)
    else:  # from a later version: compare the recorded values of the settings that both have
        plain = dict(leaves(now, "model."))
        there, here = dict(leaves(recorded, "model.")), {key: plain[key] for key in here}
    if now.head == "score":  # without an output layer
        here.pop("model.tied_embeddings")
    number, top = "model.moe.num_groups", "model.moe.top_groups"
    if all(settings.get(number) == settings.get(top) for settings in (here, there)):  # all groups, or none: no limit
        here = {key: value for key, value in here.items() if key not in (number, top)}
    return [
        ConfigChange(key=key, before=there[key], now=value)
        for key, value in here.items()
        if key in there and there[key] != value
    ]


def _in_use(model: ModelConfig, family: Family) -> dict[str, Any]:
    moe = model.moe
    each = moe.ffn_hidden_size if moe.shared_ffn_hidden_size == "auto" else moe.shared_ffn_hidden_size
    switches = {"qkv_bias": family.has_qkv_bias(model), "qk_norm": family.has_qk_norm(model)}
    settings = dict(leaves(model, "model.")) | {
        f"model.{name}": "on" if is_on else "off" for name, is_on in switches.items()
    }
    settings["model.moe.shared_ffn_hidden_size"] = each
    # A factor of 1 scales nothing, whatever the kind of scaling is called.
    if model.rope.factor == 1:
        settings["model.rope.scaling"] = "none"
    unused = {f"model.{name}" for name in (*TRAINING_ONLY, *_unused(model, family))}
    return {
        key: value
        for key, value in settings.items()
        if not any(key == name or key.startswith(f"{name}.") for name in unused)
    }


def _unused(model: ModelConfig, family: Family) -> Iterator[str]:
    yield from ("head_dim", "num_kv_heads") if family.is_latent else ("mla",)
    if not model.is_moe:
        yield from (f"moe.{name}" for name in type(model.moe).model_fields if name != "num_experts")
    elif all(model.moe_layers):
        yield "ffn_hidden_size"
    if not model.moe.shared_experts:
        yield "moe.shared_ffn_hidden_size"
    if model.indexer.top_k is None:
        yield "indexer"
    if model.delta.full_every is None:
        yield "delta"
    if model.rope.scaling != "yarn":
        yield from (f"rope.{name}" for name in YARN_ONLY)
    if model.rope.scaling == "none":
        yield "rope.factor"
