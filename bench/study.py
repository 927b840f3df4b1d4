"""The study of docs/replay.md: objectives with and without routing replay on a deep, narrow mixture of experts.

    python -m bench.study                                 all arms, one seed after the other: hours on one core
    python -m bench.study --budget-minutes 90             stops then, in the middle of a run; the same command goes on
    python -m bench.study --lr 6e-4 --arms "GRPO" "GSPO"  a part of it at another learning rate, in a folder of its own

A Qwen3-MoE of 5 M parameters (24 layers of width 64, 32 experts, 4 a token) is fine-tuned for `--sft-steps` steps on
reversing 2 to 4 digits. Each arm then trains from there on `--rollouts` rollout batches of 128 completions for
strings of 2 and 3 digits, with 4 updates each. In the last three the rollout engine's weights are rounded to bf16
(bench/rounded_engine.py). `mcore-rl study` runs the arms and writes rows and table. The rows are copied to
bench/results/study.json and drawn as docs/images/study.svg, or for another learning rate as study-LR.
"""

import argparse
import shutil
from pathlib import Path

from bench.learning import ROOT, run_study, study_toml
from bench.rl_folder import VOCAB, program, write_tokenizer
from bench.study_figures import draw

MODEL = f"""
[model]
family = "qwen3_moe"
num_layers = 24
hidden_size = 64
num_heads = 4
num_kv_heads = 2
head_dim = 16
ffn_hidden_size = 128
vocab_size = {VOCAB}
max_position = 512
[model.moe]
num_experts = 32
top_k = 4
ffn_hidden_size = 32
aux_loss_coeff = 0.0
[data]
chat_template = "raw"
tokenizer = {{ kind = "huggingface", path = "tokenizer" }}
[optim]
lr = 1e-3
schedule = "constant"
weight_decay = 0.0
beta2 = 0.98
"""
SFT = """
extends = "model.toml"
[data]
train = ["sft.jsonl"]
seq_length = 512
[train]
global_batch = 4
micro_batch = 4
eval_batches = "none"
[optim]
warmup_steps = 8
"""
LR = 3e-4
"""Learning rate of all arms, at which GRPO with replay learns."""
UPDATES = 4
"""Optimizer steps of a rollout batch."""
RL = """
extends = "model.toml"
[train]
global_batch = 32
eval_interval = "none"
[optim]
warmup_steps = 0
[checkpoint]
load_optimizer = false
keep = 1
[rl.prompts]
task = "reversing"
smallest = 2
largest = 3
max_tokens = 8
[rl.rollout]
prompts_per_step = 16
group_size = 8
max_new_tokens = 6
[rl.engine]
slots = 128
[rl.update]
max_tokens_per_microbatch = 512
[rl.reward]
parts = ["positions"]
[rl.samples]
interval = "none"
[replay]
split_interval = 5
split_layers = 4
"""
ROUNDED = "rl.engine.kind=bench.rounded_engine:rounded_engine"
"""The native engine, but on weights in bf16, so that engine and trainer differ as at scale."""
ARMS = {
    "GRPO": ["rl.loss.kind=grpo"],
    "GRPO + R2": ["rl.loss.kind=grpo", "replay.kind=r2"],
    "GRPO + R3": ["rl.loss.kind=grpo", "replay.kind=r3"],
    "GSPO": ["rl.loss.kind=gspo"],
    "GSPO + R2": ["rl.loss.kind=gspo", "replay.kind=r2"],
    "CISPO": ["rl.loss.kind=cispo"],
    "GRPO + router shift": ["rl.loss.kind=grpo", "rl.loss.router_shift=true"],
    "RSPO": ["rl.loss.kind=rspo"],
    "GRPO, rounded engine": ["rl.loss.kind=grpo", ROUNDED],
    "GRPO + R2, rounded engine": ["rl.loss.kind=grpo", "replay.kind=r2", ROUNDED],
    "GRPO + R3, rounded engine": ["rl.loss.kind=grpo", "replay.kind=r3", ROUNDED],
}
SFT_EXAMPLES = 20_000
SAVED_ROLLOUTS = 20
"""Rollout batches between two checkpoints: one of so many experts takes as long to write as three rollout batches."""


def make_start(folder: Path, start: str, steps: int) -> None:
    """Write the inputs and train the model that all arms start from, unless they are there."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (("model", MODEL), ("sft", SFT), ("rl", RL)):
        (folder / f"{name}.toml").write_text(text)
    if not (folder / "sft.jsonl").exists():
        write_tokenizer(folder / "tokenizer")
        longer = ["rl.prompts.largest=4", "--count", str(SFT_EXAMPLES), "--output", "sft.jsonl"]
        program(folder, ["problems", "rl.toml", *longer])
    if not (folder / start / "DONE").exists():
        program(folder, ["sft", "sft.toml", f"run_dir={start}", f"train.steps={steps}"])


def study_text(run_dir: Path, start: str, args: argparse.Namespace) -> str:
    """Return the config of the study."""
    overrides = [
        f"checkpoint.load={start}",
        f"optim.lr={args.lr}",
        f"train.steps={args.rollouts * UPDATES}",
        f"checkpoint.interval={SAVED_ROLLOUTS * UPDATES}",
    ]
    return study_toml(run_dir, args.seeds, overrides, {arm: ARMS[arm] for arm in args.arms})


def main() -> None:
    """Make the start once, then run the study from where it was ended."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--folder", type=Path, default=Path("runs/study"), help="folder of all runs")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS), metavar="ARM")
    parser.add_argument("--lr", type=float, default=LR, help="learning rate of all arms")
    parser.add_argument("--sft-steps", type=int, default=100, help="steps of the fine-tuning that is the start")
    parser.add_argument("--rollouts", type=int, default=50, help="rollout batches of a run")
    parser.add_argument("--budget-minutes", type=float, help="minutes after which the study stops and saves")
    parser.add_argument("--output", type=Path, default=ROOT, help="folder of bench/results and docs/images")
    args = parser.parse_args()
    folder, start = args.folder.absolute(), f"sft-{args.sft_steps}"
    make_start(folder, start, args.sft_steps)
    run_dir = folder / f"{start}-{args.lr:g}-{args.rollouts}"
    run_study(folder, study_text(run_dir, start, args), run_dir, args.budget_minutes)
    name = "study" if args.lr == LR else f"study-{args.lr:g}"
    shutil.copy(run_dir / "study.json", args.output / "bench" / "results" / f"{name}.json")
    draw(run_dir / "study.json", args.output / "docs" / "images" / f"{name}.svg")


if __name__ == "__main__":
    main()
