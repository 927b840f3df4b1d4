"""Models of images whose folders have the text model of a known family inside: their names and settings."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mcore_rl.errors import ConfigError
from mcore_rl.families.hf_config import FLAG, OBJECT, HfConfig, check_types, needed, require

TEXT = "text_config"
"""Key in config.json of the text model's config."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shell:
    """A model around a text model, by its folder. Tensors that are not of the text model are never opened."""

    text_types: Mapping[str, str]
    """Family of each `model_type` that the text model's config may have."""
    prefixes: Mapping[str, str]
    """Beginnings of the text tensors' names in the folder, and what a family's names begin with instead."""
    passing: tuple[str, ...]
    """Beginnings of the names of all other tensors."""
    is_tied: bool | None
    """Whether embeddings are tied where config.json does not tell; None: it must."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the text model that its class has built in."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the text model that its class takes where config.json has none, other than the family's."""
    has_transposed_experts: bool = False
    """True when a published tensor of all experts of a layer has each matrix transposed."""

    def text_name(self, name: str) -> str | None:
        """Return the family's name of a tensor; None for a tensor that is not of the text model."""
        for before, after in self.prefixes.items():
            if name.startswith(before):
                return after + name.removeprefix(before)
        return None if name.startswith(self.passing) else name

    def folder_name(self, text_name: str) -> str:
        """Return the name in the folder of a tensor of the text model, from the family's name."""
        for before, after in self.prefixes.items():
            if text_name.startswith(after):
                return before + text_name.removeprefix(after)
        return text_name


LANGUAGE_MODEL, VISUAL = {"model.language_model.": "model."}, ("model.visual.",)
SHELLS: dict[str, Shell] = {
    "qwen3_vl": Shell(
        text_types={"qwen3_vl_text": "qwen3"},
        prefixes=LANGUAGE_MODEL,
        passing=VISUAL,
        is_tied=False,
    ),
    "qwen3_vl_moe": Shell(
        text_types={"qwen3_vl_moe_text": "qwen3_moe"},
        prefixes=LANGUAGE_MODEL,
        passing=VISUAL,
        is_tied=False,
        fixed={"norm_topk_prob": True},
        has_transposed_experts=True,
    ),
    "glm4v_moe": Shell(
        text_types={"glm4v_moe_text": "glm4_moe"},
        prefixes=LANGUAGE_MODEL,
        passing=VISUAL,
        is_tied=False,
        fixed={"use_qk_norm": False},
        defaults={"attention_bias": True},
    ),
    "qwen3_5": Shell(
        text_types={"qwen3_5_text": "qwen3_5_text"},
        prefixes=LANGUAGE_MODEL,
        passing=VISUAL,
        is_tied=False,
    ),
    "qwen3_5_moe": Shell(
        text_types={"qwen3_5_moe_text": "qwen3_5_moe_text"},
        prefixes=LANGUAGE_MODEL,
        passing=VISUAL,
        is_tied=False,
    ),
    "kimi_k25": Shell(
        text_types={"kimi_k2": "deepseek_v3", "deepseek_v3": "deepseek_v3"},
        prefixes={"language_model.": ""},
        passing=("vision_tower.", "mm_projector."),
        is_tied=None,
    ),
}
"""The models around text models that conversions read and write, by `model_type`."""


def shell_of(config: HfConfig) -> Shell | None:
    """Return the shell that a config.json describes; None for a text model."""
    return SHELLS.get(str(config.get("model_type")))


def text_config(config: HfConfig) -> HfConfig:
    """Return the config of the text model in a config.json: of a text model that is all of it.

    Raises:
        ConfigError: there is no such part, or it is of another kind than the shell's.
    """
    shell = shell_of(config)
    if shell is None:
        return config
    check_types(config, {TEXT: OBJECT, "tie_word_embeddings": FLAG})
    inner = needed(config, TEXT)
    kind = str(inner.get("model_type"))
    if kind not in shell.text_types:
        raise ConfigError(
            f"config.json has model_type={config['model_type']!r} with {TEXT}.model_type={kind!r}. Known there are "
            f"{', '.join(shell.text_types)}."
        )
    require(inner, shell.fixed)
    # Whether embeddings are tied stands outside of the text model's config, which has a default of its own.
    tied = config.get("tie_word_embeddings", shell.is_tied)
    if tied is None:
        needed(config, "tie_word_embeddings")
    return {
        **shell.defaults,
        **inner,
        **shell.fixed,
        "model_type": shell.text_types[kind],
        "tie_word_embeddings": tied,
    }
