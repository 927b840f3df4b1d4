import re
from pathlib import Path

import pytest

from mcore_rl.cli import cli
from mcore_rl.config.cluster import ClusterConfig
from mcore_rl.config.load import load_config
from mcore_rl.config.recipes import CLUSTERS, RECIPES, cluster_file, config_file, recipe_files, recipes
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.errors import ConfigError


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.fixture
def folder(tmp_path):
    comment = "# GRPO, with clipping\n# per token. A second sentence.\n"
    files = {
        "small/model.toml": "# A base.\n[model]\n",
        "small/grpo.toml": f'{comment}extends = "model.toml"\nrun_dir = "runs/a"\n',
        "large/grpo.toml": 'run_dir = "runs/b"\n',
    }
    for name, text in files.items():
        write(tmp_path / "recipes" / name, text)
    return tmp_path / "recipes"


def test_a_recipe_is_found_by_its_folder_and_name_unless_a_file_exists_or_ends_in_toml(folder, tmp_path, monkeypatch):
    assert config_file(Path("small/grpo"), folder) == folder / "small/grpo.toml"
    assert config_file(Path("small/model"), folder) == folder / "small/model.toml"
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "small/grpo", "")
    assert config_file(Path("small/grpo"), folder) == Path("small/grpo")
    assert config_file(Path("small/absent.toml"), folder) == Path("small/absent.toml")


def test_a_path_in_the_repository_means_the_recipe_where_there_is_no_such_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = Path("launch/recipes/tiny_moe/grpo.toml")
    assert config_file(path) == config_file(Path(f"./{path}")) == RECIPES / "tiny_moe/grpo.toml"
    assert config_file(Path("other") / path) == Path("other") / path
    assert cluster_file("launch/clusters/example_cpu.toml") == CLUSTERS / "example_cpu.toml"
    write(path, 'run_dir = "runs/mine"\n')
    assert config_file(path) == path


@pytest.mark.parametrize("base", ["tiny_moe/grpo", "launch/recipes/tiny_moe/grpo.toml"])
def test_a_file_extends_a_recipe_by_its_name(base, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    mine = write(tmp_path / "mine.toml", f'extends = "{base}"\nrun_dir = "runs/mine"\n')
    assert load_config(RlRunConfig, mine) == load_config(RlRunConfig, Path("tiny_moe/grpo"), ["run_dir=runs/mine"])
    # A file next to it comes first.
    (tmp_path / "tiny_moe").mkdir()
    write(tmp_path / base, "[train]\nseed = 7\n")
    assert load_config(RlRunConfig, mine).train.seed == 7


def test_a_cluster_extends_an_example_by_its_name(tmp_path):
    mine = write(tmp_path / "mine.toml", 'extends = "example_h100"\nname = "mine"\n')
    example = load_config(ClusterConfig, CLUSTERS / "example_h100.toml")
    assert load_config(ClusterConfig, mine) == example.model_copy(update={"name": "mine"})


def test_a_base_that_is_no_recipe_is_named_with_the_file_that_wants_it(tmp_path):
    mine = write(tmp_path / "mine.toml", 'extends = "tiny_moe/grp"\n')
    with pytest.raises(ConfigError, match=r'extends = "tiny_moe/grp" in \S*mine.toml: .*Did you mean tiny_moe/grpo'):
        load_config(RlRunConfig, mine)


@pytest.mark.parametrize(
    ("wrong", "nearest"),
    [("grpo", "large/grpo or small/grpo"), ("smal/grpo", "small/grpo or large/grpo or small/model"), ("xyz", "")],
)
def test_a_wrong_name_lists_the_nearest_ones(wrong, nearest, folder):
    with pytest.raises(ConfigError) as raised:
        config_file(Path(wrong), folder)
    hint = f"Did you mean {nearest}? " if nearest else ""
    wanted = f"There is no file {wrong}, and no recipe of that name. {hint}`mcore-rl recipes` lists them."
    assert str(raised.value) == wanted


def test_those_that_can_be_run_are_listed_with_the_first_sentence_of_their_comment(folder):
    assert [(recipe.name, recipe.summary) for recipe in recipes(folder)] == [
        ("large/grpo", ""),
        ("small/grpo", "GRPO, with clipping per token."),
    ]


def test_a_config_is_loaded_by_the_name_of_a_recipe():
    by_name = load_config(RlRunConfig, Path("tiny_moe/grpo"), ["train.seed=3"])
    assert by_name == load_config(RlRunConfig, RECIPES / "tiny_moe/grpo.toml", ["train.seed=3"])


def test_every_command_that_takes_a_config_takes_the_name_of_a_recipe(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["config", "tiny_moe/pretrain"]) == 0
    assert 'run_dir = "runs/tiny_moe"' in capsys.readouterr().out
    for command in ("pretrain", "sft", "rl", "eval", "study"):
        assert cli.main([command, "tiny_moe/grp"]) == 2
        assert "Did you mean tiny_moe/grpo" in capsys.readouterr().err


def test_every_summary_is_what_the_recipe_is_for_and_not_the_size_of_its_cluster():
    purposes = {"pretrain": "Pretraining", "sft": "Fine-tuning", "rm": "A reward model", "dpo": "DPO"}
    words = "Evaluation|REINFORCE|GRPO|DAPO|CISPO|GSPO|PPO|Kimi|Pretraining|Fine-tuning|reward model|DPO|distillation"
    for recipe in recipes():
        assert recipe.summary.startswith(purposes.get(recipe.name.rpartition("/")[2], "")), recipe
        assert re.search(words, recipe.summary), recipe


def test_the_command_lists_every_recipe_that_can_be_run(capsys):
    assert cli.main(["recipes"]) == 0
    listed = {line.split()[0] for line in capsys.readouterr().out.splitlines() if not line.startswith(" ")}
    bases = {name for name in recipe_files() if name.endswith("/model")} | {"tiny_moe/rl"}
    assert listed == set(recipe_files()) - bases


def test_an_example_of_a_cluster_is_found_by_its_name_and_a_file_by_its_path(tmp_path, capsys):
    assert cluster_file("example_h100") == CLUSTERS / "example_h100.toml"
    assert cluster_file("mine.toml") == Path("mine.toml")
    (tmp_path / "mine").write_text("")
    assert cluster_file(f"{tmp_path}/mine") == tmp_path / "mine"
    with pytest.raises(SystemExit) as ended:
        cli.main(["plan", "qwen3_30b_a3b/pretrain", "--cluster", "h100", "--nodes", "2"])
    assert ended.value.code == 2
    known = "there is no file h100, and no example of that name: example_1gpu, example_a100_apptainer, "
    assert known in capsys.readouterr().err
