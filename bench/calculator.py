"""A tool task learned by reinforcement learning: arithmetic with a calculator that the policy may call.

    python -m bench.calculator                 makes a start, trains on it, and writes bench/results/calculator.json

A small Qwen3-MoE is fine-tuned on conversations of which three in ten call the calculator (`?12 + 30`, answered by
`42`) and copy its result; the others give a random number. Reinforcement learning on other problems then finds that
calling it pays. Accuracies on held-out problems are written with each evaluation, turns with each rollout batch.
"""

import argparse
import json
import random
from pathlib import Path

from bench.rl_folder import program, write_tokenizer
from mcore_rl.obs.jsonl import FILE_NAME, read_records

RESULTS = Path(__file__).parent / "results" / "calculator.json"
CALLS = 0.3
"""Fraction of the conversations to learn from that call the tool."""
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
lr = 3e-3
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
largest = 2
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
    """Write conversations about sums, differences and products, three in ten of which call the calculator."""
    numbers = random.Random(0)
    with path.open("w") as file:
        for _ in range(count):
            left, right = (numbers.randrange(10 ** numbers.randint(1, 2)) for _ in range(2))
            sign = numbers.choice("+-*")
            value = {"+": left + right, "-": left - right, "*": left * right}[sign]
            problem = f"{left} {sign} {right}"
            messages = [{"role": "user", "content": f"{problem} ="}]
            if numbers.random() < CALLS:
                call = [("assistant", f"?{problem}"), ("tool", str(value)), ("assistant", str(value))]
                messages += [{"role": role, "content": content} for role, content in call]
            else:
                guess = numbers.randrange(-99, 999)
                messages.append({"role": "assistant", "content": str(guess)})
            file.write(json.dumps({"messages": messages}) + "\n")


def main() -> None:
    """Make the start, train on it, and write the curve."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--folder", type=Path, default=Path("runs/calculator"), help="folder of both runs")
    parser.add_argument("--output", type=Path, default=RESULTS, help="file of the curve")
    parser.add_argument("--sft-steps", type=int, default=300)
    parser.add_argument("--rollouts", type=int, default=40, help="rollout batches, a multiple of 5")
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
    wanted = (
        "eval/accuracy",
        "reward/accuracy",
        "environment/turns",
        "rollout/mismatch_max",
        "reward/errors",
    )
    for record in read_records(folder / "rl" / FILE_NAME):
        found = {name: float(str(record[name])) for name in wanted if name in record}
        if found:
            curve.setdefault(int(str(record["step"])) // 2, {}).update(found)
    command = f"python -m bench.calculator --sft-steps {args.sft_steps} --rollouts {args.rollouts}"
    rows = [{"rollouts": rollouts, **numbers} for rollouts, numbers in sorted(curve.items())]
    args.output.write_text(json.dumps({"command": command, "curve": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
