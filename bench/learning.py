"""The learning table of docs/algorithms.md: every objective from one start, on one commit, over several seeds.

    python -m bench.learning                           all arms, over three seeds: hours on one core
    python -m bench.learning --arms gspo --seeds 1 2   a part of them; runs that are done are not run again

A Qwen3-MoE of 7 M parameters (4 layers, 16 experts, 4 a token; bench/rl_folder.py) is fine-tuned for `--sft-steps`
steps, until it reverses some digit strings of 4 to 12. Each arm then trains on `--rollouts` rollout batches of 128
completions with 2 updates each, learning rate 5e-5. The accuracy is that of 256 answers to 128 held-out prompts at
temperature 1, before the first update and at each fifth of the run. A cell is the mean over seeds with its 95 %
interval (Student's t); with one seed there is none.

The same command goes on where it was ended: runs save at each evaluation. After each run bench/results/learning.json
holds a row of each evaluation of each run so far, with the commit that the run began on, and the table of the arms
whose seeds are all done is printed; seeds go before arms, so that the first table is of all arms with one seed.
"""

import argparse
import datetime
import json
import subprocess
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from math import sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from bench.rl_folder import WARM_UP_STEPS, program, write_inputs
from mcore_rl.obs.jsonl import FILE_NAME, read_records

ARMS = {
    "grpo": ["rl.loss.kind=grpo"],
    "grpo-r2": ["rl.loss.kind=grpo", "replay.kind=r2"],
    "grpo-r3": ["rl.loss.kind=grpo", "replay.kind=r3"],
    "gspo": ["rl.loss.kind=gspo"],
    "gspo-token": ["rl.loss.kind=gspo_token"],
    # Its paper claims that the likelihoods of the rollout engine suffice (arXiv 2507.18071).
    "gspo-rollout-logprobs": ["rl.loss.kind=gspo", "rl.update.old_logprobs=rollout"],
    "rspo": ["rl.loss.kind=rspo"],
    "grpo-router-shift": ["rl.loss.kind=grpo", "rl.loss.router_shift=true"],
    "kimi-k2": ["rl.loss.kind=kimi_k2", "rl.advantage.kind=mean"],
    "cispo": ["rl.loss.kind=cispo"],
}
COLUMNS, UPDATES = 5, 2
"""Evaluations after the first one, and optimizer steps of a rollout batch (rl.toml)."""
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""Student's t at 97.5 %, by the number of seeds."""
RESULTS = Path(__file__).parent / "results" / "learning.json"
ROOT = Path(__file__).parents[1]
Row = dict[str, Any]
"""An evaluation: arm, seed, rollouts, commit, and the metrics `eval/...`."""


def rows_of(run_dir: Path, arm: str, seed: int) -> Iterator[Row]:
    """Yield the evaluations of a run in order; none where it has not begun."""
    path = run_dir / "commit"
    if not path.is_file() or not (run_dir / FILE_NAME).is_file():
        return
    # A run that was ended after an evaluation and before its checkpoint evaluates once more: the last counts.
    by_step = {
        int(str(record["step"])): record
        for record in read_records(run_dir / FILE_NAME)
        if "eval/accuracy" in record
    }
    for step, record in by_step.items():
        evaluation = {name: value for name, value in record.items() if name.startswith("eval/")}
        yield {
            "arm": arm,
            "seed": seed,
            "rollouts": step // UPDATES,
            "commit": path.read_text(),
            **evaluation,
        }


def cell(values: Sequence[float]) -> str:
    """Return the mean, with the half width of its 95 % interval where there are several values."""
    if len(values) == 1:
        return f"{values[0]:.3f}"
    return f"{mean(values):.3f} +- {T_95[len(values)] * stdev(values) / sqrt(len(values)):.3f}"


def table(rows: Sequence[Row], arms: Sequence[str], seeds: Sequence[int], rollouts: int) -> str:
    """Return the Markdown table of the arms of which every seed has been evaluated to the end."""
    columns = [index * rollouts // COLUMNS for index in range(COLUMNS + 1)]
    titles = ["start", *(f"{column} rollouts" for column in columns[1:])]
    lines = [f"| | {' | '.join(titles)} |", "|---|" + "--:|" * len(titles)]
    accuracy = {(row["arm"], row["seed"], row["rollouts"]): float(row["eval/accuracy"]) for row in rows}
    for arm in arms:
        if all((arm, seed, rollouts) in accuracy for seed in seeds):
            cells = [cell([accuracy[arm, seed, column] for seed in seeds]) for column in columns]
            lines.append(f"| `{arm}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Make the start once, then run each arm that is not done and write its evaluations."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--folder", type=Path, default=Path("runs/learning"), help="folder of all runs")
    parser.add_argument("--output", type=Path, default=RESULTS, help="file of the evaluations")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument(
        "--sft-steps",
        type=int,
        default=150,
        help=f"steps of the fine-tuning that is the start, more than {WARM_UP_STEPS}",
    )
    parser.add_argument(
        "--rollouts", type=int, default=100, help=f"rollout batches of a run, a multiple of {COLUMNS}"
    )
    args = parser.parse_args()
    if args.sft_steps <= WARM_UP_STEPS:
        parser.error(f"--sft-steps wants more than the {WARM_UP_STEPS} of the warm-up")
    if args.rollouts % COLUMNS or len(args.seeds) > max(T_95):
        parser.error(f"--rollouts wants a multiple of {COLUMNS}, --seeds at most {max(T_95)} numbers")
    folder, start = args.folder.absolute(), f"sft-{args.sft_steps}"
    write_inputs(folder)
    if not (folder / start / "DONE").exists():
        program(folder, ["sft", "sft.toml", f"run_dir={start}", f"train.steps={args.sft_steps}"])
    steps = args.rollouts * UPDATES
    shared = [
        f"checkpoint.load={start}",
        f"checkpoint.interval={steps // COLUMNS}",
        "checkpoint.keep=1",
        f"train.steps={steps}",
        f"train.eval_interval={steps // COLUMNS}",
        "rl.eval.num_prompts=128",
        "rl.eval.samples=2",
        "rl.eval.temperature=1.0",
    ]
    runs = [(seed, arm) for seed in args.seeds for arm in args.arms]
    name = f"{start}-{args.rollouts}"
    for seed, arm in runs:
        run_dir = folder / name / f"{arm}-{seed}"
        if not (run_dir / "DONE").exists():
            run_dir.mkdir(parents=True, exist_ok=True)
            if not (run_dir / "commit").exists():
                (run_dir / "commit").write_text(commit())
            program(
                folder, ["rl", "rl.toml", f"run_dir={run_dir}", f"train.seed={seed}", *shared, *ARMS[arm]]
            )
        rows = [row for seed, arm in runs for row in rows_of(folder / name / f"{arm}-{seed}", arm, seed)]
        written = {
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "versions": {package: version(package) for package in ("torch", "megatron-core")},
            "sft_steps": args.sft_steps,
            "rollouts": args.rollouts,
            "rows": rows,
        }
        args.output.write_text(json.dumps(written, indent=1) + "\n")
        print(table(rows, args.arms, args.seeds, args.rollouts), flush=True)


def commit() -> str:
    """Return the commit of the checkout, with a mark where files differ from it."""
    described = ["git", "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    return subprocess.run(described, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
