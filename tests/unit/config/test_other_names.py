"""Settings of other systems lead to ours, as docs/algorithms.md has them."""

import re

import pytest

from mcore_rl.config.describe import describe
from mcore_rl.config.kinds import KINDS
from mcore_rl.config.load import load_config
from mcore_rl.config.other_names import EQUIVALENTS, equivalent_named
from mcore_rl.errors import ConfigError
from tests.documented import ROOT

VALUES = re.compile(r"^(R2|R3|seq-mean-.*)$")
"""Names in the page's table that are values and not keys."""


def complaint(kind, *overrides, path=None):
    with pytest.raises(ConfigError) as refused:
        load_config(KINDS[kind], path, overrides)
    return str(refused.value)


def rows_of_the_page():
    """Yield our fields and the others' keys, by system, of each row of "What others call it"."""
    page = (ROOT / "docs/algorithms.md").read_text(encoding="utf-8")
    head, _, *rows = re.findall(
        r"^\|.*\|$", page.split("\n## What others call it")[1].split("\n## ")[0], flags=re.MULTILINE
    )
    systems = [cell.strip().split(" ")[0] for cell in head.strip("|").split("|")][1:]
    assert systems == ["verl", "slime", "TRL", "NeMo-RL", "Megatron-LM"]
    for row in rows:
        ours, *others = [re.findall("`([^`]+)`", cell) for cell in row.strip("|").split("|")]
        named = {
            system: [re.split(r"[= ]", name)[0] for name in names if not VALUES.match(name)]
            for system, names in zip(systems, others, strict=True)
        }
        yield [name.split("=")[0] for name in ours], named


def test_each_key_of_the_page_is_answered_with_the_field_in_its_row():
    fields = {doc.key for doc in describe(KINDS["rl"])}
    num_keys = 0
    for ours, named in rows_of_the_page():
        for system, names in named.items():
            for name in names:
                # "generation_batch_size / num_generations" is a quotient: the second has a row of its own.
                if name == "num_generations" and ours == ["rollout.prompts_per_step"]:
                    continue
                found = equivalent_named(name, fields)
                assert found is not None, (system, name)
                lasts = {field.rpartition(".")[2] for field in found[2]}
                assert lasts & {field.rpartition(".")[2] for field in ours}, (system, name, found)
                of_systems = {
                    of
                    for row in EQUIVALENTS
                    for of, other in row.named
                    if other.rpartition(".")[2] == name.rpartition(".")[2].lstrip("-").replace("-", "_")
                }
                assert of_systems & {system, "Megatron-LM" if system == "slime" else system}, (system, name)
                num_keys += 1
    assert num_keys > 60


def test_each_field_that_is_answered_is_one_of_a_training():
    fields = {doc.key for cls in KINDS.values() for doc in describe(cls)}
    assert not {field for row in EQUIVALENTS for field in row.fields} - fields


@pytest.mark.parametrize("key", ["lora.dropout", "lora_dropout", "actor_rollout_ref.model.lora.dropout"])
def test_a_setting_that_is_not_offered_is_answered_with_the_reason(key):
    message = complaint("sft", f"{key}=0.1")
    assert ", which is not offered here. A mask on the input of each adapter would keep" in message
    assert "Leave it out; against overfitting lower lora.rank" in message


@pytest.mark.parametrize(
    ("targets", "answers"),
    [
        ('["lm_head","attention"]', ["The output layer and the embedding get no adapters", "lora.rank="]),
        ('["embed_tokens"]', ["The output layer and the embedding get no adapters"]),
        ('["q_proj","v_proj","up_proj"]', [': "attention".', ': "mlp" in dense layers, "shared_experts"']),
        ("all-linear", ['lora.targets="auto"']),
    ],
)
def test_targets_of_adapters_in_others_words_are_answered_with_ours(targets, answers):
    for kind in ("pretrain", "sft", "rm", "dpo", "rl"):
        message = complaint(kind, f"lora.targets={targets}")
        assert [message.count(answer) for answer in answers] == [1] * len(answers)


def test_a_misspelt_key_of_ours_is_no_key_of_another_system():
    assert "Did you mean rl.eval.temperature?" in complaint("rl", "rl.evl.temperature=1")
    assert "Did you mean optim.lr?" in complaint("rl", "lr=1")


@pytest.mark.parametrize(
    ("name", "text", "whose"),
    [
        ("a.yaml", "actor_rollout_ref:\n  actor:\n    optim:\n      lr: 1e-6\n", "a config of verl, in YAML"),
        ("a.yml", "grpo:\n  num_prompts_per_step: 32\n", "a config of NeMo-RL, in YAML"),
        ("a.json", '{"num_generations": 8, "learning_rate": 1e-6}', "a config of TRL, in JSON"),
        ("a.toml", '{"some": 1}', "JSON"),
        ("a.sh", "python3 -m verl.trainer.main_ppo data.train_batch_size=8", "a config of verl, in a shell script"),
    ],
)
def test_a_config_in_yaml_or_json_or_a_script_is_recognised(tmp_path, name, text, whose):
    path = tmp_path / name
    path.write_text(text)
    message = complaint("rl", path=path)
    assert message.startswith(f"{path} is {whose}; configs here are TOML. `mcore-rl init --from {path}` writes")
    assert "not valid TOML" not in message


def test_a_toml_file_with_a_mistake_is_still_a_toml_file(tmp_path):
    (tmp_path / "a.toml").write_text("rl = num_generations\n")
    assert "is not valid TOML" in complaint("rl", path=tmp_path / "a.toml")
