"""Model families, a file for each kind of architecture, and functions that look up a model's family."""

import importlib
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from mcore_rl.config.extension import is_extension, load_extension
from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.run import PlatformConfig, RunConfig
from mcore_rl.errors import ConfigError
from mcore_rl.families.config_json import LIST, OBJECT, HfConfig, check_types, common_to_hf
from mcore_rl.families.family import Family
from mcore_rl.families.rules import ExpertLayout
from mcore_rl.families.shells import SHELLS, shell_of, text_config
from mcore_rl.families.weight_map import WeightMap, build_map

FAMILIES = {
    "deepseek_v2": "mcore_rl.families.deepseek:DeepseekV2",
    "deepseek_v3": "mcore_rl.families.deepseek:DeepseekV3",
    "deepseek_v32": "mcore_rl.families.deepseek:DeepseekV32",
    "dots1": "mcore_rl.families.grouped_experts:Dots1",
    "glm4_moe": "mcore_rl.families.grouped_experts:Glm4Moe",
    "glm4_moe_lite": "mcore_rl.families.deepseek:Glm4MoeLite",
    "glm_moe_dsa": "mcore_rl.families.deepseek:GlmMoeDsa",
    "gpt_oss": "mcore_rl.families.gpt_oss:GptOss",
    "llama": "mcore_rl.families.dense:Llama",
    "minimax_m2": "mcore_rl.families.minimax_m2:MiniMaxM2",
    "mistral": "mcore_rl.families.dense:Mistral",
    "mixtral": "mcore_rl.families.mixtral:Mixtral",
    "olmoe": "mcore_rl.families.mixtral:Olmoe",
    "qwen2": "mcore_rl.families.dense:Qwen2",
    "qwen2_moe": "mcore_rl.families.qwen3_moe:Qwen2Moe",
    "qwen3": "mcore_rl.families.dense:Qwen3",
    "qwen3_5_moe_text": "mcore_rl.families.qwen3_next:Qwen35Moe",
    "qwen3_5_text": "mcore_rl.families.qwen3_next:Qwen35",
    "qwen3_moe": "mcore_rl.families.qwen3_moe:Qwen3Moe",
    "qwen3_next": "mcore_rl.families.qwen3_next:Qwen3Next",
    "seed_oss": "mcore_rl.families.dense:SeedOss",
    "solar_open": "mcore_rl.families.grouped_experts:SolarOpen",
}
"""Built-in values of `model.family`, by Hugging Face's `model_type`; a class is imported when a config names it."""
OTHER_MODEL_TYPES = {"deepseek_v3": ("kimi_k2",)}
"""Other values of `model_type` for the architecture of a family."""


CAUSAL_CLASS, SCORE_CLASS = "ForCausalLM", "ForSequenceClassification"
"""Suffixes of transformers' class names for models with logits and for models with a score."""


def family_of(model: ModelConfig) -> Family:
    """Return the family that `model.family` names; ConfigError if it is unknown or cannot be imported."""
    return family_named(model.family)


def family_named(name: str) -> Family:
    """Return the family of this name, as `family_of` does."""
    if name in FAMILIES:
        module, _, attribute = FAMILIES[name].partition(":")
        built_in: Family = getattr(importlib.import_module(module), attribute)()
        return built_in
    if not is_extension(name):
        raise ConfigError(
            f'model.family="{name}" is not known. Use one of {", ".join(FAMILIES)}, or module:name of your own.'
        )
    family = load_extension("model.family", name)
    if not (isinstance(family, type) and issubclass(family, Family)):
        raise ConfigError(
            f'model.family="{name}" is not a subclass of mcore_rl.families.family.Family. Name the class.'
        )
    return family()


def te_violations(model: ModelConfig, mesh: MeshConfig, platform: PlatformConfig) -> Iterator[str]:
    """Yield a sentence for each reason why Megatron's layers by TransformerEngine cannot compute a model; its own rules
    for attention are those of get_attention_backend in version 2.20 (docs/gpu.md has them as a table).
    """
    family, moe, mla = family_of(model), model.moe, model.mla
    best, window = family.own_group_score(model), model.sliding_window
    by = f"{moe.top_k // (moe.top_groups or 1)} (model.moe.top_k={moe.top_k}, model.moe.top_groups={moe.top_groups})"
    norms = f"model.mla.norm_eps={mla.norm_eps} and model.norm_eps={model.norm_eps}"
    # Of its attentions only cuDNN's, in 16 bits, and those of flash-attn, which need not be installed, do this.
    passed, is_passed = f"keys and values passed around the mesh.cp={mesh.cp} ranks", mesh.cp > 1
    reasons = {
        "norms the queries and the keys of all heads at once": family.has_full_qk_norm,
        "has gated delta nets": "delta" in model.mixers,
        "attends to keys that an indexer chooses": model.indexer.top_k is not None,
        f"ranks a group of experts by its best {best}, not by its best {by}": best is not None,
        f"has norms with two epsilons, {norms}": family.is_latent and mla.norm_eps != model.norm_eps,
        f"has attention sinks, with {passed}": family.has_attention_sinks and is_passed,
        f"has a window (model.sliding_window={window}), with {passed}": window is not None and is_passed,
        f'is in platform.precision="fp32", with {passed}': platform.precision == "fp32" and is_passed,
    }
    for reason in (reason for reason, holds in reasons.items() if holds):
        yield (
            f"{model.family} {reason}: Megatron's layers by TransformerEngine do not compute this. Set "
            'platform.layers="torch".'
        )


def allows_te(config: RunConfig) -> bool:
    """Return whether `platform.layers` = "auto" may choose TransformerEngine: its layers compute the model, and the
    program needs no others. No GPU has shown yet that it computes attention sinks right.
    """
    reasons = te_violations(config.model, config.mesh, config.platform)
    return config.allows_te and not family_of(config.model).has_attention_sinks and not any(reasons)


def all_families() -> dict[str, Family]:
    """Import all built-in families: for checks and messages that compare them."""
    return {name: family_named(name) for name in FAMILIES}


def model_from_hf(config: HfConfig, family: str | None = None) -> ModelConfig:
    """Return the model that a config.json describes (of a vision-language model, the text model), by `model_type` or by
    the user's own `family` (module:name). Raises ConfigError if the family is unknown or Megatron lacks a feature.
    """
    head = _head_of(config)
    if head == "score" and shell_of(config) is not None:
        raise ConfigError(
            f"config.json has architectures={config['architectures']}: a score of texts and images, which is not read "
            "here. Take a model with logits."
        )
    config = text_config(config)
    model_type = str(config.get("model_type"))
    if family is None:
        if not config.get("model_type"):
            raise ConfigError(
                "config.json has no model_type, by which the family of the model is known. Take the config.json that "
                "belongs to the weights."
            )
        names = {alias: name for name in FAMILIES for alias in (name, *OTHER_MODEL_TYPES.get(name, ()))}
        if model_type not in names:
            if reason := refused().get(model_type):
                raise ConfigError(
                    f"config.json has model_type={model_type!r}, which is refused: {reason}. Take a model of another "
                    "architecture (docs/families.md), or write a family of your own (docs/extending.md)."
                )
            raise ConfigError(
                f"config.json has model_type={model_type!r}. Known are {', '.join([*names, *SHELLS])}. Take a model of "
                "one of these, or write a family of your own (docs/extending.md)."
            )
        family = names[model_type]
    try:
        return ModelConfig(family=family, head=head, **family_named(family).from_hf(config))
    except ValidationError as error:
        raise ConfigError(f"config.json of model_type {model_type!r} has values of the wrong type:\n{error}") from None


def refused() -> dict[str, str]:
    """Return why each architecture without a family is refused, by `model_type`: a clause of the error message."""
    table = tomllib.loads(Path(__file__).with_name("refused.toml").read_text(encoding="utf-8"))
    return {name: reason for reason, names in table.items() for name in names}


def hf_config(model: ModelConfig) -> dict[str, Any]:
    """Return a config.json with which transformers opens the model; ConfigError if it cannot represent the model."""
    family = family_of(model)
    names = {"architectures": [family.hf_class], "model_type": family.model_type}
    config = names | common_to_hf(model) | family.to_hf(model)
    return config | score_config(model) if model.head == "score" else config


def score_config(model: ModelConfig) -> dict[str, Any]:
    """Return the keys of config.json of a model with a scalar head; ConfigError if transformers has no such class."""
    family = family_of(model)
    if not family.has_score_class:
        raise ConfigError(
            f'model.family="{model.family}" with model.head="score": transformers has no class of {family.model_type} '
            "for sequence classification, so that a reward model of it stays in Megatron's format."
        )
    name = family.score_class or family.hf_class.replace(CAUSAL_CLASS, SCORE_CLASS)
    return {"architectures": [name], "num_labels": 1}


def weight_map(model: ModelConfig, experts: ExpertLayout = "each") -> WeightMap:
    """Map each region of a Megatron tensor to the region of the Hugging Face tensor that it is copied from."""
    family = family_of(model)
    return build_map(family.rules(model, experts), family.duplicates(model))


def _head_of(config: HfConfig) -> Literal["logits", "score"]:
    check_types(config, {"architectures": LIST, "id2label": OBJECT})
    names = [str(name) for name in config.get("architectures") or []]
    other = [name for name in names if "For" in name and not name.endswith((CAUSAL_CLASS, SCORE_CLASS))]
    classes = [name for name in names if name.endswith("Classification")]
    if not classes:
        return "logits"
    if other:
        raise ConfigError(
            f"config.json has architectures={names}. Known are language models ({CAUSAL_CLASS}) and models with one "
            f"score for a sequence ({SCORE_CLASS})."
        )
    labels = config.get("num_labels", len(config.get("id2label") or {}) or 2)
    if labels != 1:
        raise ConfigError(
            f"config.json has {labels} labels with architectures={names}; a reward model has one (num_labels=1). "
            "These weights classify."
        )
    return "score"
