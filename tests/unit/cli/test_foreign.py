"""Configs of other systems as TOML: what is the same is set, and everything else is listed."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.cli.cli import main
from mcore_rl.config.kinds import KINDS
from mcore_rl.config.load import load_config

VERL = """
data:
  train_files: [gsm8k.parquet]
  train_batch_size: 1024
  max_prompt_length: 512
  max_response_length: 1024
actor_rollout_ref:
  model: {path: Qwen/Qwen3-30B-A3B, lora_rank: 0}
  actor:
    ppo_mini_batch_size: 256
    clip_ratio: 0.2
    clip_ratio_high: 0.28
    ppo_epochs: 1
    grad_clip: 1.0
    optim: {lr: 1e-6, lr_warmup_steps: -1}
    megatron: {tensor_model_parallel_size: 2, expert_model_parallel_size: 4}
  rollout:
    n: 16
    temperature: 1.0
    top_k: -1
    val_kwargs: {temperature: 0.5, n: 1}
critic:
  optim: {lr: 1e-5}
  ppo_epochs: 3
trainer:
  logger: [console, wandb]
  project_name: math
  experiment_name: null
  save_freq: 20
"""
OF_VERL: dict[str, Any] = {
    "rl.rollout.prompts_per_step": 1024,
    "rl.prompts.max_tokens": 512,
    "rl.rollout.max_new_tokens": 1024,
    "model.path": "Qwen/Qwen3-30B-A3B",
    "rl.loss.clip_low": 0.2,
    "rl.loss.clip_high": 0.28,
    "rl.update.epochs": 1,
    "optim.clip_grad": 1.0,
    "optim.lr": 1e-6,
    "mesh.tp": 2,
    "mesh.ep": 4,
    "rl.rollout.group_size": 16,
    "rl.rollout.temperature": 1.0,
    "log.project": "math",
}
TRL = {
    "model_name_or_path": "Qwen/Qwen3-0.6B",
    "learning_rate": 1e-6,
    "beta": 0.04,
    "num_generations": 8,
    "generation_batch_size": 64,
    "epsilon": 0.1,
    "epsilon_high": 0.3,
    "max_completion_length": 256,
    "per_device_train_batch_size": 4,
    "output_dir": "out/grpo",
    "bf16": True,
}
OF_TRL: dict[str, Any] = {
    "model.path": "Qwen/Qwen3-0.6B",
    "optim.lr": 1e-6,
    "rl.loss.kl_coeff": 0.04,
    "rl.rollout.group_size": 8,
    "rl.loss.clip_low": 0.1,
    "rl.loss.clip_high": 0.3,
    "rl.rollout.max_new_tokens": 256,
    "run_dir": "out/grpo",
}
NEMO = """
grpo: {num_prompts_per_step: 32, num_generations_per_prompt: 16, max_num_steps: 100}
loss_fn: {ratio_clip_min: 0.2, ratio_clip_max: 0.28, reference_policy_kl_penalty: 0.01}
policy:
  model_name: Qwen/Qwen2.5-1.5B
  generation: {temperature: 0.8, max_new_tokens: 512}
  megatron_cfg: {pipeline_model_parallel_size: 2, context_parallel_size: 2}
"""
OF_NEMO: dict[str, Any] = {
    "rl.rollout.prompts_per_step": 32,
    "rl.rollout.group_size": 16,
    "rl.loss.clip_low": 0.2,
    "rl.loss.clip_high": 0.28,
    "model.path": "Qwen/Qwen2.5-1.5B",
    "rl.rollout.temperature": 0.8,
    "rl.rollout.max_new_tokens": 512,
    "mesh.pp": 2,
    "mesh.cp": 2,
}


def written(
    capsys: pytest.CaptureFixture[str], path: Path, *words: str, kind: str = "rl"
) -> tuple[dict[str, Any], str]:
    """The fields that are set, by key, and the comments; the text loads as a config here."""
    assert main(["init", "--from", str(path), *words]) == 0
    text = capsys.readouterr().out
    file = path.with_suffix(".toml")
    file.write_text(text)
    load_config(KINDS[kind], file)
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    values = {
        line.partition(" = ")[0]: tomllib.loads(f"value = {line.partition(' = ')[2]}")["value"]
        for line in lines
    }
    return values, "\n".join(line for line in text.splitlines() if line.startswith("#"))


@pytest.mark.parametrize(
    ("name", "text", "system", "wanted"),
    [
        ("a.yaml", VERL, "verl", OF_VERL),
        ("a.json", json.dumps(TRL), "TRL", OF_TRL),
        ("a.yml", NEMO, "NeMo-RL", OF_NEMO),
    ],
)
def test_settings_of_the_same_value_are_set_and_all_others_listed(
    name: str,
    text: str,
    system: str,
    wanted: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / name).write_text(text)
    values, comments = written(capsys, tmp_path / name)
    assert values == wanted
    assert comments.startswith(f"# rl, from {tmp_path / name}, a config of {system}.")
    origins = re.findall(r"  # (\S+)$", (tmp_path / name).with_suffix(".toml").read_text(), re.MULTILINE)
    listed = re.findall(r"^#   (\S+) = ", comments, re.MULTILINE)
    assert not set(origins) & set(listed)
    keys = set(re.findall(r'[\w"]+(?=:)', text.replace('"', "")))
    named = {key.rpartition(".")[2] for key in (*origins, *listed)}
    assert {key for key in keys if key not in named} <= {
        *(
            "data",
            "actor_rollout_ref",
            "model",
            "actor",
            "optim",
            "megatron",
            "rollout",
            "val_kwargs",
            "critic",
        ),
        *("trainer", "experiment_name", "grpo", "loss_fn", "policy", "generation", "megatron_cfg"),
    }


def test_what_counts_otherwise_names_our_field_and_the_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.yaml").write_text(VERL)
    _, comments = written(capsys, tmp_path / "a.yaml")
    assert (
        "ppo_mini_batch_size = 256: here train.global_batch. It counts the completions of one update"
        in comments
    )
    assert "rollout.top_k = -1: rl.rollout.top_k = -1: expected an integer > 0" in comments
    assert "#   trainer.save_freq = 20: here checkpoint.interval" in comments
    unknown = comments.partition("# No field is known to stand for:\n")[2].splitlines()
    assert unknown == [
        "#   actor_rollout_ref.rollout.val_kwargs.temperature = 0.5",
        "#   actor_rollout_ref.rollout.val_kwargs.n = 1",
        "#   critic.ppo_epochs = 3",
    ]
    (tmp_path / "b.json").write_text(json.dumps(TRL))
    _, comments = written(capsys, tmp_path / "b.json")
    assert "generation_batch_size = 64: here rl.rollout.prompts_per_step. It counts prompts" in comments


def test_references_to_other_settings_are_listed_and_not_set(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (
        "data: {train_batch_size: 64}\nactor_rollout_ref:\n  model:\n    path: ???\n"
        "trainer: {project_name: math, default_local_dir: 'checkpoints/${trainer.project_name}'}\n"
    )
    (tmp_path / "a.yaml").write_text(text)
    values, comments = written(capsys, tmp_path / "a.yaml")
    assert values == {"rl.rollout.prompts_per_step": 64, "log.project": "math"}
    for setting in (
        "trainer.default_local_dir = checkpoints/${trainer",
        "actor_rollout_ref.model.path = ???",
    ):
        assert f"#   {setting}" in comments
    assert comments.count("to be written out") == 2


def test_a_folder_and_a_training_on_the_command_line_decide(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.json").write_text(json.dumps({**TRL, "num_generations": None}))
    assert main(["init", "--from", str(tmp_path / "a.json")]) == 2
    assert "does not say which training it is of. Give --program" in capsys.readouterr().err
    values, _ = written(capsys, tmp_path / "a.json", "models/mine", "--program", "dpo", kind="dpo")
    assert (values["model.path"], values["dpo.beta"]) == ("models/mine", 0.04)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: [1", "is neither YAML nor JSON"),
        ("- 1\n", "is a list, wanted settings"),
        (None, "cannot be read"),
    ],
)
def test_what_is_no_config_is_refused(
    text: str | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        (tmp_path / "a.yaml").write_text(text)
    assert main(["init", "--from", str(tmp_path / "a.yaml")]) == 2
    assert said in capsys.readouterr().err
    assert main(["init"]) == 2
    assert "Give FOLDER, a model, or --from FILE" in capsys.readouterr().err
