"""`mcore-rl init` and whether a training of a model fits: from its folder, or from a config of another system."""

import json
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from mcore_rl.checks.programs import PROGRAMS
from mcore_rl.cli.cli import main, run
from mcore_rl.cli.init import size_of
from mcore_rl.config.kinds import KINDS
from mcore_rl.config.load import load_config
from mcore_rl.errors import ConfigError
from mcore_rl.planning.device import parse_gpus
from mcore_rl.storage.run_config import load_run_config
from tests.conversion import saved

QWEN3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "decoder_sparse_step": 1, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 6144, "max_position_embeddings": 40960,
    "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768, "norm_topk_prob": True,
    "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
    "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "tie_word_embeddings": False,
    "vocab_size": 151936,
}  # fmt: skip


@pytest.fixture
def qwen(tmp_path: Path) -> Path:
    folder = tmp_path / "my models" / "Qwen3-30B-A3B"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(QWEN3_30B_A3B))
    return folder


@pytest.mark.full
def test_the_answer_is_one_line_and_its_command_passes_the_checks(
    qwen: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["plan", str(qwen), "--gpus", "8xH100"]) == 0
    answer, command, *_ = capsys.readouterr().out.splitlines()
    # The card of the model: 30.5 B parameters, 3.3 B activated.
    assert answer.startswith("Qwen3-30B-A3B, 30.5 B parameters, 3.35 B at work for a token: yes, sft in bf16 with ")
    used, free = map(float, re.findall(r"([\d.]+) (?:GiB|free)", answer)[:2])
    assert used + free == pytest.approx(80 - 6, abs=0.2) and used > 16 * 30.5 / 8 * 0.9
    fields = shlex.split(command.split(" CONFIG ")[1])
    assert fields[0] == f"model.path={qwen}"
    data = ["data.train=x", "data.tokenizer.kind=huggingface", f"data.tokenizer.path={qwen}"]
    config = load_run_config(PROGRAMS["sft"].config, None, [*fields, *data])
    PROGRAMS["sft"].check(config, 8)
    with pytest.raises(ConfigError, match=r"no, sft .* does not fit on 2 x H100\. It does on [48] x H100 \("):
        run(["plan", str(qwen), "--gpus", "2xH100"])
    # What is refused whatever the mesh is said as it is.
    with pytest.raises(ConfigError, match=r"data\.seq_length=100000 .*model\.max_position"):
        run(["plan", str(qwen), "data.seq_length=100000", "--gpus", "8xH100"])


def test_a_model_of_the_hub_is_asked_about_by_its_name(
    qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    snapshot = tmp_path / "hub/models--Qwen--Qwen3-30B-A3B/snapshots/0123abcd"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(QWEN3_30B_A3B))
    (tmp_path / "hub/models--Qwen--Qwen3-30B-A3B/refs").mkdir()
    (tmp_path / "hub/models--Qwen--Qwen3-30B-A3B/refs/main").write_text("0123abcd")
    assert run(["plan", str(qwen), "--gpus", "8xH100"]) == 0
    by_folder = capsys.readouterr().out
    assert run(["plan", "Qwen/Qwen3-30B-A3B", "--gpus", "8xH100"]) == 0
    # The folder's path has a blank, for which the shell's word is quoted.
    named = by_folder.replace(f"'model.path={qwen}'", "model.path=Qwen/Qwen3-30B-A3B")
    assert named != by_folder and capsys.readouterr().out == named
    with pytest.raises(ConfigError, match=r"no file Qwen/Other, and no recipe .*`hf download Qwen/Other config\.json`"):
        run(["plan", "Qwen/Other", "--gpus", "8xH100"])


def test_adapters_fit_on_fewer_gpus_and_the_command_has_them(qwen: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", str(qwen), "--gpus", "1xH100", "--lora-rank", "16"]) == 0
    answer, command, *_ = capsys.readouterr().out.splitlines()
    # All 30.5 B weights in 16 bits lie on the GPU.
    assert "yes, sft in bf16" in answer and float(re.findall(r"([\d.]+) GiB", answer)[0]) > 2 * 30.5e9 / 2**30
    assert command.split()[-1] == "lora.rank=16"


def test_the_size_is_that_of_the_weights(tmp_path: Path) -> None:
    folder = saved("qwen3_moe", tmp_path / "model")
    total = 0
    for file in folder.glob("*.safetensors"):
        total += sum(tensor.numel() for tensor in load_file(file).values())
    config = load_run_config(PROGRAMS["pretrain"].config, None, [f"model.path={folder}", "model.vocab_multiple=1"])
    assert size_of(config.model).startswith(f"{total / 1e9:.3g} B parameters")


@pytest.mark.matrix("none-pretrain", "none-sft", "none-dpo", "8xH100-rl")
@pytest.mark.parametrize("kind", PROGRAMS)
@pytest.mark.parametrize("gpus", ["8xH100", "none"])
def test_a_config_is_written_that_passes_all_checks(
    qwen: Path, kind: str, gpus: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (qwen / "tokenizer.json").write_text("{}")
    assert run(["init", str(qwen), "--program", kind, *(() if gpus == "none" else ("--gpus", gpus))]) == 0
    text = capsys.readouterr().out
    file = tmp_path / "my.toml"
    file.write_text(text)
    ranks = 1 if gpus == "none" else 8
    assert f"mcore-rl {kind} THIS_FILE --ranks {ranks}" in text.splitlines()[0] and len(text.splitlines()) < 30
    config, _ = PROGRAMS[kind].checked_config(file, [], ranks)
    assert config.model.num_layers == 48 and config.platform.precision == ("fp32" if ranks == 1 else "bf16")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("8", "wanted a number and a kind of GPU, as 8xH100"),
        ("0xH100", "wanted a number"),
        ("12xH100", "more than 8 GPUs are nodes of 8"),
        ("8xH10O", 'gpus="H10O" is no known device. Did you mean H100'),
    ],
)
def test_gpus_that_are_none_are_refused(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(reason)):
        parse_gpus(text)


def test_a_config_is_planned_on_gpus_without_a_clusters_file(capsys: pytest.CaptureFixture[str]) -> None:
    def lines(*words: str) -> list[str]:
        assert run(["plan", "qwen3_30b_a3b/pretrain", *words]) == 0
        return capsys.readouterr().out.splitlines()

    # The example's nodes have a little less memory than the data sheet.
    planned, of_cluster = lines("--gpus", "32xH100"), lines("--cluster", "example_h100", "--nodes", "4")
    assert [line.replace("74.0 GiB", "73.6 GiB") for line in planned] == of_cluster
    with pytest.raises(ConfigError, match="--gpus names all GPUs"):
        lines("--gpus", "8xH100", "--nodes", "4")
    with pytest.raises(ConfigError, match="is a model: `mcore-rl plan"):
        run(["plan", "/tmp", "--cluster", "example_h100", "--nodes", "1"])


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
    values = {line.partition(" = ")[0]: tomllib.loads(f"value = {line.partition(' = ')[2]}")["value"] for line in lines}
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
    name: str, text: str, system: str, wanted: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
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
        *("data", "actor_rollout_ref", "model", "actor", "optim", "megatron", "rollout", "val_kwargs", "critic"),
        *("trainer", "experiment_name", "grpo", "loss_fn", "policy", "generation", "megatron_cfg"),
    }


def test_what_counts_otherwise_names_our_field_and_the_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.yaml").write_text(VERL)
    _, comments = written(capsys, tmp_path / "a.yaml")
    assert "ppo_mini_batch_size = 256: here train.global_batch. It counts the completions of one update" in comments
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
    for setting in ("trainer.default_local_dir = checkpoints/${trainer", "actor_rollout_ref.model.path = ???"):
        assert f"#   {setting}" in comments
    assert comments.count("to be written out") == 2


def test_a_folder_and_a_training_on_the_command_line_decide(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.json").write_text(json.dumps({**TRL, "num_generations": None}))
    assert main(["init", "--from", str(tmp_path / "a.json")]) == 2
    assert "does not say which training it is of. Give --program" in capsys.readouterr().err
    values, _ = written(capsys, tmp_path / "a.json", "models/mine", "--program", "dpo", kind="dpo")
    assert (values["model.path"], values["dpo.beta"]) == ("models/mine", 0.04)


@pytest.mark.parametrize(
    ("text", "said"),
    [("a: [1", "is neither YAML nor JSON"), ("- 1\n", "is a list, wanted settings"), (None, "cannot be read")],
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
