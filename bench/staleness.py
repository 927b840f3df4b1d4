"""What staleness costs and saves: GRPO and GSPO with rl.rollout.max_staleness 0, 1 and 4 on a digit task.

    python -m bench.staleness                         all arms over three seeds
    python -m bench.staleness --seeds 1 --rollouts 10 a part of them; runs that are done are not run again

The task and the model are those of bench/digits.py. Completions come from bench/copied_engine.py, which sleeps
`--delay-s` seconds for each 4 tokens of a completion in place of a server that computes elsewhere: with max_staleness=0
training waits for it, otherwise it goes on meanwhile. The wall time is that of rollout batches without the first one,
the reward the mean of the last fifth of them.
"""

import argparse
import os
import platform
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from bench.digits import UPDATES, write_inputs
from bench.learning import cell, commit, run_study, study_toml, write_rows
from bench.rl_folder import program
from mcore_rl.metrics.jsonl import FILE_NAME, read_records

LOSSES = {
    "grpo": ["rl.loss.kind=grpo", "rl.loss.importance_sampling=truncate"],
    "gspo": ["rl.loss.kind=gspo", "rl.loss.importance_sampling=sequence_truncate"],
}
STALENESS = (0, 1, 4)
ENGINE = ["rl.engine.kind=bench.copied_engine:copied_engine", "rl.engine.slots=16", "replay.kind=r3"]
RESULTS = Path(__file__).parent / "results" / "staleness.json"
MEANS = {
    "staleness": "rollout/staleness",
    "stale_fraction": "rollout/stale_fraction",
    "mismatch_kl_nats": "rollout/mismatch_kl_nats",
    "waited_s": "time/rollout_s",
    "rollout_s": "rl/step_s",
}
"""Column -> metric whose mean over the rollout batches but the first is reported."""


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


def main() -> None:
    """Make the start once, run the study from where it was ended, write all rows and print the table."""
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
        program(folder, ["sft", "sft.toml"])
    arms = {
        f"{loss}-{staleness}": [f"rl.rollout.max_staleness={staleness}", *LOSSES[loss]]
        for loss in args.losses
        for staleness in STALENESS
    }
    run_dir = folder / f"study-{args.rollouts}-{args.delay_s:g}"
    fields = [f"train.steps={UPDATES * args.rollouts}", *ENGINE]
    os.environ["COPIED_ENGINE_DELAY_S"] = str(args.delay_s)
    run_study(folder, study_toml(run_dir, args.seeds, fields, arms), run_dir, None)
    rows = [
        row_of(run_dir / f"{loss}-{staleness}-{seed}", loss, staleness, seed)
        for seed in args.seeds
        for loss in args.losses
        for staleness in STALENESS
    ]
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    write_rows(args.output, commit=commit(), machine=machine, delay_s=args.delay_s, rows=rows)
    print("\n".join(table(rows)))


if __name__ == "__main__":
    main()
