"""Whether a model's settings agree with each other and with its family, on whatever mesh."""

from collections.abc import Iterator
from operator import attrgetter
from typing import Any

from mcore_rl.config.model import (
    MOE_FAMILIES,
    OFF,
    QK_NORM,
    QKV_BIAS,
    SIGMOID_FAMILIES,
    ModelConfig,
)
from mcore_rl.config.toml import toml_value
from mcore_rl.errors import ConfigError
from mcore_rl.families import model_from_hf
from mcore_rl.families.hf_config import HfConfig

LLAMA3_ORIGINAL_LENGTH = 8192
GROUPED = ("deepseek_v2", *SIGMOID_FAMILIES)
KNOWN_OF: dict[str, tuple[Any, tuple[str, ...]]] = {
    "mtp_layers": (0, SIGMOID_FAMILIES),
    "rope.fraction": (1.0, ("glm4_moe",)),
    "sliding_window": (0, ("gpt_oss",)),
    "moe.first_dense_layers": (0, tuple(family for family in MOE_FAMILIES if family != "gpt_oss")),
    "moe.shared_experts": (0, ("qwen2_moe", *GROUPED)),
    "moe.shared_ffn_hidden_size": (0, ("qwen2_moe",)),
    "moe.num_groups": (0, GROUPED),
    "moe.top_groups": (0, GROUPED),
    "moe.routed_scaling": (1.0, GROUPED),
    "moe.expert_bias": (False, SIGMOID_FAMILIES),
}
"""Settings that some families have, and the value that they have in the others."""
GROUP_SCORES = {"deepseek_v2": 1, "deepseek_v3": 2, "glm4_moe": 2}
"""By the sum of how many of its experts a family ranks a group."""


def checked_model_from_hf(config: HfConfig) -> ModelConfig:
    """Return the model that a config.json describes; ConfigError for what Megatron cannot represent or run."""
    model = model_from_hf(config)
    if violations := list(model_violations(model)):
        raise ConfigError("config.json describes a model that Megatron cannot run:\n" + "\n".join(violations))
    return model


def model_violations(model: ModelConfig) -> Iterator[str]:
    """One sentence for each disagreement."""
    yield from _family(model)
    yield from _shape(model)
    yield from _rope(model)
    if model.is_moe:
        yield from _router(model)
        yield from _groups(model)


def divisors(number: int) -> str:
    """What divides `number`, for a message: "1, 2, 4, 8"."""
    found = [str(i) for i in range(1, number + 1) if number % i == 0]
    return ", ".join(found if len(found) <= 10 else [*found[:8], "...", found[-1]])


def _family(model: ModelConfig) -> Iterator[str]:
    experts = model.moe.num_experts
    if model.family in MOE_FAMILIES and not experts:
        dense = "qwen3" if model.family == "qwen3_moe" else "llama"
        yield (
            f'model.family="{model.family}" is a Mixture of Experts, but model.moe.num_experts=0. Set it, or '
            f'use model.family="{dense}".'
        )
    if model.family not in MOE_FAMILIES and experts:
        yield (
            f'model.moe.num_experts={experts}, but model.family="{model.family}" is dense. Set it to 0, or '
            f"use one of the families {', '.join(MOE_FAMILIES)}."
        )
    yield from _features(model)


def _features(model: ModelConfig) -> Iterator[str]:
    """What the family does not have, or cannot be without."""
    for name, (neutral, families) in KNOWN_OF.items():
        value = attrgetter(name)(model)
        in_use = model.is_moe or not name.startswith("moe.")
        if in_use and value != neutral and model.family not in families:
            yield (
                f"model.{name}={toml_value(value)} is known of {', '.join(families)} only, not of "
                f'model.family="{model.family}". Set it to {toml_value(neutral)}.'
            )
    for name, choices in (("qkv_bias", QKV_BIAS), ("qk_norm", QK_NORM)):
        chosen = getattr(model, name)
        if chosen not in ("auto", *choices.get(model.family, OFF)):
            yield (
                f'model.{name}="{chosen}", but model.family="{model.family}" '
                f"{'never' if chosen == 'on' else 'always'} has them. Leave it out."
            )


def _shape(model: ModelConfig) -> Iterator[str]:
    if model.is_latent:
        if model.mla.qk_rope_head_dim % 2:
            yield (
                f"model.mla.qk_rope_head_dim={model.mla.qk_rope_head_dim} is odd: it is turned pairwise. "
                "Make it even."
            )
        return
    turned = int(model.head_dim * model.rope.fraction)
    if turned % 2 or not turned:
        part = f" x model.rope.fraction={model.rope.fraction}" if model.rope.fraction != 1 else ""
        yield (
            f"model.head_dim={model.head_dim}{part} is {'odd' if turned % 2 else 'nothing'}: rotary position "
            "turns it pairwise. Make it even."
        )
    if model.num_heads % model.num_kv_heads:
        yield (
            f"model.num_heads={model.num_heads} is not a multiple of "
            f"model.num_kv_heads={model.num_kv_heads}: each key/value head serves as many query heads. Set "
            f"model.num_kv_heads to one of {divisors(model.num_heads)}."
        )


def _rope(model: ModelConfig) -> Iterator[str]:
    rope = model.rope
    if rope.scaling == "none" and rope.factor != 1.0:
        yield (
            f'model.rope.factor={rope.factor} has no effect with model.rope.scaling="none". Set the scaling '
            'to "yarn" or "llama3", or the factor to 1.'
        )
    if rope.scaling != "none" and rope.factor < 1.0:
        yield f"model.rope.factor={rope.factor} would shrink the wavelengths. Set it to 1 or above."
    if rope.scaling == "yarn" and rope.fraction != 1:
        yield (
            f'model.rope.scaling="yarn" with model.rope.fraction={rope.fraction}: Megatron\'s YaRN turns whole '
            'heads. Use "none".'
        )
    if not rope.truncate and (rope.scaling != "yarn" or model.is_latent):
        yield (
            "model.rope.truncate=false is known of YaRN in grouped-query attention only. Set it to true, or use "
            'another model.family or model.rope.scaling="yarn".'
        )
    if rope.scaling == "llama3" and model.is_latent:
        yield (
            f'model.rope.scaling="llama3" is not known of {model.family}\'s attention. Use "yarn" or "none".'
        )
    elif rope.scaling == "llama3" and rope.original_length != LLAMA3_ORIGINAL_LENGTH:
        yield (
            f'model.rope.original_length={rope.original_length} with model.rope.scaling="llama3": Megatron '
            f"has {LLAMA3_ORIGINAL_LENGTH} built in. Set it to that."
        )


def _router(model: ModelConfig) -> Iterator[str]:
    moe = model.moe
    if not moe.ffn_hidden_size:
        yield "model.moe.ffn_hidden_size=0: an expert has no width. Set it."
    if moe.top_k > moe.num_experts:
        yield (
            f"model.moe.top_k={moe.top_k} is more than model.moe.num_experts={moe.num_experts}: a token "
            "cannot go to more experts than there are. Lower it."
        )
    if moe.first_dense_layers >= model.num_layers:
        yield (
            f"model.moe.first_dense_layers={moe.first_dense_layers} leaves none of model.num_layers="
            f"{model.num_layers} to the experts. Lower it, or use a dense family."
        )
    if moe.top_k == 1 and moe.normalize_top_k:
        yield (
            "model.moe.top_k=1 with model.moe.normalize_top_k=true: the one gate would be 1 whatever the "
            "router says, and it would not learn. Set model.moe.normalize_top_k=false."
        )
    if model.family in SIGMOID_FAMILIES and moe.top_k > 1 and not moe.normalize_top_k:
        yield (
            f"model.moe.normalize_top_k=false with model.moe.top_k={moe.top_k}: the gates of {model.family}'s "
            "sigmoid router always sum to one (times model.moe.routed_scaling). Set it to true."
        )
    if model.family == "deepseek_v2" and moe.normalize_top_k:
        yield (
            "model.moe.normalize_top_k=true: the gates of deepseek_v2 are the softmax's probabilities (times "
            "model.moe.routed_scaling). Set it to false."
        )
    if model.family == "qwen2_moe" and moe.shared_experts != 1:
        yield (
            f"model.moe.shared_experts={moe.shared_experts}: qwen2_moe has one shared expert, whose width is "
            "model.moe.shared_ffn_hidden_size. Set it to 1."
        )


def _groups(model: ModelConfig) -> Iterator[str]:
    moe = model.moe
    groups, chosen = moe.num_groups, moe.top_groups
    told = f"model.moe.num_groups={groups} and model.moe.top_groups={chosen}"
    if not (groups and chosen):
        if groups or chosen:
            yield f"{told}: group-limited routing needs both. Set the other, or both to 0."
        return
    if moe.num_experts % groups:
        yield (
            f"model.moe.num_experts={moe.num_experts} is not a multiple of model.moe.num_groups={groups}: "
            f"groups are equally large. Set model.moe.num_groups to one of {divisors(moe.num_experts)}."
        )
        return
    if chosen > groups:
        yield f"{told}: there are not so many groups to choose. Lower model.moe.top_groups."
        return
    if chosen * (moe.num_experts // groups) < moe.top_k:
        yield (
            f"{told} leave {chosen * (moe.num_experts // groups)} experts to choose from, fewer than "
            f"model.moe.top_k={moe.top_k}. Choose more groups."
        )
    # Megatron scores a group by its best top_k // top_groups experts, a family by a fixed number. Where all groups
    # are chosen their scores do not matter.
    best = GROUP_SCORES.get(model.family)
    if best and chosen < groups and moe.top_k // chosen != best:
        yield (
            f"model.moe.top_k={moe.top_k} with model.moe.top_groups={chosen}: Megatron would score a group "
            f"by its best {moe.top_k // chosen} experts, {model.family} is defined by the best {best}. Choose "
            f"top_k = {best} x top_groups."
        )
