"""Main memory of a run of 1,000 steps, at every hundredth step: pretraining, and reinforcement learning.

    python -m bench.memory_growth [--steps 1000] [--only pretrain]      three minutes of one core

Both are the programs as a user starts them, `mcore-rl pretrain` and `mcore-rl rl`, on one rank with a tiny mixture of
experts, fixed lengths of rows and answers, evaluations, and a checkpoint every hundred steps. The numbers are the
metric `memory/resident_bytes` of their metrics.jsonl, and go to bench/results/memory_growth.json.
"""

import argparse
import datetime
import json
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch; the machine may be shared

import numpy
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from bench.digits import SIZES
from bench.rl_folder import program, write_tokenizer
from mcore_rl.storage.checkpoint import megatron_version

RESULTS = Path(__file__).parent / "results" / "memory_growth.json"
EVERY = 100
"""Steps from one figure, and one checkpoint, to the next."""
SETTLED = 200
"""Step from which growth is counted: before it allocators, caches and the first checkpoint fill up."""
VOCAB = 512
MODEL = f"""{SIZES}vocab_size = {VOCAB}
[model.moe]
num_experts = 4
top_k = 2
ffn_hidden_size = 32
[mesh]
dp = 1
[checkpoint]
interval = {EVERY}
keep = 2
"""
PRETRAIN = """
extends = "model.toml"
run_dir = "pretrain"
[data]
train = ["train"]
valid = ["train"]
seq_length = 64
[train]
global_batch = 4
micro_batch = 4
eval_interval = 100
eval_batches = 2
"""
RL = """
extends = "model.toml"
run_dir = "rl"
[data]
chat_template = "raw"
tokenizer = { kind = "huggingface", path = "tokenizer" }
[train]
global_batch = 16
eval_interval = 100
[rl.prompts]
task = "reversing"
max_tokens = 16
[rl.rollout]
prompts_per_step = 4
group_size = 4
max_new_tokens = 8
[rl.update]
max_tokens_per_microbatch = 512
[rl.reward]
parts = ["length"]
length_max_tokens = 4
[replay]
kind = "r2"
"""
CONFIGS = {"pretrain": PRETRAIN, "rl": RL}


def main() -> int:
    """Run both programs, print their memory, and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--only", choices=CONFIGS)
    args = parser.parse_args()
    if args.steps <= SETTLED:
        parser.error(f"--steps {args.steps}: growth is counted from step {SETTLED}")
    found = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_inputs(folder)
        for name in [args.only] if args.only else CONFIGS:
            program(folder, [name, f"{name}.toml", f"train.steps={args.steps}"])
            found[name] = resident_mib(folder / name / "metrics.jsonl")
            print(f"{name:<9}" + "  ".join(f"{step}: {mib:.1f}" for step, mib in found[name].items()) + "  MiB")
            print(f"{'':<9}{growth_mib(found[name]):+.1f} MiB from step {SETTLED} to the last")
    if not args.only:
        document = {
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "command": f"python -m bench.memory_growth --steps {args.steps}",
            "versions": {"python": sys.version.split()[0], "torch": torch.__version__, "megatron": megatron_version()},
            "resident_mib_by_step": found,
        }
        RESULTS.write_text(json.dumps(document, indent=1) + "\n")
        print(f"written to {RESULTS}")
    return 0


def write_inputs(folder: Path) -> None:
    """Write the configs, a tokenizer, and tokens to train on."""
    (folder / "model.toml").write_text(MODEL)
    for name, text in CONFIGS.items():
        (folder / f"{name}.toml").write_text(text)
    write_tokenizer(folder / "tokenizer")
    builder = IndexedDatasetBuilder(str(folder / "train.bin"), dtype=numpy.uint16)
    generator = torch.Generator().manual_seed(0)
    for _ in range(1000):
        builder.add_document(torch.randint(0, VOCAB, (257,), generator=generator), [257])
    builder.finalize(str(folder / "train.idx"))


def resident_mib(metrics: Path) -> dict[int, float]:
    """Return the memory at every hundredth step."""
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    return {
        record["step"]: round(record["memory/resident_bytes"] / 2**20, 1)
        for record in records
        if "memory/resident_bytes" in record and record["step"] % EVERY == 0
    }


def growth_mib(found: dict[int, float]) -> float:
    """Return how much more there is at the last step than at the one that SETTLED names."""
    return found[max(found)] - found[SETTLED]


if __name__ == "__main__":
    sys.exit(main())
