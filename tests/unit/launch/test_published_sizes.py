"""The sizes in the recipes of real models are those of the config.json that these were published with.

They stand there, though model.path would give them: pretraining has no folder to read them from, and a plan or a
check before a job needs no download.
"""

import pytest

from mcore_rl.checks.model import checked_model_from_hf
from mcore_rl.config.load import load_config
from mcore_rl.config.run import PretrainConfig
from mcore_rl.families.same_model import model_changes
from tests.hf_models import PUBLISHED
from tests.unit.launch.conftest import ROOT

RECIPES = {
    "deepseek_v3": "DeepSeek-V3", "glm_5": "GLM-5", "llama3_8b": "Meta-Llama-3-8B", "minimax_m2": "MiniMax-M2",
    "mixtral_8x7b": "Mixtral-8x7B-v0.1", "moonlight_16b_a3b": "Moonlight-16B-A3B", "olmoe_1b_7b": "OLMoE-1B-7B",
    "qwen3_235b_a22b": "Qwen3-235B-A22B", "qwen3_30b_a3b": "Qwen3-30B-A3B",
    "qwen3_next_80b_a3b": "Qwen3-Next-80B-A3B",
}  # fmt: skip
"""The published model of each recipe."""


@pytest.mark.parametrize("name", RECIPES)
def test_the_model_of_a_recipe_has_the_published_sizes(name):
    ours = load_config(PretrainConfig, ROOT / f"launch/recipes/{name}/model.toml").model
    theirs = checked_model_from_hf(PUBLISHED[RECIPES[name]])
    assert model_changes(theirs.model_dump(mode="json"), ours) == []
    assert (ours.max_position, ours.mtp_layers) == (theirs.max_position, theirs.mtp_layers)


def test_every_recipe_of_a_real_model_is_held_to_a_published_config():
    folders = {path.name for path in (ROOT / "launch/recipes").iterdir()}
    # The first is the architecture of Moonlight for pretraining; the others are of no published model.
    assert folders - RECIPES.keys() == {"deepseek_v3_small", "tiny_moe", "any_model"}
