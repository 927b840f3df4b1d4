"""`mcore-rl init --from`: configs and scripts of other systems become configs here."""

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.cli.cli import main
from mcore_rl.config.describe import describe
from mcore_rl.config.kinds import KINDS
from mcore_rl.config.load import UNTRANSLATED, load_config
from mcore_rl.errors import ConfigError
from tests.documented import ROOT

MODULES = {"volcengine": "verl.trainer.main_ppo", "THUDM": "train.py"}
FILES = tomllib.loads((Path(__file__).parent / "migrations.toml").read_text(encoding="utf-8"))["file"]
TABLES = tomllib.loads((ROOT / "mcore_rl/config/translations.toml").read_text(encoding="utf-8"))


def written(
    path: Path, capsys: pytest.CaptureFixture[str], *words: str, kind: str = "rl"
) -> tuple[Any, list[str], str]:
    """Return the config, loaded without its lines that are to be decided; their keys; and the text."""
    assert main(["init", "--from", str(path), *words]) == 0
    text = capsys.readouterr().out
    file = path.with_suffix(".toml")
    file.write_text(text)
    undecided = [line for line in text.splitlines() if line.startswith(UNTRANSLATED)]
    if undecided:
        with pytest.raises(ConfigError, match="is to be decided"):
            load_config(KINDS[kind], file)
        file.write_text("".join(f"{line}\n" for line in text.splitlines() if line not in undecided))
    return load_config(KINDS[kind], file), [line.split('"')[1] for line in undecided], text


def script(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.sh"
    path.write_text(text)
    return path


def leaves(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, tuple(value) if isinstance(value, list) else None if value == "none" else value


@pytest.mark.matrix(
    "run_qwen30_a3b_megatron_sglang.sh-b178a3cd",
    "run_deepseek_math_gsm8k_megatron.sh-b178a3cd",
    "run-qwen3-30B-A3B.sh-624b824a",
    "run-qwen3-4B-base-sft.sh-624b824a",
    "config_codeforces.yaml-1416fa0",
    "example_config.yaml-f2cd5771",
    "grpo-math-qwen3-30ba3b-megatron-tp4-32k.yaml-7ea279ab",
    "train_prorlv2_math_hybrid_engine.sh-3c3be623",
    "train_dpo_llama.sh-3c3be623",
)
@pytest.mark.parametrize("file", FILES, ids=lambda file: file["of"].rpartition("/")[2].replace(" ", "-"))
def test_public_files_of_other_systems_become_what_was_translated_by_hand(
    file: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if file.get("form") == "yaml":
        path = tmp_path / "a.yaml"
        path.write_text(file["settings"])
    else:
        module = file.get("module") or MODULES[file["of"].partition("/")[0]]
        path = script(tmp_path, f"python3 -m {module} " + " ".join(file["settings"].splitlines()) + "\n")
    kind = file.get("program", "rl")
    config, undecided, text = written(path, capsys, *(["--program", kind] if "program" in file else []), kind=kind)
    assert sorted(undecided) == sorted(file["open"])
    found = {}
    for key, wanted in leaves(file["fields"]):
        value: Any = config
        for name in key.split("."):
            value = getattr(value, name)
        found[key] = pytest.approx(wanted) if isinstance(wanted, float) else wanted, value
    assert {key: value for key, (wanted, value) in found.items() if wanted != value} == {}
    unknown = text.partition("# No field is known to stand for:\n")[2].splitlines()
    assert [line.split()[1] for line in unknown] == file.get("unknown", [])


def test_each_field_and_setting_of_the_table_exists() -> None:
    fields = {doc.key for cls in KINDS.values() for doc in describe(cls)}
    for system, table in TABLES.items():
        assert table["fields"].keys() <= fields, system
        parts = (*table["fields"].values(), *table["refused"], *table.get("terms", {}).values())
        names = set(re.findall(r"\{([\w.]+)\}", " ".join(parts)))
        defaults = {key for rows in table["defaults"].values() for key in rows}
        assert defaults <= names, (system, defaults - names)
        assert set(table.get("renamed", {}).values()) <= names, (system, set(table["renamed"].values()) - names)


SLIME = """#!/bin/bash
set -ex
pkill -9 python; sleep 3
HAS=$(nvidia-smi topo -m 2>/dev/null | grep -o 'NV[0-9]*' | wc -l)
if [ "$HAS" -gt 0 ]; then LR=1; else LR=2; fi
LR=${LR_OF_ENV:-1e-6}
BASE="${BASE:-/models}"
N=8
export BATCH=$((32 * N))
SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
source "${SCRIPT_DIR}/models/small.sh"
CKPT_ARGS=(
   --hf-checkpoint "$BASE/Qwen3"   # the model
   #--hf-checkpoint /models/other
)
GRPO_ARGS=(--advantage-estimator grpo --eps-clip 0.2)
GRPO_ARGS+=(--eps-clip-high 0.28)
ray job submit --address="http://127.0.0.1:8265" \\
   --runtime-env-json="{\\"env_vars\\": {\\"A\\": \\"$N\\"}}" \\
   -- python3 train.py --colocate \\
   ${MODEL_ARGS[@]} "${CKPT_ARGS[@]}" ${GRPO_ARGS[@]} ${EMPTY[@]} \\
   --lr ${LR} --prompt-data 'my data.jsonl' --rm-type math --num-rollout 10 --rollout-batch-size 32 \\
   --rollout-max-response-len 512 --n-samples-per-prompt $N --global-batch-size $BATCH --seed $SEED "$@"
"""


def test_a_script_is_read_with_its_variables_arrays_arithmetic_and_sources(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models/small.sh").write_text("MODEL_ARGS=(\n --num-layers 2\n --moe-aux-loss-coeff 0.5\n)\n")
    config, undecided, _ = written(script(tmp_path, SLIME), capsys)
    assert (config.model.path, config.rl.prompts.files) == ("/models/Qwen3", ("my data.jsonl",))
    assert (config.optim.lr, config.train.global_batch, config.train.steps) == (1e-6, 256, 10)
    assert (config.rl.loss.clip_low, config.rl.loss.clip_high, config.model.moe.aux_loss_coeff) == (0.2, 0.28, 0.5)
    # Only a run of the script would know $SEED.
    assert undecided == ["train.seed"]


def test_a_source_that_is_not_there_and_a_variable_of_a_condition_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = SLIME.replace("LR=${LR_OF_ENV:-1e-6}\n", "")
    _, undecided, text = written(script(tmp_path, text), capsys)
    assert "# models/small.sh, which the script reads, is not there." in text
    assert undecided == ["train.seed", "optim.lr"]


@pytest.mark.parametrize(
    "text",
    [
        "B=0.2\nread -r -d '' training_commands <<EOF\n"
        "openrlhf.cli.train_dpo --adam.lr 5e-7 \\\n --model.beta $B\nEOF\n"
        "if [[ ${1} != slurm ]]; then\n    deepspeed --module $training_commands\nfi\n",
        'srun --nodes=1 bash -c "cd /x && deepspeed --module openrlhf.cli.train_dpo --adam.lr 5e-7 --model.beta 0.2"\n',
        "ssh node <<'EOF'\nexport A=1\npython -m openrlhf.cli.train_dpo --adam.lr=5e-7 --model.beta=0.2\nEOF\n",
    ],
)
def test_the_command_is_found_in_here_documents_and_in_strings_for_a_shell(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, _, _ = written(script(tmp_path, text), capsys, kind="dpo")
    assert (config.optim.lr, config.dpo.beta) == (5e-7, 0.2)


def test_a_script_is_not_run_and_arithmetic_is_not_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (
        f"touch {tmp_path}/ran\nA=$(touch {tmp_path}/ran)\nB=$((9**9**9))\nC=$((__import__(1)))\n"
        "python3 -m verl.trainer.main_ppo data.train_batch_size=$A data.max_prompt_length=$B "
        "data.max_response_length=$C actor_rollout_ref.rollout.n=4\n"
    )
    _, undecided, _ = written(script(tmp_path, text), capsys)
    assert not (tmp_path / "ran").exists()
    assert {"rl.rollout.prompts_per_step", "rl.prompts.max_tokens", "rl.rollout.max_new_tokens"} <= set(undecided)


@pytest.mark.full
def test_a_config_beside_a_script_is_read_and_a_base_of_a_config_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "grpo.yaml").write_text("num_generations: 4\nlearning_rate: 2e-6\nbeta: 0.04\n")
    text = "accelerate launch --num_processes 2 -m trl grpo --config grpo.yaml --learning_rate 3e-6\n"
    config, undecided, _ = written(script(tmp_path, text), capsys)
    assert (config.optim.lr, config.rl.loss.kl_coeff, config.train.global_batch) == (3e-6, 0.04, 16)
    assert "num_processes" not in undecided
    (tmp_path / "base.yaml").write_text(
        "grpo: {seed: 7, num_prompts_per_step: 4}\npolicy: {optimizer: {kwargs: {lr: 1e-3}}}\n"
    )
    (tmp_path / "top.yaml").write_text(
        "defaults: base.yaml\npolicy: {optimizer: null, megatron_cfg: {enabled: true}}\n"
    )
    config, _, _ = written(tmp_path / "top.yaml", capsys)
    assert (config.train.seed, config.rl.rollout.prompts_per_step, config.optim.lr) == (7, 4, 5e-6)
    (tmp_path / "top.yaml").write_text("defaults: none.yaml\ngrpo: {num_prompts_per_step: 7}\n")
    assert "It builds on none.yaml, which is not there" in written(tmp_path / "top.yaml", capsys)[2]


def test_references_to_other_settings_are_followed_or_left_to_the_user(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.yaml").write_text(
        "data: {train_batch_size: 64, max_prompt_length: '${data.train_batch_size}'}\n"
        "actor_rollout_ref:\n  model:\n    path: ???\n"
        "trainer: {project_name: math, default_local_dir: 'checkpoints/${trainer.project_name}'}\n"
    )
    config, undecided, text = written(tmp_path / "a.yaml", capsys)
    assert (config.rl.prompts.max_tokens, config.log.project, config.run_dir) == (64, "math", "runs/rl")
    assert "model.path" in undecided and "run_dir" not in undecided
    assert "#   run_dir: trainer.default_local_dir = checkpoints/${trainer.project_name}: it stands for" in text


def test_every_setting_of_a_file_is_named_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = {"num_generations": 8, "learning_rate": 1e-6, "beta": 0.0, "logging_steps": 5, "some_other": 3}
    (tmp_path / "a.json").write_text(json.dumps({**given, "lora_r": 4, "lora_target_modules": ["q_proj"]}))
    _, _, text = written(tmp_path / "a.json", capsys)
    assert "optim.lr = 1e-06  # learning_rate = 1e-06" in text and "rl.loss.kl_coeff = 0.0  # beta = 0.0" in text
    assert "# Without an effect there, as the rest is set: lora_r\n" in text
    assert "left out: logging_steps\n" in text
    assert "#   lora.targets: lora_target_modules = ['q_proj']\n" in text
    assert text.endswith("# No field is known to stand for:\n#   some_other = 3\n")


def test_a_loss_that_is_none_here_keeps_the_file_from_starting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = script(tmp_path, "python -m verl.trainer.main_ppo actor_rollout_ref.actor.policy_loss.loss_mode=gpg\n")
    _, undecided, text = written(path, capsys)
    assert "rl.loss.kind" in undecided
    file = tmp_path / "a.toml"
    file.write_text(text)
    assert main(["config", str(file), "--program", "rl"]) == 2
    said = capsys.readouterr().err
    assert "rl.loss.kind is to be decided: actor.policy_loss.loss_mode = gpg: no value here stands for it" in said


def test_the_name_of_a_file_or_its_folder_tells_the_training_and_other_commands_are_passed_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "dpo"
    folder.mkdir()
    (folder / "config.yaml").write_text("model_name_or_path: m\nbeta: 0.3\n")
    assert written(folder / "config.yaml", capsys, kind="dpo")[0].dpo.beta == 0.3
    (tmp_path / "orpo.yaml").write_text("model_name_or_path: m\n")
    assert main(["init", "--from", str(tmp_path / "orpo.yaml")]) == 2
    assert "trains by orpo" in capsys.readouterr().err
    # Given by the user, the training is not guessed.
    assert written(tmp_path / "orpo.yaml", capsys, "--program", "dpo", kind="dpo")[0].dpo.loss == "sigmoid"
    text = (
        "python -m openrlhf.cli.batch_inference --pretrain a --best_of_n 8 --temperature 1 --top_p 1 --max_len 9\n"
        "deepspeed --module openrlhf.cli.train_dpo --pretrain b --beta 0.2\n"
    )
    config, _, _ = written(script(tmp_path, text), capsys, kind="dpo")
    assert (config.model.path, config.dpo.beta) == ("b", 0.2)


def test_a_folder_and_a_training_on_the_command_line_decide(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.json").write_text('{"learning_rate": 1e-6, "beta": 0.04, "model_name_or_path": "x"}')
    assert main(["init", "--from", str(tmp_path / "a.json")]) == 2
    assert "does not say which training it is of. Give --program" in capsys.readouterr().err
    config, _, _ = written(tmp_path / "a.json", capsys, "models/mine", "--program", "dpo", kind="dpo")
    assert (config.model.path, config.dpo.beta) == ("models/mine", 0.04)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.yaml", "a: [1", "is neither YAML nor JSON"),
        ("a.yaml", "- 1\n", "is a list, wanted settings"),
        ("a.yaml", None, "cannot be read"),
        ("a.yaml", "a: 1\n", "has no setting of verl, slime, TRL, NeMo-RL, OpenRLHF"),
        ("a.sh", "echo hello\n", "nor a shell script with a command of a training"),
        ("a.sh", "python -m verl.trainer.sft_trainer actor_rollout_ref.x=1\n", "of verl only reinforcement learning"),
        ("a.sh", "trl kto --model_name_or_path m --num_generations 2\n", "trains by kto, which is not read"),
        ("a.sh", "python x/online_dpo.py --model_name_or_path m\n", "trains by online_dpo, which is not read"),
        ("a.sh", "python -m openrlhf.cli.train_prm --pretrain m\n", "trains by train_prm, which is not read"),
    ],
)
def test_what_is_no_config_is_refused(
    name: str, text: str | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    assert main(["init", "--from", str(tmp_path / name)]) == 2
    assert said in capsys.readouterr().err
    assert main(["init"]) == 2
    assert "Give FOLDER, a model, or --from FILE" in capsys.readouterr().err


def test_the_examples_of_the_page_are_what_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chapters = (ROOT / "docs/coming_from.md").read_text(encoding="utf-8").split("\n## ")[1:]
    assert len(chapters) == len(TABLES)
    for chapter in chapters:
        (form, theirs), (_, ours) = re.findall(r"```(\w+)\n(.*?)```", chapter, re.DOTALL)[:2]
        path = tmp_path / ("a.sh" if form == "bash" else "a.yaml")
        path.write_text(theirs)
        assert main(["init", "--from", str(path)]) == 0
        lines = {line.partition("  #")[0].rstrip() for line in capsys.readouterr().out.splitlines()}
        assert {line.partition("  #")[0].rstrip() for line in ours.splitlines()} <= lines
