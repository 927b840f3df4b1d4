"""docs/families.md lists what is supported and what is refused, and each is refused by the sentence there."""

import re
from operator import attrgetter
from pathlib import Path

import pytest
import transformers

from mcore_rl.errors import ConfigError
from mcore_rl.families import FAMILIES, OTHER_MODEL_TYPES, model_from_hf, refused
from mcore_rl.families.shells import SHELLS
from tests.hf_models import PUBLISHED

REFUSED = refused()
PAGE = Path(__file__).parents[3] / "docs" / "families.md"


def rows(title: str) -> dict[str, str]:
    """By `model_type`, the last cell of each row of the table under a title of the page."""
    section = PAGE.read_text().partition(f"## {title}\n")[2].partition("\n## ")[0]
    return {match[1]: match[2] for match in re.finditer(r"^\| `(\w+)` \|.*\| ([^|]*) \|$", section, re.M)}


def test_the_page_lists_every_family_and_every_refused_architecture() -> None:
    assert rows("Supported").keys() == FAMILIES.keys()
    assert rows("Text models inside models of images").keys() == SHELLS.keys()
    assert rows("Refused") == REFUSED
    assert not REFUSED.keys() & {*FAMILIES, *sum(OTHER_MODEL_TYPES.values(), ())}


@pytest.mark.parametrize("model_type", REFUSED)
def test_it_is_refused_by_the_sentence_of_the_page(model_type: str) -> None:
    with pytest.raises(ConfigError) as error:
        model_from_hf({"model_type": model_type})
    reason = rows("Refused")[model_type]
    assert f"model_type={model_type!r}, which is refused: {reason}." in str(error.value)


BUILT = (
    "gated delta net", "linear attention", "an indexer and", "an indexer nor", "output gate", "folder", "fp8", "MTP",
)  # fmt: skip
"""Parts that Megatron's models have here: no model is refused for them."""
CAUSES = {
    "glm5_next": ("text_config.linear_lower_bound", "text_config.hc_mult"),
    "hy_v4": ("hc_mult", "learnable_sink_init"),
    "llama4": ("text_config.no_rope_layers", "text_config.attention_chunk_size"),
    "minimax_m3_vl": ("text_config.index_block_size",),
    "mistral_large4": ("text_config.no_rope_layers", "text_config.kv_source_layers"),
    "qwen3_omni_moe": ("thinker_config", "talker_config"),
    "qwen4_exp": ("text_config.hc_count", "text_config.ngram_size"),
}
"""Settings of transformers' class for what the reason names."""


@pytest.mark.parametrize("model_type", CAUSES)
def test_transformers_has_settings_for_what_a_model_is_refused_for(model_type: str) -> None:
    config = transformers.CONFIG_MAPPING[model_type]()
    assert all(attrgetter(name)(config) is not None for name in CAUSES[model_type])


def test_no_model_is_refused_for_what_is_built() -> None:
    assert [name for name, reason in REFUSED.items() if any(part in reason for part in BUILT)] == []


@pytest.mark.parametrize("name", ["Qwen3.5-27B", "GLM-5.2"])
def test_later_models_of_a_known_architecture_are_read(name: str) -> None:
    """Qwen3.8-27B has the classes of Qwen3.5 in its config.json, GLM-5.3 those of GLM-5.2."""
    assert PUBLISHED[name]["model_type"] in FAMILIES and model_from_hf(PUBLISHED[name]).num_layers > 60
    row = {
        "Qwen3.5-27B": "`qwen3_5` | Qwen3.5, Qwen3.6, Qwen3.8-27B",
        "GLM-5.2": "`glm_moe_dsa` | GLM-5, 5.1, 5.2, 5.3",
    }
    assert row[name] in PAGE.read_text()
