"""Fine-tuning as a user does it: from the weights of a pretraining run, stopped and resumed, to DONE."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from mcore_rl.storage.checkpoint import find_checkpoint
from tests.conversion import assert_adapters_alone_moved, read_dist
from tests.e2e.conftest import Finished, losses
from tests.emitted import assert_emitted
from tests.forked import run_command, run_main, succeed
from tests.tokenizer_files import save_tokenizer

WORDS = [f"w{index}" for index in range(100)]
SPECIAL = ["<unk>", "<end>", "<turn>", "user", "assistant"]
TEMPLATE = (
    "{% for message in messages %}<turn> {{ message.role }} {{ message.content }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<turn> assistant {% endif %}"
)


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    """A tokenizer of words with its template, and two files of questions whose answers repeat them."""
    folder = tmp_path / "chats"
    save_tokenizer(folder, SPECIAL + WORDS, "<unk>", ("<end>", "<turn>"), eos_token="<end>")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    draw = random.Random(0)
    for name, count in (("train", 120), ("valid", 20)):
        lines = []
        for _ in range(count):
            word = draw.choice(WORDS[:8])
            question = " ".join([*draw.choices(WORDS, k=draw.randint(0, 9)), word])
            lines.append(json.dumps({"prompt": question, "response": f"{word} {word}"}))
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    return folder


@pytest.fixture
def sft_file(config_file: Path, chats: Path, tmp_path: Path) -> Path:
    """The pretraining config's model and mesh, 30 steps that go through the data more than twice."""
    text = config_file.read_text()
    begin, end = text.index("[data]"), text.index("[mesh]")
    data = (
        f'[data]\ntrain = ["{chats}/train.jsonl"]\nvalid = ["{chats}/valid.jsonl"]\nseq_length = 32\n'
        f'tokenizer = {{ kind = "huggingface", path = "{chats}" }}\n'
    )
    path = tmp_path / "sft.toml"
    path.write_text(
        text[:begin]
        + data
        + text[end:].replace("steps = 12", "steps = 30").replace("micro_batch = 4", "micro_batch = 8")
    )
    return path


@pytest.mark.full
def test_from_pretrained_weights_stopped_and_resumed_it_is_bit_equal(
    trained: Path, sft_file: Path, tmp_path: Path
) -> None:
    """With dropout, on TP2 x EP2; the answers' loss falls, and the log says where the weights are from."""
    load = [f"checkpoint.load={trained}", "checkpoint.load_optimizer=false"]

    straight = succeed("mcore_rl.programs.sft", [sft_file, f"run_dir={tmp_path}/straight", *load], 2)
    assert f"weights of {trained}/checkpoints/iter_0000012" in straight.stdout
    assert "120 conversations in" in straight.stdout
    wanted = losses(tmp_path / "straight")
    assert (tmp_path / "straight/DONE").exists() and len(wanted) == 30
    assert wanted[30] < 0.8 * wanted[1]
    assert "eval/loss_nats" in (tmp_path / "straight/metrics.jsonl").read_text()
    assert_emitted("sft", tmp_path / "straight")

    words = [sft_file, f"run_dir={tmp_path}/stopped", *load]
    succeed("tests.e2e.signalled", ["sft", "SIGTERM.step.6", *words], 2)
    assert len(losses(tmp_path / "stopped")) == 6 and not (tmp_path / "stopped/DONE").exists()
    data = tmp_path / "chats/train.jsonl"
    conversations = data.read_text()
    data.write_text(f"{conversations}\n{conversations.splitlines()[0]}")
    grown = run_command("sft", *words)
    assert grown.returncode == 2 and "Traceback" not in grown.stderr
    assert f'data.train is "{data} with {len(conversations.encode())} bytes, CRC-32 ' in grown.stderr, grown.stderr
    assert 'checkpoint.allow_changes=["data.train"]' in grown.stderr
    data.write_text(conversations)
    succeed("mcore_rl.programs.sft", words, 2)
    assert losses(tmp_path / "stopped") == wanted


@pytest.mark.parametrize(
    ("lines", "overrides", "said"),
    [
        ("", [], "train.jsonl is empty"),
        ('{"prompt": "w1", "response": "w1"}', ["data.seq_length=31"], "data.seq_length=31 is not a multiple of 2"),
        ('{"prompt": "w1", "response": "w1"}', ["model.vocab_size=64"], "model.vocab_size is 64"),
    ],
    ids=["empty", "row", "vocabulary"],
)
def test_what_cannot_be_trained_on_is_refused_before_anything_is_written(
    lines: str,
    overrides: list[str],
    said: str,
    chats: Path,
    sft_file: Path,
    mcore_rl: Callable[..., Finished],
    tmp_path: Path,
) -> None:
    (chats / "train.jsonl").write_text(lines)
    result = mcore_rl("sft", sft_file, *overrides)
    assert result.returncode == 2
    assert said in result.stderr, result.stderr
    assert "Traceback" not in result.stderr and not (tmp_path / "run/config.toml").exists()


@pytest.mark.full
def test_low_rank_adapters_learn_over_pretrained_weights_and_are_exported(
    trained: Path, sft_file: Path, tmp_path: Path
) -> None:
    """On TP2 x EP2; the base stays as it was, the answers' loss falls, and both exports are written."""
    load = [f"checkpoint.load={trained}", "checkpoint.load_optimizer=false", "model.attention_dropout=0"]
    lora = ["lora.rank=8", "optim.lr=1e-2", "model.hidden_dropout=0"]
    tuned = succeed("mcore_rl.programs.sft", [sft_file, f"run_dir={tmp_path}/lora", *load, *lora], 2)
    assert "iter_0000012, a checkpoint of pretrain, and new adapters; optimizer" in tuned.stdout
    assert "adapters: 4 matrices of attention with " in tuned.stdout
    wanted = losses(tmp_path / "lora")
    assert wanted[30] < 0.8 * wanted[1]
    assert_adapters_alone_moved(find_checkpoint(trained), find_checkpoint(tmp_path / "lora"))
    for name, option in (("merged", ["--merge"]), ("adapter", ["--adapter", "fused"])):
        words = ["convert", "export", f"{tmp_path}/lora", f"{tmp_path}/{name}", *option]
        exported = run_command(*words)
        assert exported.returncode == 0, exported.stderr
    assert (tmp_path / "merged/model.safetensors").exists()
    assert (tmp_path / "adapter/adapter_model.safetensors").exists()
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["rank_pattern"]["experts.down_proj"]) == (8, 32.0, 4)
    imported = run_command("convert", "import", tmp_path / "merged", tmp_path / "imported")
    assert imported.returncode == 0, imported.stderr
    ask = ["generate", "--run", tmp_path / "lora", "--chat", "--prompt", "w9 w7 w3", "--tokens", 4]
    weights_of = ([], ["--checkpoint", tmp_path / "imported"], ["--checkpoint", trained])
    ours, merged, of_base = (run_main("mcore_rl.cli.cli", [*ask, *more]) for more in weights_of)
    assert ours.returncode == 0, ours.stderr
    assert ours.stdout == merged.stdout != of_base.stdout
    again = ["train.steps=1", f"lora.load={tmp_path}/adapter", f"run_dir={tmp_path}/again"]
    again.append("checkpoint.weights=adapters")
    resumed = succeed("mcore_rl.programs.sft", [sft_file, *load, *lora, *again], 2)
    assert f"adapters of {tmp_path}/adapter" in resumed.stdout
    assert losses(tmp_path / "again")[1] < 0.8 * wanted[1]
    alone = read_dist(find_checkpoint(tmp_path / "again"))
    assert {key for key in alone if not key.startswith("optimizer.")} == {
        key for key in alone if ".adapter." in key and not key.startswith("optimizer.")
    }
    answer = run_main("mcore_rl.cli.cli", ["generate", "--run", tmp_path / "again", *ask[3:]])
    assert answer.returncode == 0 and answer.stdout != of_base.stdout, answer.stderr
