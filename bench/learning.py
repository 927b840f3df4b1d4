"""The learning table of docs/algorithms.md: every objective from one start, on one commit, over several seeds.

    python -m bench.learning                           all arms, over three seeds: hours on one core
    python -m bench.learning --arms gspo --seeds 1 2   a part of them; runs that are done are not run again

A Qwen3-MoE of 7 M parameters (4 layers, 16 experts, 4 a token; bench/rl_folder.py) is fine-tuned for `--sft-steps`
steps, until it reverses some digit strings of 4 to 12. Each arm then trains on `--rollouts` rollout batches of 128
completions with 2 updates each, learning rate 5e-5. The accuracy is that of 256 answers to 128 held-out prompts at
temperature 1, before the first update and at each fifth of the run. A cell is the mean over seeds with its 95 %
interval (Student's t); with one seed there is none.

`mcore-rl study` runs the arms: all of them with one seed before any with the next. The same command goes on where it
was ended: runs save at each evaluation. At its end, and where `--budget-minutes` end it, bench/results/learning.json
gets a row of each evaluation of each run so far, with the commit that the run began on, and the table of the arms whose
seeds are all done is printed.
"""

import argparse
import datetime
import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench.rl_folder import WARM_UP_STEPS, program, write_inputs
from mcore_rl.cli.study import interval, read_run
from mcore_rl.storage.files import with_ending

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
RESULTS = Path(__file__).parent / "results" / "learning.json"
ROOT = Path(__file__).parents[1]
Row = dict[str, Any]
"""An evaluation: arm, seed, rollouts, the commit that the run began on, and the metrics `eval/...`."""


def rows_of(run_dir: Path, arm: str, seed: int) -> Iterator[Row]:
    """Yield the evaluations of a run in order; none where it has not begun."""
    run = read_run(arm, seed, run_dir)
    for one in run.evaluations:
        metrics = {name: value for name, value in one.items() if name != "step"}
        yield {"arm": arm, "seed": seed, "rollouts": int(one["step"]) // UPDATES, "commit": run.commit, **metrics}


def cell(values: Sequence[float]) -> str:
    """Return the mean, with the half width of its 95 % interval where there are several values."""
    mean, half = interval(values)
    return f"{mean:.3f}" if half is None else f"{mean:.3f} +- {half:.3f}"


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


def study_text(run_dir: Path, start: str, args: argparse.Namespace) -> str:
    """Return the config of the study."""
    steps = args.rollouts * UPDATES
    overrides = [
        f"checkpoint.load={start}",
        f"checkpoint.interval={steps // COLUMNS}",
        "checkpoint.keep=1",
        f"train.steps={steps}",
        f"train.eval_interval={steps // COLUMNS}",
        "rl.eval.num_prompts=128",
        "rl.eval.samples=2",
        "rl.eval.temperature=1.0",
    ]
    return study_toml(run_dir, args.seeds, overrides, {arm: ARMS[arm] for arm in args.arms})


def study_toml(run_dir: Path, seeds: Sequence[int], overrides: Sequence[str], arms: Mapping[str, Sequence[str]]) -> str:
    """Return the config of a study of arms of rl.toml."""
    lines = ['base = "rl.toml"', f"run_dir = {json.dumps(str(run_dir))}", f"seeds = {list(seeds)}"]
    lines += [f"overrides = {json.dumps(list(overrides))}", "[arms]"]
    return "\n".join([*lines, *(f'"{arm}" = {json.dumps(list(fields))}' for arm, fields in arms.items())]) + "\n"


def run_study(folder: Path, text: str, run_dir: Path, budget_minutes: float | None) -> None:
    """Run `mcore-rl study` in `folder`, from where it was ended."""
    path = with_ending(run_dir, ".toml")
    path.write_text(text)
    budget = "none" if budget_minutes is None else budget_minutes
    program(folder, ["study", str(path), f"budget_minutes={budget}"])


def main() -> None:
    """Make the start once, then run each arm that is not done and write the evaluations."""
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
    parser.add_argument("--rollouts", type=int, default=100, help=f"rollout batches of a run, a multiple of {COLUMNS}")
    parser.add_argument("--budget-minutes", type=float, help="minutes after which the study stops and saves")
    args = parser.parse_args()
    if args.sft_steps <= WARM_UP_STEPS:
        parser.error(f"--sft-steps wants more than the {WARM_UP_STEPS} of the warm-up")
    if args.rollouts % COLUMNS:
        parser.error(f"--rollouts wants a multiple of {COLUMNS}")
    folder, start = args.folder.absolute(), f"sft-{args.sft_steps}"
    write_inputs(folder)
    if not (folder / start / "DONE").exists():
        program(folder, ["sft", "sft.toml", f"run_dir={start}", f"train.steps={args.sft_steps}"])
    run_dir = folder / f"{start}-{args.rollouts}"
    run_study(folder, study_text(run_dir, start, args), run_dir, args.budget_minutes)
    rows = [row for seed in args.seeds for arm in args.arms for row in rows_of(run_dir / f"{arm}-{seed}", arm, seed)]
    write_rows(args.output, sft_steps=args.sft_steps, rollouts=args.rollouts, rows=rows)
    print(table(rows, args.arms, args.seeds, args.rollouts), flush=True)


def write_rows(path: Path, **fields: object) -> None:
    """Write a file of results, with the date and versions."""
    written = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "versions": {package: version(package) for package in ("torch", "megatron-core")},
    }
    path.write_text(json.dumps(written | fields, indent=1) + "\n")


def commit() -> str:
    """Return the commit of the checkout, with a mark where files differ from it."""
    described = ["git", "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    return subprocess.run(described, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
