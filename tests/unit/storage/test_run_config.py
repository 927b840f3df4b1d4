"""The config of a training takes what it leaves out from the folder of its model."""

import json
import shutil
from pathlib import Path

import pytest

from mcore_rl.config.load import dump_config
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.config.run import PretrainConfig
from mcore_rl.config.sft import SFTConfig, SFTDataConfig
from mcore_rl.errors import CheckpointError, ConfigError
from mcore_rl.families import model_from_hf
from mcore_rl.storage.run_config import load_run_config, with_origins
from tests.conversion import imported
from tests.unit.storage.conftest import in_hub_cache


def test_a_folder_gives_model_tokenizer_and_weights_and_what_is_set_beside_it_overrides(hf_folder: Path) -> None:
    config = load_run_config(RlRunConfig, None, [f"model.path={hf_folder}", "model.moe.aux_loss_coeff=0.5"])
    described = model_from_hf(json.loads((hf_folder / "config.json").read_text()))
    moe = described.moe.model_copy(update={"aux_loss_coeff": 0.5})
    assert config.model == described.model_copy(update={"path": str(hf_folder), "moe": moe})
    assert (config.data.tokenizer.kind, config.data.tokenizer.path) == ("huggingface", str(hf_folder))
    assert config.checkpoint.load == str(hf_folder) and not config.checkpoint.load_optimizer
    # Written out, the config describes the model by itself.
    assert "path = " in dump_config(config) and f"num_layers = {described.num_layers}" in dump_config(config)


def test_a_stronger_place_that_names_a_folder_replaces_a_recipes_model_but_not_its_training(
    hf_folder: Path, tmp_path: Path
) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        '[model]\nhidden_size = 128\nmoe.balance = "none"\n[data]\nchat_template = "plain"\n'
        'tokenizer = { kind = "sentencepiece", path = "t.model" }\n[checkpoint]\nload = "runs/sft"\ninterval = 3\n'
    )
    config, origins = with_origins(RlRunConfig, recipe, [f"model.path={hf_folder}"])
    assert config.model.hidden_size != 128 and config.model.moe.balance == "none"
    assert config.data.tokenizer.kind == "huggingface" and config.data.chat_template == "tokenizer"
    assert config.checkpoint.load == str(hf_folder) and config.checkpoint.interval == 3
    assert origins["model.hidden_size"] == f"in {hf_folder}"
    assert origins["model.moe.balance"] == f"in {recipe}"
    assert origins["model.path"] == "on the command line"
    # In one place with the folder the fields of the recipe are its own, and contradict the weights.
    recipe.write_text(f'[model]\npath = "{hf_folder}"\nhidden_size = 128\n')
    with pytest.raises(ConfigError, match=f"is set in {recipe}"):
        load_run_config(RlRunConfig, recipe)


def test_a_tokenizer_is_one_choice_and_a_model_without_a_template_keeps_the_recipes(
    hf_folder: Path, tmp_path: Path
) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[data]\nchat_template = "raw"\ntokenizer = { kind = "sentencepiece", path = "theirs.model" }\n')
    named = load_run_config(RlRunConfig, recipe, [f"model.path={hf_folder}", "data.tokenizer.path=mine.model"])
    assert (named.data.tokenizer.kind, named.data.tokenizer.path) == ("sentencepiece", "mine.model")
    assert named.data.chat_template == "raw"
    # Another path of the same tokenizer stays as it is written, with the template of the folder.
    (tmp_path / "link").symlink_to(hf_folder)
    words = recipe.read_text().replace("sentencepiece", "huggingface").replace("theirs.model", f"{tmp_path}/link")
    (tmp_path / "same.toml").write_text(words)
    same = load_run_config(RlRunConfig, tmp_path / "same.toml", [f"model.path={hf_folder}"])
    assert same.data.tokenizer.path == f"{tmp_path}/link" and same.data.chat_template == "tokenizer"
    base = tmp_path / "base"
    shutil.copytree(hf_folder, base)
    (base / "chat_template.jinja").unlink()
    plain = load_run_config(RlRunConfig, recipe, [f"model.path={base}"])
    assert plain.data.tokenizer.path == str(base) and plain.data.chat_template == "raw"


def test_fields_that_contradict_the_weights_are_refused_with_both_values(hf_folder: Path) -> None:
    config = json.loads((hf_folder / "config.json").read_text())
    fields = [f"model.path={hf_folder}", "model.hidden_size=4096", "model.rope.theta=77.0"]
    with pytest.raises(ConfigError) as refused:
        load_run_config(PretrainConfig, None, fields)
    message = str(refused.value)
    assert f"- model.hidden_size is {config['hidden_size']} there, 4096 here" in message
    assert "- model.rope.theta is " in message and "on the command line" in message
    assert message.endswith('checkpoint.allow_changes=["model.rope.theta"].')
    # Weights of another width do not load, whatever is allowed.
    with pytest.raises(ConfigError, match=r"(?s)hidden_size is .*checkpoint\.load=none\.$"):
        load_run_config(PretrainConfig, None, [*fields[:2], 'checkpoint.allow_changes=["model"]'])
    accepted = [fields[0], fields[2], 'checkpoint.allow_changes=["model.rope.theta"]']
    assert load_run_config(PretrainConfig, None, accepted).model.rope.theta == 77.0
    # A larger model of the same kind, from random weights.
    fresh = load_run_config(PretrainConfig, None, [*fields, "checkpoint.load=none"])
    assert fresh.checkpoint.load is None and fresh.model.hidden_size == 4096


def test_an_import_and_a_run_name_their_own_model_tokenizer_and_template(hf_folder: Path, tmp_path: Path) -> None:
    source = load_run_config(PretrainConfig, None, [f"model.path={hf_folder}"])
    folder = imported(hf_folder, tmp_path / "import", vocab_multiple=128)
    taken = load_run_config(SFTConfig, None, [f"checkpoint.load={folder.parent}"])
    assert taken.model == source.model.model_copy(update={"path": None})
    assert taken.data.tokenizer.path == str(folder) and not taken.checkpoint.load_optimizer
    shutil.rmtree(tmp_path / "import/iter_0000000", ignore_errors=True)

    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    trained = SFTConfig(model=source.model, data=SFTDataConfig(chat_template="plain", tokenizer=source.data.tokenizer))
    (run / "config.toml").write_text(dump_config(trained))
    own = load_run_config(RlRunConfig, None, [f"checkpoint.load={run}"])
    assert own.model == source.model.model_copy(update={"path": None})
    assert own.data.chat_template == "plain" and own.data.tokenizer == source.data.tokenizer
    assert own.checkpoint.load_optimizer
    # The head is of the program, not of the model in the folder.
    scored = trained.model_copy(update={"model": trained.model.model_copy(update={"head": "score"})})
    (run / "config.toml").write_text(dump_config(scored))
    assert load_run_config(RlRunConfig, None, [f"checkpoint.load={run}"]).model.head == "logits"


@pytest.mark.parametrize(
    ("cls", "recipe"), [(SFTConfig, "tiny_moe/sft"), (RlRunConfig, "tiny_moe/grpo"), (RlRunConfig, "tiny_moe/ppo")]
)
def test_a_recipe_goes_on_from_a_run_of_ones_own_with_nothing_of_its_quickstart(
    cls: type[SFTConfig | RlRunConfig], recipe: str, hf_folder: Path, tmp_path: Path
) -> None:
    source = load_run_config(PretrainConfig, None, [f"model.path={hf_folder}"])
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    data = SFTDataConfig(chat_template="plain", tokenizer=source.data.tokenizer)
    (run / "config.toml").write_text(dump_config(SFTConfig(model=source.model, data=data)))
    mine = tmp_path / "mine.toml"
    mine.write_text(f'extends = "{recipe}"\n[checkpoint]\nload = "{run}"\n')
    for config in (load_run_config(cls, Path(recipe), [f"checkpoint.load={run}"]), load_run_config(cls, mine)):
        assert config.model.model_copy(update={"moe": source.model.moe, "path": source.model.path}) == source.model
        assert config.data.tokenizer == source.data.tokenizer and config.data.chat_template == "plain"
        # Balance losses are of the training.
        assert config.model.moe.aux_loss_coeff == 1e-2


def test_a_checkpoint_that_is_not_there_yet_leaves_the_config_as_it_is_written() -> None:
    config = load_run_config(PretrainConfig, None, ["checkpoint.load=runs/earlier", "model.num_layers=3"])
    assert config.model.num_layers == 3 and config.checkpoint.load == "runs/earlier"


def test_a_model_of_the_hub_is_found_in_its_cache_by_name_and_by_folder(
    hf_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    model = in_hub_cache(tmp_path, hf_folder)
    named = load_run_config(PretrainConfig, None, ["model.path=org/Tiny-MoE"])
    assert named.data.tokenizer.path == str(model / "snapshots/0123abcd")
    assert named.checkpoint.load == str(model / "snapshots/0123abcd") and named.model.path == "org/Tiny-MoE"
    (model / "snapshots/4567cdef").mkdir()  # of an earlier revision: the main branch decides
    by_folder = load_run_config(PretrainConfig, None, [f"model.path={model}"])
    assert by_folder.data == named.data
    advice = r"cache on this machine has no model of that name. .*`hf download org/Other`"
    with pytest.raises(ConfigError, match=advice):
        load_run_config(PretrainConfig, None, ["model.path=org/Other"])


def test_what_is_no_model_is_refused_with_its_kind(hf_folder: Path, tmp_path: Path) -> None:
    def refusal(path: object) -> str:
        with pytest.raises((ConfigError, CheckpointError)) as refused:
            load_run_config(PretrainConfig, None, [f"model.path={path}"])
        return str(refused.value)

    assert "does not exist. Name a Hugging Face folder" in refusal(tmp_path / "absent")
    assert "is a file" in refusal(hf_folder / "config.json")
    assert "holds no checkpoint" in refusal(tmp_path)
    unknown = tmp_path / "unknown"
    unknown.mkdir()
    (unknown / "config.json").write_text('{"model_type": "mamba"}')
    assert "model_type='mamba'" in refusal(unknown)
    weights_alone = tmp_path / "weights"
    weights_alone.mkdir()
    shutil.copy(next(hf_folder.glob("*.safetensors")), weights_alone)
    assert "no config.json" in refusal(weights_alone)
    megatron = tmp_path / "megatron/iter_0000003"
    megatron.mkdir(parents=True)
    (megatron / "metadata.json").write_text("{}")
    assert "Set the section [model]" in refusal(megatron)
