"""The table of docs/rlhf.md: PPO, GRPO and DPO on the digit task, from one start, over learning rates and seeds.

    python -m bench.rlhf                             all arms, over three seeds: hours on one core
    python -m bench.rlhf --arms ppo grpo --seeds 1   a part of them; runs that are done are not run again

The start is quickstart's fine-tuned model (tools/quickstart.py): four layers, eight experts, two a token. Each arm of
reinforcement learning trains on 60 rollout batches of 128 completions with 2 updates each, at each of three learning
rates; PPO's critic has its recipe's rate, and its warm-up of three rollout batches counts among the 60. The accuracy is
that of greedy answers to 256 held-out prompts, before the first update and at each fifth of the run.

| arm | what it is |
|---|---|
| `grpo`, `ppo` | the recipes, with the rule `positions` as the reward |
| `grpo-rm`, `ppo-rm` | the reward is a reward model's score alone; PPO's critic starts from that model |
| `ppo-rm-any` | as `ppo-rm`, with a reward model that has seen wrong answers of any kind |
| `ppo-weak-rm`, `ppo-weak-rm-kl` | a reward model of `WEAK_STEPS` steps, without a KL and with one: reward hacking |
| `distill`, `distill-vocabulary` | GRPO's recipe without rewards; the teacher is `ppo`'s run at its first rate |
| `dpo`, `dpo-without-nll`, `nll` | the recipe, without its cross entropy, and the cross entropy alone |

The same command goes on where it was ended. After each run bench/results/rlhf.json holds a row of each evaluation of
each run so far, with the commit that the run began on and, for the arms with a reward model, the mean reward and the
true accuracy of each rollout batch. A cell of the table is the mean over the seeds done, with its 95 % interval.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.learning import ROOT, UPDATES, cell, commit, rows_of, write_rows
from bench.rl_folder import program
from mcore_rl.metrics.jsonl import FILE_NAME, read_records

COLUMNS = 5
"""Evaluations after the first one."""
RATES = ("2e-5", "6e-5", "2e-4")
WEAK_STEPS = 40
"""Steps of the weak reward model; the other one has its recipe's."""
RESULTS = Path(__file__).parent / "results" / "rlhf.json"
CACHE = "dpo.reference_cache=reference_logprobs"
"""Runs on the same pairs from the same start share the reference's logprobs."""
ONE_RANK = ("mesh.tp=1", "mesh.ep=1")


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A recipe and what it is changed in."""

    recipe: str
    overrides: tuple[str, ...] = ()
    rates: tuple[str, ...] = RATES
    reward_model: str | None = None
    """Run folder of the reward model that is the reward."""

    @property
    def is_rl(self) -> bool:
        """Whether it trains on rollouts."""
        return self.recipe != "dpo"


TEACHER = "teacher"
"""Link to the run that teaches, in the folder of all runs."""
TAUGHT = (f"rl.distill.teacher={TEACHER}", "rl.advantage.kind=zero")
ARMS = {
    "grpo": Arm(recipe="grpo"),
    "ppo": Arm(recipe="ppo"),
    "dpo": Arm(recipe="dpo", rates=("5e-5",)),
    "dpo-without-nll": Arm(recipe="dpo", overrides=("dpo.nll_coeff=0",), rates=("5e-5",)),
    # A beta at which the gradient of the pairs' loss is a millionth of the cross entropy's.
    "nll": Arm(recipe="dpo", overrides=("dpo.beta=1e-7",), rates=("5e-5",)),
    "ppo-weak-rm": Arm(
        recipe="ppo", overrides=("rl.advantage.critic.load=weak_rm",), rates=("6e-5",), reward_model="weak_rm"
    ),
    "ppo-weak-rm-kl": Arm(
        recipe="ppo",
        overrides=(
            "rl.advantage.critic.load=weak_rm",
            "rl.loss.kl_coeff=0.05",
            "rl.loss.kl_in=reward",
            "rl.loss.kl_estimator=k1",
        ),
        rates=("6e-5",),
        reward_model="weak_rm",
    ),
    "distill": Arm(recipe="grpo", overrides=TAUGHT, rates=("2e-5", "6e-5")),
    "distill-vocabulary": Arm(
        recipe="grpo",
        overrides=(*TAUGHT, "rl.distill.use=loss", "rl.distill.estimator=vocabulary"),
        rates=("2e-5", "6e-5"),
    ),
    "grpo-rm": Arm(recipe="grpo", reward_model="rm"),
    "ppo-rm": Arm(recipe="ppo", overrides=("rl.advantage.critic.load=rm",), reward_model="rm"),
    "ppo-rm-any": Arm(recipe="ppo", overrides=("rl.advantage.critic.load=rm_any",), reward_model="rm_any"),
}
Row = dict[str, Any]
"""An evaluation: arm, lr, seed, rollouts, commit, and the metrics `eval/...`."""


def make_start(folder: Path) -> None:
    """Make quickstart's fine-tuned model and the pairs of answers, unless they are there."""
    for stage in ("data", "pretrain", "convert", "sft"):
        command = [sys.executable, "tools/quickstart.py", "--folder", str(folder), "--only", stage]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    for name, faults in (("pairs", "character"), ("pairs_any", "any")):
        if not (folder / f"{name}.jsonl").exists():
            words = ["--faults", faults, "--count", "40000", "--valid", "1000", "--output", f"{name}.jsonl"]
            program(folder, ["problems", "tiny_moe/grpo", "--preferences", *words])


def make_reward_model(folder: Path, name: str) -> None:
    """Train the reward model `rm`, `rm_any` or `weak_rm`, unless it is there."""
    if (folder / name / "DONE").exists():
        return
    pairs = "pairs_any" if name == "rm_any" else "pairs"
    data = [f"data.train=['{pairs}.jsonl']", f"data.valid=['{pairs}_valid.jsonl']", "checkpoint.keep=1"]
    weak = [f"train.steps={WEAK_STEPS}", f"train.eval_interval={WEAK_STEPS}", "optim.warmup_steps=10"]
    program(folder, ["rm", "tiny_moe/rm", *shared(name), *data, *(weak if name == "weak_rm" else [])])


def shared(run_dir: object) -> list[str]:
    """Return the overrides that every run has: one rank, from the start."""
    return [f"run_dir={run_dir}", "checkpoint.load=sft", "data.tokenizer.path=tokenizer.model", *ONE_RANK]


def train(folder: Path, run_dir: Path, arm: Arm, rate: str, seed: int, rollouts: int) -> None:
    """Run an arm to its end, from where it was ended."""
    arguments = [*shared(run_dir), f"train.seed={seed}", f"optim.lr={rate}", *arm.overrides]
    if arm.is_rl:
        steps = rollouts * UPDATES
        interval = steps // COLUMNS
        arguments += [
            f"optim.min_lr={rate}",
            f"train.steps={steps}",
            f"train.eval_interval={interval}",
            f"checkpoint.interval={interval}",
            "checkpoint.keep=1",
            "rl.samples.interval=none",
            "rl.eval.num_prompts=256",
        ]
        if arm.reward_model is not None:
            parts = f'rl.reward.parts=["model:{arm.reward_model}", "exact"]'
            arguments += [parts, "rl.reward.weights=[1, 0]"]
        program(folder, ["rl", f"tiny_moe/{arm.recipe}", *arguments])
        return
    program(folder, ["dpo", "tiny_moe/dpo", *arguments, "data.train=['pairs.jsonl']", "train.steps=60", CACHE])


def evaluate(folder: Path, run_dir: Path, seed: int) -> None:
    """Write evaluation.json beside a run of preference optimisation: its answers, as the other arms are asked."""
    program(
        folder,
        [
            *("eval", "tiny_moe/grpo", *shared("no_run"), f"checkpoint.load={run_dir}"),
            *(f"train.seed={seed}", "rl.eval.num_prompts=256"),
        ],
    )
    lines = (folder / "eval.log").read_text().splitlines()
    (run_dir / "evaluation.json").write_text(next(line for line in reversed(lines) if line.startswith("{")))


def evaluations(run_dir: Path, name: str, rate: str, seed: int) -> Iterator[Row]:
    """Yield the evaluations of a run; none where it has not begun."""
    arm = ARMS[name]
    if arm.is_rl:
        for row in rows_of(run_dir, name, seed):
            yield {"lr": rate, **row}
    elif (run_dir / "evaluation.json").exists():
        written = json.loads((run_dir / "evaluation.json").read_text())
        metrics = {key: value for key, value in written.items() if key.startswith("eval/")}
        commit_ = (run_dir / "commit").read_text()
        yield {"lr": rate, "arm": name, "seed": seed, "rollouts": 0, "commit": commit_, **metrics}


def curve(run_dir: Path) -> list[Row]:
    """Return the mean reward and the true accuracy of each rollout batch, in order."""
    if not (run_dir / FILE_NAME).is_file():
        return []
    by_step = {
        int(str(record["step"])): record for record in read_records(run_dir / FILE_NAME) if "reward/mean" in record
    }
    names = ("reward/mean", "reward/accuracy", "policy/kl_reference_nats")
    return [
        {"rollouts": step // UPDATES} | {name: record[name] for name in names if name in record}
        for step, record in sorted(by_step.items())
    ]


def table(rows: Sequence[Row], rollouts: int) -> str:
    """Return the Markdown table of all arms and learning rates, over the seeds whose run has ended."""
    columns = [index * rollouts // COLUMNS for index in range(COLUMNS + 1)]
    titles = ["lr", "seeds", "start", *(f"{column} rollouts" for column in columns[1:])]
    lines = [f"| | {' | '.join(titles)} |", "|---|" + "--:|" * len(titles)]
    accuracy = {(row["arm"], row["lr"], row["seed"], row["rollouts"]): float(row["eval/accuracy"]) for row in rows}
    for name, arm in ARMS.items():
        last = rollouts if arm.is_rl else 0
        for rate in arm.rates:
            seeds = sorted(key[2] for key in accuracy if key[:2] == (name, rate) and key[3] == last)
            if not seeds:
                continue
            done = [cell([accuracy[name, rate, seed, last] for seed in seeds])]
            if arm.is_rl:
                done = [cell([accuracy[name, rate, seed, column] for seed in seeds]) for column in columns]
            empty = [""] * (len(columns) - len(done))
            lines.append(f"| `{name}` | {' | '.join([rate, str(len(seeds)), *empty, *done])} |")
    return "\n".join(lines)


def main() -> None:
    """Make the start once, then run each arm that is not done and write its evaluations."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--folder", type=Path, default=Path("runs/rlhf"), help="folder of all runs")
    parser.add_argument("--output", type=Path, default=RESULTS, help="file of the evaluations")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--rates", nargs="+", help="learning rates to run; default: those of each arm")
    parser.add_argument("--rollouts", type=int, default=60, help=f"rollout batches of a run, a multiple of {COLUMNS}")
    args = parser.parse_args()
    if args.rollouts % COLUMNS:
        parser.error(f"--rollouts wants a multiple of {COLUMNS}")
    folder = args.folder.absolute()
    make_start(folder)
    every = [(seed, name, rate) for seed in (1, 2, 3) for name in ARMS for rate in ARMS[name].rates]
    chosen = [
        (seed, name, rate)
        for seed in args.seeds
        for name in args.arms
        for rate in ARMS[name].rates
        if args.rates is None or rate in args.rates
    ]
    grid = folder / f"grid-{args.rollouts}"

    def run_dir(seed: int, name: str, rate: str) -> Path:
        return grid / f"{name}-{rate}-{seed}"

    for seed, name, rate in chosen:
        here, arm = run_dir(seed, name, rate), ARMS[name]
        if not (here / "DONE").exists():
            if arm.reward_model is not None:
                make_reward_model(folder, arm.reward_model)
            if TAUGHT[0] in arm.overrides and not (folder / TEACHER).exists():
                (folder / TEACHER).symlink_to(run_dir(args.seeds[0], "ppo", RATES[0]))
            here.mkdir(parents=True, exist_ok=True)
            if not (here / "commit").exists():
                (here / "commit").write_text(commit())
            train(folder, here, arm, rate, seed, args.rollouts)
        if not arm.is_rl and not (here / "evaluation.json").exists():
            evaluate(folder, here, seed)
        rows = [row for run in every for row in evaluations(run_dir(*run), run[1], run[2], run[0])]
        curves = [
            {"arm": other, "lr": of, "seed": number, "rollouts": found}
            for number, other, of in every
            if ARMS[other].reward_model is not None and (found := curve(run_dir(number, other, of)))
        ]
        models = [accuracy_of_model(folder / model) for model in ("rm", "rm_any", "weak_rm")]
        write_rows(
            args.output,
            rollouts=args.rollouts,
            reward_models=[model for model in models if model],
            rows=rows,
            curves=curves,
        )
        print(table(rows, args.rollouts), flush=True)


def accuracy_of_model(run_dir: Path) -> Row | None:
    """Return steps and held-out pair accuracy of a reward model; None where there is none yet."""
    if not (run_dir / "DONE").exists():
        return None
    found = [one for one in read_records(run_dir / FILE_NAME) if "eval/pairs/accuracy" in one]
    last = found[-1]
    return {"model": run_dir.name, "step": last["step"], "eval/pairs/accuracy": last["eval/pairs/accuracy"]}


if __name__ == "__main__":
    main()
