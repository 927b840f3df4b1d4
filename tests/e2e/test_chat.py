"""A chat model as a new user makes it: fine-tuned on ChatML conversations, trained with rewards, evaluated, asked."""

import json
from pathlib import Path

import pytest

from mcore_rl.api import read_metrics
from tests.e2e.conftest import TINY_MODEL
from tests.forked import CLI, succeed
from tests.tokenizer_files import save_tokenizer

WORDS = [f"w{index}" for index in range(24)]
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + "
    "'\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The template of Qwen's chat models, without its default system turn."""
MODEL = (
    'run_dir = "{folder}/{name}"'
    + TINY_MODEL
    + """vocab_size = 40
[optim]
lr = {lr}
"""
)
SFT = (
    MODEL
    + """
[data]
train = ["{folder}/chats.jsonl"]
seq_length = 128
tokenizer = {{ kind = "huggingface", path = "{folder}/tokenizer" }}
[train]
steps = 40
global_batch = 4
micro_batch = 4
[checkpoint]
interval = "none"
"""
)
RL = (
    MODEL
    + """
[data]
tokenizer = {{ kind = "huggingface", path = "{folder}/tokenizer" }}
[train]
steps = 2
global_batch = 16
eval_interval = 2
[checkpoint]
interval = 2
load = "{folder}/sft"
[rl.prompts]
task = "file"
files = ["{folder}/known.jsonl"]
max_tokens = 16
[rl.rollout]
prompts_per_step = 4
group_size = 4
max_new_tokens = 8
[rl.reward]
parts = ["exact"]
[rl.loss]
kind = "gspo"
[rl.eval]
files = ["{folder}/held_out.jsonl"]
num_prompts = 4
samples = 1
temperature = 0.0
"""
)


def follower(index: int) -> str:
    """Return the answer to a word: the two words after it."""
    return f"{WORDS[(index + 1) % len(WORDS)]} {WORDS[(index + 2) % len(WORDS)]}"


def make_chat_files(folder: Path) -> None:
    """Write a tokenizer whose turns end otherwise than its texts, conversations, prompts, and the two configs.

    The conversations leave out four words, which the held-out prompts ask for: an accuracy of 1 would be equal in
    programs that all score everything as correct.
    """
    names = ["<unk>", "system", "user", "assistant", *WORDS]
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    fields = {"eos_token": "<|endoftext|>", "chat_template": CHATML}
    save_tokenizer(folder / "tokenizer", names, "<unk>", special, **fields)
    taught = range(len(WORDS) - 4)
    chats = [[("user", WORDS[i]), ("assistant", follower(i))] for i in taught]
    lines = [{"messages": [{"role": role, "content": text} for role, text in chat]} for chat in chats]
    (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, lines)))
    prompts = [{"prompt": WORDS[i], "answer": follower(i)} for i in range(len(WORDS))]
    (folder / "known.jsonl").write_text("\n".join(map(json.dumps, prompts[:12])))
    (folder / "held_out.jsonl").write_text("\n".join(map(json.dumps, prompts[-8::2])))
    (folder / "sft.toml").write_text(SFT.format(folder=folder, name="sft", lr=1e-2))
    (folder / "rl.toml").write_text(RL.format(folder=folder, name="rl", lr=1e-4))


def test_a_chat_model_ends_its_turns_and_is_as_good_in_rl_eval_and_generate(tmp_path: Path) -> None:
    """No completion is truncated, and the greedy accuracy on the held-out prompts is one number in all three."""
    make_chat_files(tmp_path)
    succeed("mcore_rl.programs.sft", [tmp_path / "sft.toml"])
    log = succeed("mcore_rl.programs.rl", [tmp_path / "rl.toml"]).stdout
    assert "a completion ends at '<|im_end|>'" in log
    metrics = read_metrics(tmp_path / "rl")
    assert metrics["rollout/truncated_fraction"] and not any(metrics["rollout/truncated_fraction"].values())
    evaluated = json.loads(succeed("mcore_rl.cli.evaluate", [tmp_path / "rl.toml"]).stdout)
    correct = 0
    for line in (tmp_path / "held_out.jsonl").read_text().splitlines():
        prompt = json.loads(line)
        words = ["generate", "--run", tmp_path / "rl", "--chat", "--prompt", prompt["prompt"], "--tokens", 8]
        answer = succeed(CLI, [*words, "--temperature", 0]).stdout
        correct += answer == prompt["answer"] + "\n"
    assert 0.5 <= correct / 4 < 1.0
    assert evaluated["eval/accuracy"] == metrics["eval/accuracy"][2] == correct / 4
    assert evaluated["eval/truncated_fraction"] == metrics["eval/truncated_fraction"][2] == 0.0


@pytest.mark.full
def test_fine_tuning_warns_of_a_template_that_trains_on_no_end(tmp_path: Path) -> None:
    make_chat_files(tmp_path)
    (tmp_path / "unended.jinja").write_text(
        CHATML.replace(
            "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}",
            "{{ '<|im_start|>' + message['role'] + '\n' }}{% generation %}{{ message['content'] }}{% endgeneration %}"
            "<|im_end|>\n",
        )
    )
    for words, is_warned in (([], False), ([f"data.chat_template={tmp_path}/unended.jinja"], True)):
        words = [tmp_path / "sft.toml", "train.steps=1", f"run_dir={tmp_path / str(is_warned)}", *words]
        log = succeed("mcore_rl.programs.sft", words).stdout
        assert ("none of the first 20 conversations trains on a token that ends a completion" in log) == is_warned
