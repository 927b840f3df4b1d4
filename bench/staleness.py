"""What staleness costs and saves: GRPO and GSPO with rl.rollout.max_staleness 0, 1 and 4 on a digit task.

    python -m bench.staleness                         all arms over three seeds
    python -m bench.staleness --seeds 1 --rollouts 10 a part of them; runs that are done are not run again

A Qwen3-MoE of 2 layers and 8 experts (0.1 M parameters) learns to answer a string of 2 digits with the digits in
reverse: the reward is the share of positions that are right. It is fine-tuned before, for SFT_STEPS steps, until some
of them are. Completions come from bench/copied_engine.py, which sleeps `--delay-s` seconds for each 4 tokens of a
completion in place of a server that computes elsewhere: with max_staleness=0 training waits for it, otherwise it goes
on meanwhile. The wall time is that of rollout batches without the first one, the reward the mean of the last fifth of
them.
"""

import argparse
import datetime
import importlib
import json
import multiprocessing
import os
import platform
import string
import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from importlib.metadata import version
from pathlib import Path
from statistics import mean
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from bench.learning import cell, commit
from mcore_rl.obs.jsonl import FILE_NAME, read_records

LOSSES = {
    "grpo": ["rl.loss.kind=grpo", "rl.loss.importance_sampling=truncate"],
    "gspo": ["rl.loss.kind=gspo", "rl.loss.importance_sampling=sequence_truncate"],
}
STALENESS = (0, 1, 4)
SFT_STEPS, UPDATES = 8, 2
RESULTS = Path(__file__).parent / "results" / "staleness.json"
MODEL = """
[model]
family = "qwen3_moe"
num_layers = 2
hidden_size = 64
num_heads = 4
num_kv_heads = 2
head_dim = 16
vocab_size = 12
vocab_multiple = 4
max_position = 64
[model.moe]
num_experts = 8
top_k = 2
ffn_hidden_size = 32
aux_loss_coeff = 0.0
[data]
chat_template = "raw"
tokenizer = { kind = "huggingface", path = "FOLDER/tokenizer" }
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
[replay]
kind = "r3"
[rl.engine]
kind = "bench.copied_engine:copied_engine"
slots = 16
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
MEANS = {
    "staleness": "rollout/staleness",
    "stale_fraction": "rollout/stale_fraction",
    "mismatch_kl_nats": "rollout/mismatch_kl_nats",
    "waited_s": "time/rollout_s",
    "rollout_s": "rl/step_s",
}
"""Column -> metric whose mean over the rollout batches but the first is reported."""


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


def row_of(run_dir: Path, loss: str, staleness: int, seed: int) -> dict[str, Any]:
    """Return the means of a run that is done, and the largest distance of started from taken prompts."""
    records = [record for record in read_records(run_dir / FILE_NAME) if "event" not in record]
    batches = [record for record in records if "rl/step_s" in record]
    rewards = [float(record["reward/mean"]) for record in batches]
    row: dict[str, Any] = {"loss": loss, "max_staleness": staleness, "seed": seed, "rollouts": len(batches)}
    row |= {"first_reward": mean(rewards[: len(rewards) // 5]), "reward": mean(rewards[-len(rewards) // 5 :])}
    for column, metric in MEANS.items():
        values = [float(record[metric]) for record in records[1:] if metric in record][1:]
        row[column] = mean(values) if values else 0.0
    ahead = [
        record["rollout/started_prompts"] - record["rl/consumed_prompts"]
        for record in batches
        if "rollout/started_prompts" in record
    ]
    return row | {"most_prompts_ahead": max(ahead, default=0)}


def table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of a Markdown table, a row for each loss and staleness: means over seeds."""
    columns = ("reward", "rollout_s", "waited_s", "staleness", "mismatch_kl_nats", "most_prompts_ahead")
    yield f"| | {' | '.join(columns)} |"
    yield "|---|" + "--:|" * len(columns)
    for loss in LOSSES:
        for staleness in STALENESS:
            found = [row for row in rows if (row["loss"], row["max_staleness"]) == (loss, staleness)]
            if found:
                cells = [cell([float(row[column]) for row in found]) for column in columns]
                yield f"| `{loss}`, {staleness} | {' | '.join(cells)} |"


def run_program(name: str, *words: object, delay_s: float = 0.0) -> None:
    """Run a program of training, in a process that begins with torch and Megatron in memory; its log is in its folder.

    Raises:
        SystemExit: the program failed.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["mcore_rl.run.rl", "mcore_rl.run.sft", "torch._dynamo"])
    process = context.Process(target=_program, args=(name, [str(word) for word in words], str(delay_s)))
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit(f"{name} ended with status {process.exitcode}")


def _program(name: str, words: Sequence[str], delay_s: str) -> None:
    os.environ["COPIED_ENGINE_DELAY_S"] = delay_s
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        sys.exit(importlib.import_module(f"mcore_rl.run.{name}").main(words))


def main() -> None:
    """Run each arm that is not done, then write all rows and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--folder", type=Path, default=Path("runs/staleness"), help="folder of all runs")
    parser.add_argument("--output", type=Path, default=RESULTS, help="file of the rows")
    parser.add_argument("--losses", nargs="+", choices=LOSSES, default=list(LOSSES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--rollouts", type=int, default=20, help="rollout batches of a run")
    parser.add_argument("--delay-s", type=float, default=4.0, help="seconds of each 4 tokens of a completion")
    args = parser.parse_args()
    folder = args.folder.absolute()
    write_inputs(folder)
    if not (folder / "sft" / "DONE").exists():
        run_program("sft", folder / "sft.toml")
    rows = []
    for seed in args.seeds:
        for loss in args.losses:
            for staleness in STALENESS:
                run_dir = folder / f"{loss}-{staleness}-{seed}"
                if not (run_dir / "DONE").exists():
                    run_program(
                        *("rl", folder / "rl.toml", f"run_dir={run_dir}", f"train.seed={seed}"),
                        *(f"train.steps={UPDATES * args.rollouts}", *LOSSES[loss]),
                        f"rl.rollout.max_staleness={staleness}",
                        delay_s=args.delay_s,
                    )
                rows.append(row_of(run_dir, loss, staleness, seed))
                written = {
                    "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
                    "commit": commit(),
                    "machine": f"{platform.machine()}, {os.cpu_count()} cores",
                    "versions": {package: version(package) for package in ("torch", "megatron-core")},
                    "delay_s": args.delay_s,
                    "rows": rows,
                }
                args.output.write_text(json.dumps(written, indent=1) + "\n")
                print("\n".join(table(rows)), flush=True)


if __name__ == "__main__":
    main()
