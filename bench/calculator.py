"""A tool task learned by reinforcement learning: arithmetic with a calculator that the policy may call.

    python -m bench.calculator                 makes a start, trains on it, and writes bench/results/calculator.json

A small Qwen3-MoE is fine-tuned on conversations about problems of one digit. In half of them the result of a calculator
is there, to be repeated; in the others the policy calls it (`?7 * 8`, answered by `56`) three times in ten, and gives a
random number otherwise. Reinforcement learning then finds that calling it pays. Accuracies on held-out problems are
written with each evaluation, turns with each rollout batch.
"""

import argparse
import json
import random
from pathlib import Path

from bench.rl_folder import program, write_tokenizer
from mcore_rl.metrics.jsonl import FILE_NAME, read_records

RESULTS = Path(__file__).parent / "results" / "calculator.json"
CALLS = 0.3
"""Fraction of the conversations without a result that call the tool."""
MODEL = """
[model]
family = "qwen3_moe"
num_layers = 2
hidden_size = 96
num_heads = 4
num_kv_heads = 2
head_dim = 24
ffn_hidden_size = 192
vocab_size = 512
max_position = 256
[model.moe]
num_experts = 8
top_k = 2
ffn_hidden_size = 64
aux_loss_coeff = 0.0
[data]
chat_template = "raw"
tokenizer = { kind = "huggingface", path = "tokenizer" }
"""
SFT = """
extends = "model.toml"
run_dir = "sft"
[data]
train = ["sft.jsonl"]
seq_length = 128
[train]
global_batch = 8
micro_batch = 8
eval_batches = "none"
[optim]
lr = 2e-3
schedule = "constant"
warmup_steps = 20
weight_decay = 0.0
beta2 = 0.98
"""
RL = """
extends = "model.toml"
run_dir = "rl"
[train]
global_batch = 32
eval_interval = 10
[optim]
lr = 3e-4
schedule = "constant"
warmup_steps = 4
weight_decay = 0.0
beta2 = 0.98
[checkpoint]
load = "sft"
load_optimizer = false
[rl.prompts]
task = "arithmetic"
smallest = 1
largest = 1
max_tokens = 12
[rl.rollout]
prompts_per_step = 8
group_size = 8
max_new_tokens = 10
[rl.environment]
name = "calculator"
arguments = { begin = "?", end = "", help = "" }
max_turns = 3
max_tokens = 40
[rl.reward]
parts = ["numeric", "environment"]
[rl.engine]
slots = 128
[rl.update]
max_tokens_per_microbatch = 256
[rl.eval]
num_prompts = 64
temperature = 1.0
[replay]
kind = "r3"
"""


def write_conversations(path: Path, count: int) -> None:
    """Write conversations about sums, differences and products."""
    numbers = random.Random(0)
    with path.open("w") as file:
        for _ in range(count):
            left, right = (numbers.randrange(1, 10) for _ in range(2))
            sign = numbers.choice("+-*")
            value = {"+": left + right, "-": left - right, "*": left * right}[sign]
            problem = f"{left} {sign} {right}"
            messages = [{"role": "user", "content": f"{problem} ="}]
            result = [{"role": "tool", "content": str(value)}, {"role": "assistant", "content": str(value)}]
            if numbers.random() < 0.5:
                messages += result
            elif numbers.random() < CALLS:
                messages += [{"role": "assistant", "content": f"?{problem}"}, *result]
            else:
                messages.append({"role": "assistant", "content": str(numbers.randrange(-9, 99))})
            file.write(json.dumps({"messages": messages}) + "\n")


def main() -> None:
    """Make the start, train on it, and write the curve."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--folder", type=Path, default=Path("runs/calculator"), help="folder of both runs")
    parser.add_argument("--output", type=Path, default=RESULTS, help="file of the curve")
    parser.add_argument("--sft-steps", type=int, default=500)
    parser.add_argument("--rollouts", type=int, default=30, help="rollout batches, a multiple of 5")
    args = parser.parse_args()
    folder: Path = args.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder / "tokenizer")
    write_conversations(folder / "sft.jsonl", 4000)
    for name, text in (("model", MODEL), ("sft", SFT), ("rl", RL)):
        (folder / f"{name}.toml").write_text(text)
    if not (folder / "sft" / "DONE").exists():
        program(folder, ["sft", "sft.toml", f"train.steps={args.sft_steps}", "checkpoint.interval=none"])
    program(folder, ["rl", "rl.toml", f"train.steps={2 * args.rollouts}"])
    curve: dict[int, dict[str, float]] = {}
    wanted = ("eval/accuracy", "reward/accuracy", "environment/turns", "rollout/mismatch_max", "reward/errors")
    for record in read_records(folder / "rl" / FILE_NAME):
        found = {name: float(str(record[name])) for name in wanted if name in record}
        if found:
            curve.setdefault(int(str(record["step"])) // 2, {}).update(found)
    command = f"python -m bench.calculator --sft-steps {args.sft_steps} --rollouts {args.rollouts}"
    rows = [{"rollouts": rollouts, **numbers} for rollouts, numbers in sorted(curve.items())]
    args.output.write_text(json.dumps({"command": command, "curve": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
