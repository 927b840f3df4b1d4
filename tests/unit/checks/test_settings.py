"""Each rule, by settings that break it alone; settings that agree pass (settings.toml)."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.checks.cluster import check_cluster
from mcore_rl.checks.programs import PROGRAMS
from mcore_rl.checks.rl import rl_violations
from mcore_rl.config.cluster import ClusterConfig
from mcore_rl.config.load import load_config
from mcore_rl.config.recipes import recipe_files
from mcore_rl.config.rl_run import RlConfig
from mcore_rl.errors import ConfigError

GROUPS: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_name("settings.toml").read_text(encoding="utf-8"))
ROOT = Path(__file__).parents[3]
REMEDIES = {
    *("Add", "Change", "Choose", "Clear", "Correct", "Give", "Leave", "Lower", "Make", "Merge", "Name", "Raise", "Set"),
    *("Shorten", "Start", "Take", "Untie", "Use", "Warm", "Write"),
}


def violations(group: dict[str, Any], words: str) -> list[str]:
    """Return the sentences that refuse `words` on top of a group's settings."""
    settings = [word for word in f"{group.get('settings', '')} {words}".split(" ") if word]
    ranks = next((int(word.removeprefix("ranks=")) for word in settings if word.startswith("ranks=")), None)
    overrides = [word for word in settings if not word.startswith("ranks=")]
    path = Path(group["config"]) if "config" in group else None
    try:
        if group["program"] == "section rl":
            return list(rl_violations(load_config(RlConfig, path, overrides)))
        if group["program"] == "cluster":
            check_cluster(load_config(ClusterConfig, path and ROOT / path, overrides))
        else:
            program = PROGRAMS[group["program"]]
            program.checked_ranks(load_config(program.config, path, overrides), ranks)
    except ConfigError as error:
        return str(error).splitlines()
    return []


def cases(key: str) -> list[tuple[str, str]]:
    return [(name, words) for name, group in GROUPS.items() for words in group.get(key, ())]


@pytest.mark.parametrize(("name", "words"), cases("fine"))
def test_settings_that_agree_pass(name: str, words: str) -> None:
    assert violations(GROUPS[name], words) == []


@pytest.mark.parametrize(("name", "words"), cases("refused"))
def test_a_rule_that_is_broken_is_named_alone_and_with_a_remedy(name: str, words: str) -> None:
    sentences = violations(GROUPS[name], words)
    parts = GROUPS[name]["refused"][words].split(" ... ")
    assert [all(part in sentence for part in parts) for sentence in sentences] == [True], sentences
    # What is no field or no value is answered with what is one.
    assert "command line" in sentences[0] or REMEDIES & set(sentences[0].replace(".", " ").split())


def test_all_disagreements_are_told_at_once() -> None:
    sentences = violations(GROUPS["qwen3_moe"], "mesh.tp=3 mesh.pp=3 train.micro_batch=5 optim.min_lr=1")
    wanted = ("num_heads", "num_layers", "global_batch", "min_lr", "padded vocabulary", "seq_length")
    assert len(sentences) == len(wanted) and all(any(word in line for line in sentences) for word in wanted)


def test_an_unknown_family_is_refused_with_the_known_ones() -> None:
    (sentence,) = violations(GROUPS["llama"], "model.family=gpt2")
    assert 'model.family="gpt2" is not known. Use one of ' in sentence and "qwen3_moe" in sentence


@pytest.mark.parametrize("name", [name for name in recipe_files() if name.rpartition("/")[2] in PROGRAMS])
def test_every_recipe_of_a_training_passes(name: str) -> None:
    assert violations({"program": name.rpartition("/")[2], "config": name}, "") == []
