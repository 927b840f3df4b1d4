"""A digit task that a tiny model learns within a few rollout batches: the inputs of bench.staleness and bench.servers.

A Qwen3-MoE of 2 layers and 8 experts (0.1 M parameters) learns to answer a string of 2 digits with the digits in
reverse: the reward is the share of positions that are right. It is fine-tuned before, for SFT_STEPS steps, until some
of them are.
"""

import json
import string
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

SFT_STEPS, UPDATES = 8, 2
"""Steps before RL, and optimizer steps of a rollout batch."""
SIZES = """
[model]
family = "qwen3_moe"
num_layers = 2
hidden_size = 64
num_heads = 4
num_kv_heads = 2
head_dim = 16
"""
"""The smallest model of the benchmarks, without its vocabulary and experts."""
MODEL = f"""{SIZES}vocab_size = 12
vocab_multiple = 4
max_position = 64
[model.moe]
num_experts = 8
top_k = 2
ffn_hidden_size = 32
aux_loss_coeff = 0.0
[data]
chat_template = "raw"
tokenizer = {{ kind = "huggingface", path = "FOLDER/tokenizer" }}
[optim]
schedule = "constant"
weight_decay = 0.0
[checkpoint]
interval = "none"
"""
SFT = """
extends = "model.toml"
run_dir = "FOLDER/sft"
[data]
train = ["FOLDER/sft.jsonl"]
seq_length = 64
[optim]
lr = 1e-2
[train]
steps = SFT_STEPS
global_batch = 8
eval_batches = "none"
"""
RL = """
extends = "model.toml"
[checkpoint]
load = "FOLDER/sft"
load_optimizer = false
[optim]
lr = 1e-3
[train]
global_batch = 32
eval_interval = "none"
[rl.prompts]
task = "reversing"
smallest = 2
largest = 2
max_tokens = 8
[rl.rollout]
prompts_per_step = 8
group_size = 8
max_new_tokens = 4
[rl.reward]
parts = ["positions"]
[rl.samples]
interval = "none"
[rl.eval]
num_prompts = 1
"""


def write_inputs(folder: Path) -> None:
    """Write the tokenizer, the examples of all strings of 2 digits, and the configs."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder / "tokenizer")
    for name, text in (("model", MODEL), ("sft", SFT), ("rl", RL)):
        text = text.replace("FOLDER", str(folder)).replace("SFT_STEPS", str(SFT_STEPS))
        (folder / f"{name}.toml").write_text(text)
    pairs = (f"{number:02}" for number in range(100))
    lines = (json.dumps({"prompt": f"{digits}=", "response": digits[::-1]}) for digits in pairs)
    (folder / "sft.jsonl").write_text("\n".join(lines) + "\n")


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer of digits, "=" and an end."""
    characters = ["<end>", *string.digits, "="]
    ids = {character: number for number, character in enumerate(characters)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="="))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
