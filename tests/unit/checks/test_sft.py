"""Each rule of fine-tuning, by a config that breaks it alone; the shared ones are in test_checks.py."""

from pathlib import Path

import pytest

from mcore_rl.checks.sft import check_sft
from mcore_rl.config.load import load_config
from mcore_rl.config.sft import SFTConfig
from mcore_rl.errors import ConfigError

RECIPES = sorted((Path(__file__).parents[3] / "launch" / "recipes").glob("*/sft.toml"))
SOUND = (
    "model.family=llama data.train=[chats.jsonl] data.tokenizer.kind=huggingface data.tokenizer.path=folder "
    "model.max_position=4096"
)


def violations(overrides):
    config = load_config(SFTConfig, None, f"{SOUND} {overrides}".split())
    try:
        check_sft(config, config.mesh.smallest_world)
    except ConfigError as error:
        return str(error).splitlines()
    return []


def test_a_sound_config_passes():
    assert violations("") == []
    assert violations("mesh.cp=2") == []
    assert violations("data.tokenizer.kind=sentencepiece data.chat_template=plain") == []


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.parent.name)
def test_every_recipe_passes_the_checks(path):
    config = load_config(SFTConfig, path)
    check_sft(config, config.mesh.smallest_world)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ("data.train=[]", "data.train is empty"),
        ("data.train_weights=[1,2,3]", "data.train_weights has 3 weights for"),
        ("data.train_weights=[0]", "a weight is above 0. Leave out the files"),
        ("data.tokenizer.path=none", 'data.tokenizer.kind="huggingface" has no path'),
        ("data.tokenizer.kind=none data.tokenizer.path=none", "conversations are text"),
        ("data.tokenizer.kind=sentencepiece", 'Set it to "plain" or "raw"'),
        ("data.seq_length=1022 mesh.cp=2", "data.seq_length=1022 is not a multiple of 4"),
        ("data.seq_length=8192", "data.seq_length=8192 is longer than model.max_position=4096"),
    ],
)
def test_a_broken_rule_is_named(overrides, said):
    (violation,) = violations(overrides)
    assert said in violation
