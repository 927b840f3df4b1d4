"""Steps of reinforcement learning beside TRL's GRPOTrainer: same model, task, prompts, sampling and updates.

    python -m bench.rl --trl-python PATH          all rows; bench/results/rl.json

PATH is the Python of an environment with TRL, which is not ours; one is made with

    python -m venv TRL && TRL/bin/pip install "trl==1.16.*" "torch==2.13.0" "transformers==5.23.0"

A Qwen3-MoE of 7 M parameters (4 layers, 16 experts, 4 a token), fine-tuned until it half knows the task, learns to
reverse 4 to 12 digits: 16 prompts, 8 completions each of at most 16 tokens at temperature 1, 2 updates of 64
completions, fp32, one thread. Both programs run at once and take turns; figures are CPU seconds of a turn's steps,
judging processes included, and medians over the turns. Training is all that is neither rollout nor scoring (rewards,
old logprobs, batches, advantages); its tokens are those of prompts and completions, without padding.
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from bench.rl_folder import build, overrides, write_peer
from bench.turns import Worker

KINDS = ("grpo", "gspo")
TARGETS = {"rollout": 1.3, "training": 1.5, "step": 1.6}
RESULTS = Path(__file__).parent / "results" / "rl.json"
ROOT = Path(__file__).parents[1]
VERSIONS = (
    "import json, platform, importlib.metadata as m; "
    "print(json.dumps({'python': platform.python_version()} | {n: m.version(n) for n in (%s)}))"
)
Turn = dict[str, float]


def compare(kind: str, trl_python: str, folder: Path, rounds: int, steps: int) -> dict[str, Any]:
    """The row of one objective: after a turn of each to warm up, `rounds` turns of each."""
    peer = write_peer(folder, kind, "grouped_mm", (rounds + 1) * steps)
    turns: dict[str, list[Turn]] = {"mcore_rl": [], "trl": []}
    commands = {
        "mcore_rl": [sys.executable, "-m", "bench.rl_ours", "rl.toml", *overrides(kind)],
        "trl": [trl_python, "-m", "bench.rl_trl", str(peer)],
    }
    with ExitStack() as stack:
        workers = {
            name: stack.enter_context(Worker(command, folder, ROOT, folder / f"{name}_{kind}.log"))
            for name, command in commands.items()
        }
        for _ in range(rounds + 1):
            for name, worker in workers.items():
                turns[name].append(worker.turn(steps))
    sides = {name: side(of_one[1:], steps) for name, of_one in turns.items()}
    ours, theirs = sides["mcore_rl"], sides["trl"]
    return {
        "ratios": {
            "rollout": round(ours["rollout_tokens_per_cpu_s"] / theirs["rollout_tokens_per_cpu_s"], 2),
            "training": round(ours["training_tokens_per_cpu_s"] / theirs["training_tokens_per_cpu_s"], 2),
            "step": round(theirs["step_cpu_s"] / ours["step_cpu_s"], 2),
        },
        "sides": sides,
    }


def side(turns: list[Turn], steps: int) -> dict[str, Any]:
    """Figures of one program."""
    seconds = {
        "rollout": [turn["rollout_s"] for turn in turns],
        "scoring": [turn["rollout_and_scoring_s"] - turn["rollout_s"] for turn in turns],
        "training": [turn["step_s"] - turn["rollout_and_scoring_s"] for turn in turns],
        "step": [turn["step_s"] for turn in turns],
    }
    spread = sorted(seconds["step"])
    quarter = len(spread) // 4
    return {
        "rollout_tokens_per_cpu_s": round(_rate(turns, "completion_tokens", seconds["rollout"]), 1),
        "training_tokens_per_cpu_s": round(_rate(turns, "tokens", seconds["training"]), 1),
        "step_cpu_s": round(median(seconds["step"]) / steps, 4),
        "split_cpu_s": {name: round(median(of_turns) / steps, 4) for name, of_turns in seconds.items()},
        "spread": round((spread[-1 - quarter] - spread[quarter]) / median(spread), 3),
        "contention": round(sum(turn["wall_s"] for turn in turns) / sum(seconds["step"]), 2),
        "completion_tokens": round(_mean(turns, "completion_tokens"), 2),
        "solved": round(_mean(turns, "solved"), 3),
        "turns": [{name: round(value, 4) for name, value in turn.items()} for turn in turns],
    }


def _rate(turns: list[Turn], name: str, seconds: list[float]) -> float:
    return median(turn[name] / of_turn for turn, of_turn in zip(turns, seconds, strict=True))


def _mean(turns: list[Turn], name: str) -> float:
    return sum(turn[name] for turn in turns) / sum(turn["completions"] for turn in turns)


def table(rows: dict[str, dict[str, Any]]) -> str:
    """The rows as text."""
    lines = ["row   what                   mcore_rl       TRL   ratio  target  contention ours / TRL"]
    whats = (
        ("rollout", "rollout tokens/s", "rollout_tokens_per_cpu_s"),
        ("training", "training tokens/s", "training_tokens_per_cpu_s"),
        ("step", "s per step", "step_cpu_s"),
    )
    for kind, row in rows.items():
        ours, theirs = row["sides"]["mcore_rl"], row["sides"]["trl"]
        for name, label, field in whats:
            lines.append(
                f"{kind:5s} {label:20s} {ours[field]:10.4g}  {theirs[field]:8.4g}  {row['ratios'][name]:6.2f}"
                f"  {TARGETS[name]:6.2f}  {ours['contention']:.2f} / {theirs['contention']:.2f}"
            )
    return "\n".join(lines)


def versions(python: str, *packages: str) -> dict[str, str]:
    """Return the versions of the packages in an environment."""
    names = ", ".join(map(repr, ("torch", "transformers", *packages)))
    done = subprocess.run([python, "-c", VERSIONS % names], stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trl-python", help="of an environment with TRL; without it nothing is measured")
    parser.add_argument("--folder", type=Path, help="kept, and used again (default: a temporary one)")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--rounds", type=int, default=7, help="turns of each that count")
    parser.add_argument("--steps", type=int, default=3, help="of a turn")
    arguments = parser.parse_args()
    if not arguments.trl_python:
        print(
            "bench.rl: skipped, there is nothing to compare with. Name a Python that has TRL: --trl-python PATH"
        )
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    rows = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.folder or Path(temporary)).absolute()
        build(folder)
        for kind in arguments.kinds:
            rows[kind] = compare(kind, arguments.trl_python, folder, arguments.rounds, arguments.steps)
            print(table({kind: rows[kind]}), flush=True)
    document = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": f"python -m bench.rl --trl-python PATH --rounds {arguments.rounds} --steps {arguments.steps}",
        "versions": {
            "mcore_rl": versions(sys.executable, "megatron-core"),
            "trl": versions(arguments.trl_python, "trl"),
        },
        "targets": TARGETS,
        "rows": rows,
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(document, indent=1) + "\n")
    print(f"written to {RESULTS}")


if __name__ == "__main__":
    main()
