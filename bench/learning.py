"""The learning table of docs/algorithms.md: every objective from one start, on one commit, over several seeds.

    python -m bench.learning                           all arms, over three seeds: hours on one core
    python -m bench.learning --arms gspo --seeds 1 2   a part of them; runs that are done are not run again

A Qwen3-MoE of 7 M parameters (4 layers, 16 experts, 4 a token; bench/rl_folder.py) is fine-tuned for `--sft-steps`
steps, until it reverses some digit strings of 4 to 12. Each arm then trains on `--rollouts` rollout batches of 128
completions with 2 updates each, learning rate 5e-5. The accuracy is that of 256 answers to 128 held-out prompts at
temperature 1, before the first update and at each fifth of the run. A cell is the mean over seeds with its 95 %
interval (Student's t); with one seed there is none. The table is printed, and written to bench/results/learning.json.
"""

import argparse
import datetime
import json
import subprocess
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from math import sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from bench.rl_folder import program, write_inputs
from mcore_rl.obs.jsonl import FILE_NAME, read_records

ARMS = {
    "grpo": ["rl.loss.kind=grpo"],
    "grpo-r2": ["rl.loss.kind=grpo", "replay.kind=r2"],
    "grpo-r3": ["rl.loss.kind=grpo", "replay.kind=r3"],
    "gspo": ["rl.loss.kind=gspo"],
    "gspo-token": ["rl.loss.kind=gspo_token"],
    # Its paper claims that the likelihoods of the rollout engine suffice (arXiv 2507.18071).
    "gspo-rollout-logprobs": ["rl.loss.kind=gspo", "rl.update.old_logprobs=rollout"],
    "kimi-k2": ["rl.loss.kind=kimi_k2", "rl.advantage.kind=mean"],
    "cispo": ["rl.loss.kind=cispo"],
}
COLUMNS, UPDATES = 5, 2
"""Evaluations after the first one, and optimizer steps of a rollout batch (rl.toml)."""
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""Student's t at 97.5 %, by the number of seeds."""
RESULTS = Path(__file__).parent / "results" / "learning.json"
ROOT = Path(__file__).parents[1]


def accuracies(run_dir: Path) -> dict[int, float]:
    """Return the accuracy on held-out prompts at each evaluated step of a run."""
    return {
        int(str(record["step"])): float(str(record["eval/accuracy"]))
        for record in read_records(run_dir / FILE_NAME)
        if "eval/accuracy" in record
    }


def cell(values: Sequence[float]) -> str:
    """Return the mean, with the half width of its 95 % interval where there are several values."""
    if len(values) == 1:
        return f"{values[0]:.3f}"
    return f"{mean(values):.3f} +- {T_95[len(values)] * stdev(values) / sqrt(len(values)):.3f}"


def table(results: Mapping[str, Mapping[int, Mapping[int, float]]], rollouts: int) -> str:
    """Return the Markdown table of arm -> seed -> step -> accuracy."""
    steps = [index * rollouts * UPDATES // COLUMNS for index in range(COLUMNS + 1)]
    titles = ["start", *(f"{step // UPDATES} rollouts" for step in steps[1:])]
    lines = [f"| | {' | '.join(titles)} |", "|---|" + "--:|" * len(titles)]
    for arm, by_seed in results.items():
        cells = [cell([of_step[step] for of_step in by_seed.values()]) for step in steps]
        lines.append(f"| `{arm}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Make the start once, run the arms as one study, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--folder", type=Path, default=Path("runs/learning"), help="folder of all runs")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument(
        "--sft-steps", type=int, default=150, help="steps of the fine-tuning that is the start"
    )
    parser.add_argument(
        "--rollouts", type=int, default=100, help=f"rollout batches of a run, a multiple of {COLUMNS}"
    )
    args = parser.parse_args()
    if args.rollouts % COLUMNS or len(args.seeds) > max(T_95):
        parser.error(f"--rollouts wants a multiple of {COLUMNS}, --seeds at most {max(T_95)} numbers")
    folder, start = args.folder.absolute(), f"sft-{args.sft_steps}"
    write_inputs(folder)
    if not (folder / start / "DONE").exists():
        program(folder, ["sft", "sft.toml", f"run_dir={start}", f"train.steps={args.sft_steps}"])
    steps = args.rollouts * UPDATES
    shared = [
        f"checkpoint.load={start}",
        "checkpoint.interval=none",
        f"train.steps={steps}",
        f"train.eval_interval={steps // COLUMNS}",
        "rl.eval.num_prompts=128",
        "rl.eval.samples=2",
        "rl.eval.temperature=1.0",
    ]
    name = f"{start}-{args.rollouts}"
    study = [
        'base = "rl.toml"',
        f'run_dir = "{name}"',
        f"seeds = {args.seeds}",
        f"overrides = {json.dumps(shared)}",
        "[arms]",
        *(f"{arm} = {json.dumps(ARMS[arm])}" for arm in args.arms),
    ]
    (folder / f"{name}.toml").write_text("\n".join(study) + "\n")
    program(folder, ["study", f"{name}.toml"])
    results = {
        arm: {seed: accuracies(folder / name / f"{arm}-{seed}") for seed in args.seeds} for arm in args.arms
    }
    written: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip(),
        "versions": {package: version(package) for package in ("torch", "megatron-core")},
        "sft_steps": args.sft_steps,
        "rollouts": args.rollouts,
        "accuracy": results,
    }
    RESULTS.write_text(json.dumps(written, indent=1) + "\n")
    print(table(results, args.rollouts))


if __name__ == "__main__":
    main()
