"""Vision-language models with a text model of a known family inside: their names and settings."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from mcore_rl.errors import ConfigError
from mcore_rl.families.config_json import FLAG, OBJECT, HfConfig, check_types, needed, require

TEXT = "text_config"
"""Key of the text model's config in config.json."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shell:
    """The folder of a model around a text model. Tensors outside the text model are never opened."""

    text_types: Mapping[str, str]
    """`model_type` of the text model's config -> family."""
    prefixes: Mapping[str, str]
    """Name prefix of the text model's tensors in the folder -> prefix in the family's names."""
    passing: tuple[str, ...]
    is_tied: bool | None
    """Whether embeddings are tied by default; None if config.json must set it."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Settings that are hard-coded in transformers' class of the text model."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of transformers' class of the text model that differ from the family's."""
    has_transposed_experts: bool = False
    """True if published checkpoints have a single tensor for all experts of a layer, with transposed matrices."""

    def text_name(self, name: str) -> str | None:
        """Return the family's name of a tensor; None for a tensor outside the text model."""
        for before, after in self.prefixes.items():
            if name.startswith(before):
                return after + name.removeprefix(before)
        return None if name.startswith(self.passing) else name

    def folder_name(self, text_name: str) -> str:
        """Return a text model's tensor name in the folder, from the family's name."""
        for before, after in self.prefixes.items():
            if text_name.startswith(after):
                return before + text_name.removeprefix(after)
        return text_name


_visual = partial(Shell, prefixes={"model.language_model.": "model."}, passing=("model.visual.",), is_tied=False)
QWEN3_VL_DEFAULTS = {"rope_theta": 500000.0}
SHELLS: dict[str, Shell] = {
    "qwen3_vl": _visual(text_types={"qwen3_vl_text": "qwen3"}, defaults=QWEN3_VL_DEFAULTS),
    "qwen3_vl_moe": _visual(
        text_types={"qwen3_vl_moe_text": "qwen3_moe"},
        fixed={"norm_topk_prob": True},
        defaults=QWEN3_VL_DEFAULTS,
        has_transposed_experts=True,
    ),
    "glm4v_moe": _visual(
        text_types={"glm4v_moe_text": "glm4_moe"}, fixed={"use_qk_norm": False}, defaults={"attention_bias": True}
    ),
    "qwen3_5": _visual(text_types={"qwen3_5_text": "qwen3_5_text"}),
    "qwen3_5_moe": _visual(text_types={"qwen3_5_moe_text": "qwen3_5_moe_text"}),
    "kimi_k25": Shell(
        text_types={"kimi_k2": "deepseek_v3", "deepseek_v3": "deepseek_v3"},
        prefixes={"language_model.": ""},
        passing=("vision_tower.", "mm_projector."),
        is_tied=None,
    ),
}
"""Models around text models that conversions can read and write, by `model_type`."""


def shell_of(config: HfConfig) -> Shell | None:
    """Return the shell that a config.json describes; None for a text model."""
    return SHELLS.get(str(config.get("model_type")))


def text_config(config: HfConfig) -> HfConfig:
    """Return the config of the text model in a config.json, or that itself; ConfigError for another `model_type`."""
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
    # Tied embeddings are set outside the text model's config, which has its own default for them.
    tied = config.get("tie_word_embeddings", shell.is_tied)
    if tied is None:
        needed(config, "tie_word_embeddings")
    check_types(inner, {"rope_parameters": OBJECT, "rope_scaling": OBJECT})
    defaults = dict(shell.defaults)
    # A theta among the rotary settings would contradict the default of the class beside them.
    if any("rope_theta" in (inner.get(name) or {}) for name in ("rope_parameters", "rope_scaling")):
        defaults.pop("rope_theta", None)
    return {**defaults, **inner, **shell.fixed, "model_type": shell.text_types[kind], "tie_word_embeddings": tied}
