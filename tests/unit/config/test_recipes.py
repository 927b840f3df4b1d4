from pathlib import Path

import pytest

from mcore_rl.checks.run import check
from mcore_rl.config.load import load_config
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.run import PretrainConfig

RECIPES = Path(__file__).parents[3] / "launch" / "recipes"
PRETRAIN = sorted(RECIPES.glob("*/pretrain.toml"))


def recipe(name):
    return load_config(PretrainConfig, RECIPES / name / "pretrain.toml")


@pytest.mark.parametrize("path", PRETRAIN, ids=lambda path: path.parent.name)
def test_every_recipe_passes_the_checks_on_its_smallest_world_and_on_twice_that(path):
    config = load_config(PretrainConfig, path)
    check(config, config.mesh.smallest_world)
    check(config, 2 * config.mesh.smallest_world)


def parameters(model: ModelConfig) -> int:
    """Weights of a model, counted from the shapes in the papers."""
    h, moe, mla = model.hidden_size, model.moe, model.mla
    if model.family == "deepseek_v3":
        qk = mla.qk_nope_head_dim + mla.qk_rope_head_dim
        rank = mla.q_lora_rank
        attention = (h + model.num_heads * qk) * rank if rank else h * model.num_heads * qk
        attention += h * (mla.kv_lora_rank + mla.qk_rope_head_dim)
        attention += mla.kv_lora_rank * model.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim)
        attention += model.num_heads * mla.v_head_dim * h
    else:
        attention = 2 * h * model.head_dim * (model.num_heads + model.num_kv_heads)
    expert = 3 * h * moe.ffn_hidden_size
    total = 2 * model.vocab_size * h
    for is_moe in model.moe_layers:
        experts = (moe.num_experts + moe.shared_experts) * expert + moe.num_experts * h
        total += attention + (experts if is_moe else 3 * h * model.ffn_hidden_size)
    return total


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("qwen3_30b_a3b", 30.5),
        ("qwen3_235b_a22b", 235.1),
        ("mixtral_8x7b", 46.7),
        ("deepseek_v3", 671.0),
        ("deepseek_v3_small", 16.0),
        ("llama3_8b", 8.03),
    ],
)
def test_the_sizes_of_known_models_add_up_to_their_published_number_of_parameters(name, billions):
    assert parameters(recipe(name).model) / 1e9 == pytest.approx(billions, rel=5e-3)
