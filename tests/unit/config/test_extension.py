"""Functions of the user's own that a config names: found, refused with the field and a remedy, recorded by hash."""

import hashlib
import sys

import pytest

from mcore_rl.config.extension import choose, is_extension, load_extension, load_extensions
from mcore_rl.config.load import load_config
from mcore_rl.config.rl.rollout import PromptConfig, RewardConfig
from mcore_rl.config.rl_run import RlConfig, RlRunConfig
from mcore_rl.errors import ConfigError
from tests.sections import advantage_config, loss_config

SOURCE = "def own(*arguments):\n    return arguments\n\nNUMBER = 3\n"


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    """A module in the working directory, which is not on the path that Python starts with."""
    (tmp_path / "own_functions.py").write_text(SOURCE)
    (tmp_path / "own_broken.py").write_text("def broken(:\n")
    (tmp_path / "own_failing.py").write_text("import math\n\nmath.sqrt(-1)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield "own_functions"
    sys.modules.pop("own_functions", None)


def test_a_function_is_found_in_the_working_directory(own_module):
    assert is_extension("module:name") and is_extension("package.module:name")
    assert load_extension("rl.loss.kind", f"{own_module}:own")(1, 2) == (1, 2)
    assert choose("rl.loss.kind", f"{own_module}:own", {"grpo": None})(3) == (3,)
    assert choose("rl.loss.kind", "grpo", {"grpo": 5}) == 5


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("nowhere_at_all:own", "No module named 'nowhere_at_all'.*or install it"),
        ("own_functions:absent", "has no function absent. Correct the name"),
        ("own_functions:NUMBER", "has no function NUMBER"),
        ("own_broken:broken", "invalid syntax.*own_broken"),
        ("own_failing:reward", "fails when it is imported: ValueError: .*own_failing.py, line 3"),
    ],
)
def test_what_cannot_be_found_is_refused_with_field_value_and_remedy(own_module, name, reason):
    with pytest.raises(ConfigError, match=f'rl.loss.kind names "{name}".*{reason}'):
        load_extension("rl.loss.kind", name)


def test_everything_that_a_config_names_is_loaded_and_recorded_by_the_hash_of_its_source(own_module, tmp_path):
    name = f"{own_module}:own"
    (tmp_path / "judge.jinja").write_text("Score {{ completion }}.")
    parts = ("judge:judge.jinja", "exact", name, "model:runs/rm", "http://node/score")
    config = RlRunConfig(
        rl=RlConfig(
            loss=loss_config(kind=name),
            advantage=advantage_config(kind=name),
            prompts=PromptConfig(task=name),
            reward=RewardConfig(parts=parts),
        )
    )
    assert load_extensions(config) == {
        name: hashlib.sha256(SOURCE.encode()).hexdigest(),
        "judge:judge.jinja": hashlib.sha256(b"Score {{ completion }}.").hexdigest(),
    }
    assert load_extensions(RlRunConfig()) == {}


def test_the_first_thing_that_is_missing_is_named_by_its_field(own_module):
    rewards = RewardConfig(parts=("exact", "nowhere_at_all:own"))
    with pytest.raises(ConfigError, match=r'rl\.reward\.parts names "nowhere_at_all:own"'):
        load_extensions(RlRunConfig(rl=RlConfig(reward=rewards)))


@pytest.mark.parametrize("name", ["module:", ":name", "a/b:c", "a:b:c", "a..b:c"])
def test_other_names_are_refused_with_what_a_field_accepts(name, tmp_path):
    file = tmp_path / "rl.toml"
    file.write_text(f'[rl.loss]\nkind = "{name}"\n')
    assert not is_extension(name)
    with pytest.raises(ConfigError, match=r'rl\.loss\.kind.*"grpo".*or module:name of your own'):
        load_config(RlRunConfig, file, [])
