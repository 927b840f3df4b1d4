"""One file a family; `FAMILIES` names them all."""

from pydantic import ValidationError

from mcore_rl.config.model import ModelConfig
from mcore_rl.errors import ConfigError
from mcore_rl.families import (
    deepseek_v2,
    deepseek_v3,
    glm4_moe,
    gpt_oss,
    llama,
    mixtral,
    olmoe,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
)
from mcore_rl.families.family import Family
from mcore_rl.families.hf_config import HfConfig
from mcore_rl.families.rules import ExpertLayout, copies
from mcore_rl.families.weight_map import WeightMap, build_map

FAMILIES: dict[str, Family] = {
    "qwen3_moe": qwen3_moe.FAMILY,
    "mixtral": mixtral.FAMILY,
    "deepseek_v3": deepseek_v3.FAMILY,
    "llama": llama.FAMILY,
    "qwen3": qwen3.FAMILY,
    "qwen2": qwen2.FAMILY,
    "qwen2_moe": qwen2_moe.FAMILY,
    "glm4_moe": glm4_moe.FAMILY,
    "olmoe": olmoe.FAMILY,
    "deepseek_v2": deepseek_v2.FAMILY,
    "gpt_oss": gpt_oss.FAMILY,
}
SAME_ARCHITECTURE = {"kimi_k2": "deepseek_v3"}
"""Values of `model_type` that are one of the families under another name."""


def model_from_hf(config: HfConfig) -> ModelConfig:
    """The model that a config.json describes; ConfigError for what Megatron cannot represent."""
    model_type = config.get("model_type")
    family = FAMILIES.get(SAME_ARCHITECTURE.get(str(model_type), str(model_type)))
    if family is None:
        known = ", ".join([*FAMILIES, *SAME_ARCHITECTURE])
        raise ConfigError(f"config.json has model_type={model_type!r}. Known are {known}.")
    try:
        return family.from_hf(config)
    except ValidationError as error:
        raise ConfigError(
            f"config.json of model_type {model_type!r} has values of the wrong type:\n{error}"
        ) from None


def weight_map(model: ModelConfig, experts: ExpertLayout = "each") -> WeightMap:
    """How `model`'s weights are laid out in Hugging Face's files and in Megatron's checkpoints."""
    return build_map(FAMILIES[model.family].rules(model, experts), copies(model))
