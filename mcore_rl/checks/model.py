"""Checks that a model's settings are compatible with each other and with its family, on any mesh."""

from collections.abc import Iterator
from math import isqrt
from operator import attrgetter
from typing import Any

from mcore_rl.config.model import ModelConfig
from mcore_rl.config.toml import toml_value
from mcore_rl.errors import ConfigError
from mcore_rl.families import all_families, family_of, hf_config, model_from_hf
from mcore_rl.families.family import OPTIONAL_SETTINGS, Family
from mcore_rl.families.hf_config import LLAMA3_CONSTANTS, HfConfig
from mcore_rl.families.same_model import model_changes
from mcore_rl.families.weight_map import listed

MAX_DIVISOR = 10_000
"""Largest divisor to try for a message, so that a misspelt width of 10^18 is refused at once too."""


def checked_model_from_hf(config: HfConfig, family: str | None = None) -> ModelConfig:
    """Return the model that a config.json describes, as `model_from_hf` does, after it has passed the checks.

    Raises:
        ConfigError: If Megatron cannot represent the model, or cannot run it.
    """
    model = model_from_hf(config, family)
    if violations := list(model_violations(model)):
        raise ConfigError("config.json describes a model that Megatron cannot run:\n" + "\n".join(violations))
    return model


def checked_hf_config(model: ModelConfig) -> dict[str, Any]:
    """Return a config.json as `hf_config` does. Raises ConfigError unless it is read back as the same model."""
    written = hf_config(model)
    try:
        changes = model_changes(model.model_dump(mode="json"), model_from_hf(written, model.family))
        # In transformers' models, biases of the choice of experts are zero where a folder has none.
        faults = [str(change) for change in changes if change.key != "model.moe.expert_bias"]
    except ConfigError as error:
        faults = [str(error)]
    if faults:
        raise ConfigError(
            f"transformers' {written['architectures'][0]} cannot be this model, which can neither be exported nor "
            f"served: its config.json would be another model's.\n{listed(faults)}"
        )
    return written


def model_violations(model: ModelConfig) -> Iterator[str]:
    """Yield a sentence, with a remedy, for each disagreement; ConfigError for an unknown family."""
    family = family_of(model)
    yield from _head(model)
    yield from _experts(model, family)
    yield from _optional_settings(model, family)
    yield from _shape(model, family)
    yield from _rope(model, family)
    if model.is_moe:
        yield from _router(model, family)
        yield from _groups(model, family)
    yield from family.violations(model)


def divisors(number: int) -> str:
    """Return the divisors of `number` for a message, as in "1, 2, 4, 8"; only the first, if there are many or it is
    large.
    """
    limit = min(isqrt(number), MAX_DIVISOR)
    small = [i for i in range(1, limit + 1) if number % i == 0]
    if limit < isqrt(number):
        return ", ".join(map(str, [*small[:8], "...", number]))
    found = sorted({*small, *(number // i for i in small)})
    return ", ".join(map(str, found if len(found) <= 10 else [*found[:8], "...", found[-1]]))


def _head(model: ModelConfig) -> Iterator[str]:
    if model.head == "score" and model.mtp_layers:
        yield (
            f'model.mtp_layers={model.mtp_layers} with model.head="score": MTP layers predict tokens, which a score is '
            "not. Set model.mtp_layers=0."
        )


def _experts(model: ModelConfig, family: Family) -> Iterator[str]:
    num_experts, is_dense = model.moe.num_experts, family.router == "none"
    if is_dense != bool(num_experts):
        return
    others = ", ".join(name for name, other in all_families().items() if (other.router == "none") != is_dense)
    if not is_dense:
        yield (
            f'model.family="{model.family}" is a Mixture of Experts, but model.moe.num_experts=0. Set it, or '
            f"use one of the dense families {others}."
        )
    else:
        yield (
            f'model.moe.num_experts={num_experts}, but model.family="{model.family}" is dense. Set it to 0, or '
            f"use one of the families {others}."
        )


def _optional_settings(model: ModelConfig, family: Family) -> Iterator[str]:
    """Yield a sentence for each setting that the family does not have or requires."""
    for name in OPTIONAL_SETTINGS:
        value, default = attrgetter(name)(model), attrgetter(name)(ModelConfig())
        in_use = model.is_moe or not name.startswith("moe.")
        if in_use and value != default and name not in family.settings:
            known = ", ".join(o.model_type for o in all_families().values() if name in o.settings)
            yield (
                f'model.{name}={toml_value(value)} is supported by {known} only, not by model.family="{model.family}". '
                f"Set it to {toml_value(default)}."
            )
    for name, chosen, choices in (
        ("qkv_bias", model.qkv_bias, family.qkv_bias),
        ("qk_norm", model.qk_norm, family.qk_norm),
    ):
        if chosen not in ("auto", *choices):
            yield (
                f'model.{name}="{chosen}", but model.family="{model.family}" '
                f"{'never' if chosen == 'on' else 'always'} has them. Leave it out."
            )


def _shape(model: ModelConfig, family: Family) -> Iterator[str]:
    if family.is_latent:
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


def _rope(model: ModelConfig, family: Family) -> Iterator[str]:
    rope, llama3_length = model.rope, LLAMA3_CONSTANTS["original_max_position_embeddings"]
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
    if not rope.truncate and (rope.scaling != "yarn" or family.is_latent):
        yield (
            "model.rope.truncate=false is supported by YaRN in grouped-query attention only. Set it to true, or use "
            'another model.family or model.rope.scaling="yarn".'
        )
    if rope.scaling == "llama3" and family.is_latent:
        yield (
            f'model.rope.scaling="llama3" is not supported by {model.family}\'s attention. Use "yarn" or "none".'
        )
    elif rope.scaling == "llama3" and rope.original_length != llama3_length:
        yield (
            f'model.rope.original_length={rope.original_length} with model.rope.scaling="llama3": Megatron '
            f"has {llama3_length} built in. Set it to that."
        )


def _router(model: ModelConfig, family: Family) -> Iterator[str]:
    moe = model.moe
    if not moe.ffn_hidden_size:
        yield "model.moe.ffn_hidden_size=0: an expert has no width. Set it."
    if moe.top_k > moe.num_experts:
        yield (
            f"model.moe.top_k={moe.top_k} is more than model.moe.num_experts={moe.num_experts}: a token "
            "cannot go to more experts than there are. Lower it."
        )
    if moe.capacity_factor is not None and moe.capacity_factor > moe.num_experts:
        yield (
            f"model.moe.capacity_factor={moe.capacity_factor} is more than model.moe.num_experts={moe.num_experts}: an "
            'expert would take more tokens than there are. Lower it, or set "none", with which no token is dropped.'
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
    if family.router == "sigmoid" and moe.top_k > 1 and not moe.normalize_top_k:
        yield (
            f"model.moe.normalize_top_k=false with model.moe.top_k={moe.top_k}: the gates of {model.family}'s "
            "sigmoid router always sum to one (times model.moe.routed_scaling). Set it to true."
        )


def _groups(model: ModelConfig, family: Family) -> Iterator[str]:
    moe = model.moe
    groups, chosen = moe.num_groups, moe.top_groups
    settings = f"model.moe.num_groups={toml_value(groups)} and model.moe.top_groups={toml_value(chosen)}"
    if groups is None or chosen is None:
        if groups or chosen:
            yield f'{settings}: group-limited routing needs both. Set the other, or both to "none".'
        return
    if moe.num_experts % groups:
        yield (
            f"model.moe.num_experts={moe.num_experts} is not a multiple of model.moe.num_groups={groups}: "
            f"groups are equally large. Set model.moe.num_groups to one of {divisors(moe.num_experts)}."
        )
        return
    if chosen > groups:
        yield f"{settings}: there are not so many groups to choose. Lower model.moe.top_groups."
        return
    if chosen * (moe.num_experts // groups) < moe.top_k:
        yield (
            f"{settings} leave {chosen * (moe.num_experts // groups)} experts to choose from, fewer than "
            f"model.moe.top_k={moe.top_k}. Choose more groups."
        )
    elif moe.num_experts // groups < (best := family.experts_in_group_score or 0):
        yield (
            f"model.moe.num_groups={groups} with model.moe.num_experts={moe.num_experts}: a group has "
            f"{moe.num_experts // groups} experts, and {model.family} ranks it by its best {best}. Choose fewer groups."
        )
