"""Programs that are given a folder do as with its import, its config and its tokenizer named by hand."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from mcore_rl.cli.cli import main
from mcore_rl.config.changes import leaves
from mcore_rl.config.sft import SFTConfig
from mcore_rl.config.toml import toml_value
from mcore_rl.megatron import platform as platforms
from mcore_rl.megatron.mesh import destroy_mesh
from mcore_rl.programs.sft import train
from mcore_rl.storage.run_config import load_run_config
from mcore_rl.workers.imports import ensure_imported
from tests.conversion import imported
from tests.ranks import run_ranks
from tests.tokenizer_files import WORDS

LINES = [
    {"messages": [{"role": "user", "content": word}, {"role": "assistant", "content": f"{word} sat"}]} for word in WORDS
]


def said(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    capsys.readouterr()
    assert main(["generate", *map(str, words)]) == 0
    destroy_mesh()
    platforms.stop()
    return capsys.readouterr().out


@pytest.mark.full
def test_any_folder_answers_as_transformers_does(
    hf_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MCORE_RL_CACHE", str(tmp_path / "imports"))
    tokenizer = AutoTokenizer.from_pretrained(hf_folder)
    chat = [{"role": "user", "content": "the cat"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=False)
    theirs = AutoModelForCausalLM.from_pretrained(hf_folder, dtype=torch.float32)
    with torch.no_grad():
        made = theirs.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
    words = ["--chat", "--prompt", "the cat", "--tokens", 12]
    answer = said(capsys, "--model", hf_folder, *words)
    assert answer.split() == tokenizer.decode(made).removesuffix("<|im_end|>").split()
    checkpoint = imported(hf_folder, tmp_path / "import", vocab_multiple=128)
    for option, path in (("--model", checkpoint.parent), ("--model", checkpoint), ("--checkpoint", checkpoint)):
        assert said(capsys, option, path, *words) == answer


@pytest.mark.full
def test_a_run_from_a_folder_is_the_run_from_its_import_and_all_settings(hf_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    common = [
        f'data.train=["{tmp_path / "chat.jsonl"}"]', "data.seq_length=64", "train.steps=2", "train.global_batch=2",
        "optim.lr=1e-3",
    ]  # fmt: skip

    def losses(name: str, *fields: str) -> list[float]:
        config = load_run_config(SFTConfig, None, [*common, f"run_dir={tmp_path / name}", *fields])
        ensure_imported(config.checkpoint.load, config.model, Path(config.run_dir))
        run_ranks(train, 1, config)
        records = map(json.loads, (tmp_path / name / "metrics.jsonl").read_text().splitlines())
        return [record["train/loss_nats"] for record in records if "train/loss_nats" in record]

    by_folder = losses("by_folder", f"model.path={hf_folder}")
    model = load_run_config(SFTConfig, None, [f"model.path={hf_folder}"]).model
    checkpoint = imported(hf_folder, tmp_path / "import", vocab_multiple=128)
    fields = dict(leaves(model, "model.")).items()
    settings = [f"{key}={toml_value(value)}" for key, value in fields if key != "model.path"]
    by_hand = losses("by_hand", *settings, f"checkpoint.load={checkpoint}", f"data.tokenizer.path={hf_folder}",
                     "data.tokenizer.kind=huggingface")  # fmt: skip
    assert len(by_folder) == 2 and by_folder == by_hand

    # What was trained opens in transformers, from the run alone; an import comes back byte for byte.
    assert main(["convert", "export", str(tmp_path / "by_folder"), str(tmp_path / "trained")]) == 0
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "trained").config.num_hidden_layers == model.num_layers
    assert main(["convert", "export", str(checkpoint.parent), str(tmp_path / "back")]) == 0
    for file in hf_folder.iterdir():
        if "safetensors" not in file.name:
            assert (tmp_path / "back" / file.name).read_bytes() == file.read_bytes(), file.name
    assert main(["convert", "verify", str(hf_folder), str(tmp_path / "back")]) == 0
