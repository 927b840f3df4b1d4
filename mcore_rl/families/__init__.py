"""Model families, each in its own file, and functions that look up a model's family."""

from typing import Any, Literal

from pydantic import ValidationError

from mcore_rl.config.extension import is_extension, load_extension
from mcore_rl.config.model import ModelConfig
from mcore_rl.errors import ConfigError
from mcore_rl.families import (
    deepseek_v2,
    deepseek_v3,
    deepseek_v32,
    dots1,
    glm4_moe,
    glm4_moe_lite,
    glm_moe_dsa,
    gpt_oss,
    llama,
    minimax_m2,
    mistral,
    mixtral,
    olmoe,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_5,
    qwen3_moe,
    qwen3_next,
    seed_oss,
    solar_open,
)
from mcore_rl.families.family import Family
from mcore_rl.families.hf_config import LIST, OBJECT, HfConfig, check_types
from mcore_rl.families.hf_export import common_to_hf
from mcore_rl.families.refused import REFUSED
from mcore_rl.families.rules import ExpertLayout
from mcore_rl.families.shells import SHELLS, shell_of, text_config
from mcore_rl.families.weight_map import WeightMap, build_map

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        deepseek_v2.FAMILY,
        deepseek_v3.FAMILY,
        deepseek_v32.FAMILY,
        dots1.FAMILY,
        glm4_moe.FAMILY,
        glm4_moe_lite.FAMILY,
        glm_moe_dsa.FAMILY,
        gpt_oss.FAMILY,
        llama.FAMILY,
        minimax_m2.FAMILY,
        mistral.FAMILY,
        mixtral.FAMILY,
        olmoe.FAMILY,
        qwen2.FAMILY,
        qwen2_moe.FAMILY,
        qwen3.FAMILY,
        qwen3_5.EXPERTS,
        qwen3_5.DENSE,
        qwen3_moe.FAMILY,
        qwen3_next.FAMILY,
        seed_oss.FAMILY,
        solar_open.FAMILY,
    )
}
"""Built-in values of `model.family`: families by Hugging Face's `model_type`."""


CAUSAL_CLASS, SCORE_CLASS = "ForCausalLM", "ForSequenceClassification"
"""Suffixes of transformers' class names for models with logits and for models with a score."""


def family_of(model: ModelConfig) -> Family:
    """Return the family that `model.family` names.

    Raises:
        ConfigError: the family is unknown, or the user's own family cannot be imported.
    """
    return _family_named(model.family)


def model_from_hf(config: HfConfig, family: str | None = None) -> ModelConfig:
    """Return the model that a config.json describes.

    Args:
        config: The content of config.json. For a vision-language model, the text model inside is described.
        family: A family of the user's own, as `module:name`; None to choose by `model_type`.

    Raises:
        ConfigError: the family is unknown, or the model has a feature that Megatron's does not have.
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
        names = {
            alias: name for name, known in FAMILIES.items() for alias in (name, *known.other_model_types)
        }
        if model_type in REFUSED:
            raise ConfigError(
                f"config.json has model_type={model_type!r}, which is refused: {REFUSED[model_type]}. Take a model of "
                "another architecture (docs/families.md), or write a family of your own (docs/extending.md)."
            )
        if model_type not in names:
            raise ConfigError(
                f"config.json has model_type={model_type!r}. Known are {', '.join([*names, *SHELLS])}. Take a model of "
                "one of these, or write a family of your own (docs/extending.md)."
            )
        family = names[model_type]
    try:
        return ModelConfig(family=family, head=head, **_family_named(family).from_hf(config))
    except ValidationError as error:
        raise ConfigError(
            f"config.json of model_type {model_type!r} has values of the wrong type:\n{error}"
        ) from None


def hf_config(model: ModelConfig) -> dict[str, Any]:
    """Return a config.json with which transformers opens the model, the inverse of `model_from_hf`.

    Raises:
        ConfigError: transformers cannot represent the model.
    """
    family = family_of(model)
    names = {"architectures": [family.hf_class], "model_type": family.model_type}
    config = names | common_to_hf(model) | family.to_hf(model)
    return config | score_config(model) if model.head == "score" else config


def score_config(model: ModelConfig) -> dict[str, Any]:
    """Return the keys of config.json with which transformers opens a model with a scalar head.

    Raises:
        ConfigError: transformers has no such class for the family.
    """
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
    """Return the head that a config.json's `architectures` names. Raises ConfigError if Megatron's model lacks it."""
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


def _family_named(name: str) -> Family:
    if name in FAMILIES:
        return FAMILIES[name]
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
