import json
import tomllib
from pathlib import Path

import pytest

from mcore_rl.config.cluster import ClusterConfig
from mcore_rl.config.describe import describe
from mcore_rl.config.load import load_config, section_of_run
from mcore_rl.config.migrate import CHANGED_VALUES, RENAMED_FIELDS, migrate_file, translated
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.pipeline import PipelineConfig
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.config.run import PretrainConfig
from mcore_rl.config.sft import SFTConfig
from mcore_rl.config.study import StudyConfig
from mcore_rl.config.toml import toml_value
from mcore_rl.errors import ConfigError
from mcore_rl.run.cli import main

OLD_RUN = Path(__file__).parent / "run_of_an_earlier_version"
OLD = """\
# A run of an earlier version.
run_dir = "runs/old"
[rl.update]
  row_tokens = 64     # of one forward pass
old_logprobs = 'engine'
[rl.loss] # the objective
mismatch = "mask"
mismatch_low = 0.4
aggregation="paper" # as the paper has it
[train]
steps = 5
"""
NEW = """\
# A run of an earlier version.
run_dir = "runs/old"
[rl.update]
  max_tokens_per_microbatch = 64     # of one forward pass
old_logprobs = "rollout"
[rl.loss] # the objective
importance_sampling = "mask"
importance_sampling_low = 0.4
aggregation="auto" # as the paper has it
[train]
steps = 5
"""


def write(folder, text, name="old.toml"):
    path = folder / name
    path.write_text(text)
    return path


def test_a_file_of_an_earlier_version_is_refused_with_one_list_and_the_command_that_mends_it(tmp_path):
    base = write(tmp_path, "[rl.loss]\nmismatch = 'none'\n", "base.toml")
    path = write(tmp_path, f'extends = "base.toml"\n{OLD}')
    with pytest.raises(ConfigError) as raised:
        load_config(RlRunConfig, path, ["rl.update.old_logprobs=engine", "rl.lost=1"])
    assert str(raised.value).splitlines() == [
        "Names or values of an earlier version:",
        f"- rl.loss.mismatch is now rl.loss.importance_sampling (in {base})",
        f"- rl.update.row_tokens is now rl.update.max_tokens_per_microbatch (in {path})",
        f'- rl.update.old_logprobs = "engine" is now rl.update.old_logprobs = "rollout" (in {path})',
        f"- rl.loss.mismatch is now rl.loss.importance_sampling (in {path})",
        f"- rl.loss.mismatch_low is now rl.loss.importance_sampling_low (in {path})",
        f'- rl.loss.aggregation = "paper" is now rl.loss.aggregation = "auto" (in {path})',
        '- rl.update.old_logprobs = "engine" is now rl.update.old_logprobs = "rollout" (on the command line)',
        f"`mcore-rl config --migrate {base} {path}` rewrites the file and keeps the old one with .bak added.",
        "Unknown key rl.lost on the command line. Did you mean rl.loss?",
    ]


def test_migrate_rewrites_a_file_in_place_and_keeps_comments_and_the_old_file(tmp_path, capsys):
    path = write(tmp_path, OLD)
    assert main(["config", "--migrate", str(path)]) == 0
    assert path.read_text() == NEW and path.with_name("old.toml.bak").read_text() == OLD
    shown = capsys.readouterr().out
    assert "old.toml: 5 changes" in shown and "rl.update.row_tokens is now" in shown
    assert load_config(RlRunConfig, path).rl.update.max_tokens_per_microbatch == 64
    assert migrate_file(path) == [] and path.read_text() == NEW, "a second time there is nothing to do"
    assert path.with_name("old.toml.bak").read_text() == OLD


def test_inline_tables_dotted_keys_and_overrides_in_lists_are_rewritten_too(tmp_path):
    path = write(
        tmp_path,
        'rl.loss = { kind = "grpo", mismatch = "mask", aggregation = "paper" }\nrl.update.row_tokens = 3\n'
        'overrides = ["rl.update.old_logprobs=engine", "rl.update.row_tokens=4",\n  "train.steps=1"]\n',
    )
    migrate_file(path)
    assert path.read_text() == (
        'rl.loss = { kind = "grpo", importance_sampling = "mask", aggregation = "auto" }\n'
        "rl.update.max_tokens_per_microbatch = 3\n"
        'overrides = ["rl.update.old_logprobs=rollout", "rl.update.max_tokens_per_microbatch=4",\n'
        '  "train.steps=1"]\n'
    )


def test_a_study_with_old_overrides_is_refused_with_them(tmp_path):
    path = write(
        tmp_path, 'overrides = ["rl.update.old_logprobs=engine"]\n[arms]\na = ["rl.loss.mismatch=mask"]\n'
    )
    with pytest.raises(
        ConfigError, match=r"overrides = .*engine.*is now .*rollout(.|\n)*arms.*importance_sampling=mask"
    ):
        load_config(StudyConfig, path)
    migrate_file(path)
    study = load_config(StudyConfig, path)
    assert study.overrides == ("rl.update.old_logprobs=rollout",)
    assert study.arms == {"a": ("rl.loss.importance_sampling=mask",)}


def test_what_lines_do_not_show_is_left_to_the_user_and_the_file_alone(tmp_path):
    text = "[rl.update]\n'row_tokens' = 64\n"
    path = write(tmp_path, text)
    with pytest.raises(ConfigError, match=r"Change by hand:\n- rl.update.row_tokens is now"):
        migrate_file(path)
    assert path.read_text() == text and not path.with_name("old.toml.bak").exists()


def test_new_names_stay_in_their_section_and_exist():
    for old, new in RENAMED_FIELDS.items():
        assert old.rpartition(".")[0] == new.rpartition(".")[0]
        assert new not in RENAMED_FIELDS, "one step leads to today"
    assert not set(CHANGED_VALUES) & set(RENAMED_FIELDS)


def test_tables_are_translated_in_memory():
    assert translated(tomllib.loads(OLD)) == tomllib.loads(NEW)
    assert translated(tomllib.loads(NEW)) == tomllib.loads(NEW)


def test_every_changed_value_is_one_that_the_field_takes_today():
    configs = (PretrainConfig, SFTConfig, RlRunConfig, ClusterConfig, PipelineConfig, StudyConfig)
    config_of = {doc.key: config for config in configs for doc in describe(config)}
    for key, (old, new) in CHANGED_VALUES.items():
        load_config(config_of[key], None, [f"{key}={new}"])
        with pytest.raises(ConfigError, match=f"{key} = .* is now {key} = "):
            load_config(config_of[key], None, [f"{key}={toml_value(old)}"])


def test_the_files_of_a_run_of_an_earlier_version_are_read():
    config = tomllib.loads((OLD_RUN / "config.toml").read_text())
    for gone in ("budget_gib", "bit_pack"):
        del config["replay"][gone]
    again = section_of_run(RlRunConfig, config, "")
    assert (again.model.sliding_window, again.model.moe.capacity_factor, again.model.mla.q_lora_rank) == (
        None,
    ) * 3
    assert again.model.moe.shared_ffn_hidden_size == "auto" and again.mesh.dp == "auto"
    assert (again.checkpoint.keep, again.rl.loss.importance_sampling_low) == (2, 0.4)
    (checkpoint,) = OLD_RUN.glob("iter_*")
    marker = json.loads((checkpoint / "checkpoint.json").read_text())
    assert marker["model"]["sliding_window"] == 0, "as that version wrote it"
    model = translated(marker["model"], "model.", none=None)
    assert ModelConfig.model_validate(model) == again.model
    # That version knew no other head.
    assert model | {"head": "logits"} == again.model.model_dump(mode="json")
