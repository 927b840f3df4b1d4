"""Steps of reinforcement learning beside TRL's GRPOTrainer: same model, task, prompts, sampling and updates.

    python -m bench.rl --trl-python PATH                             all rows; bench/results/rl.json
    python -m bench.rl --trl-python PATH --model runs/real/smollm2   a real model, in that file's place

GRPO, and GSPO (TRL's importance_sampling_level="sequence"). PATH is the Python of an environment with TRL, which is
not ours; one is made with

    python -m venv TRL && TRL/bin/pip install "trl==1.16.*" "torch==2.13.0" "transformers==5.23.0"

A Qwen3-MoE of 7 M parameters (4 layers, 16 experts, 4 a token), fine-tuned until it half knows the task, learns to
reverse 4 to 12 digits: 16 prompts, 8 completions each of at most 16 tokens at temperature 1, 2 updates of 64
completions, fp32, one thread. With `--model`, a Hugging Face folder, that model copies four to six letters as it is,
by the recipe any_model/copying: 8 prompts, 8 completions each of at most 8 tokens, 2 updates of 32 completions. Both
programs run at once and take turns; figures are CPU seconds of a turn's steps, judging processes included, and medians
over the turns, with the quartiles of the turns' ratios. Training is all that is neither rollout nor scoring (rewards,
old logprobs, batches, advantages); its tokens are those of prompts and completions, without padding. A row that others
on the machine disturbed (contention above 1.3) is marked, and never quoted.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch, and for both programs

import torch

from bench.clock import Peaks, circumstances, circumstances_line, ratio_over_rounds, versions, write_results
from bench.rl_folder import build, build_from, overrides, write_peer
from bench.turns import Worker

KINDS = ("grpo", "gspo")
TARGETS = {"rollout": 1.7, "training": 1.9, "step": 2.0}
RESULTS = Path(__file__).parent / "results" / "rl.json"
ROOT = Path(__file__).parents[1]
TRL_VERSIONS = (
    "import json, platform, importlib.metadata as m; names = 'torch', 'transformers', 'trl'; "
    "print(json.dumps({'python': platform.python_version()} | {n: m.version(n) for n in names}))"
)
Turn = dict[str, float]


def compare(
    kind: str, trl_python: str, folder: Path, rounds: int, steps: int, settings: Sequence[str] = ()
) -> dict[str, Any]:
    """The row of one objective: after a turn of each to warm up, `rounds` turns of each.

    `settings` are fields of our config, as `platform.bf16_products=true`; TRL's side does not change with them.
    """
    peer = write_peer(folder, kind, (rounds + 1) * steps)
    turns: dict[str, list[Turn]] = {"mcore_rl": [], "trl": []}
    commands = {
        "mcore_rl": [sys.executable, "-m", "bench.rl_ours", "rl.toml", *overrides(kind), *settings],
        "trl": [trl_python, "-m", "bench.rl_trl", str(peer)],
    }
    with ExitStack() as stack:
        workers = {
            name: stack.enter_context(Worker(command, folder, ROOT, folder / f"{name}_{kind}.log"))
            for name, command in commands.items()
        }
        peaks = Peaks()
        for _ in range(rounds + 1):
            peaks.measure()
            for name, worker in workers.items():
                turns[name].append(worker.turn(steps))
    counted = {name: of_one[1:] for name, of_one in turns.items()}
    seconds = {name: seconds_of(of_one) for name, of_one in counted.items()}
    rates = {
        what: {name: rates_of(counted[name], tokens, seconds[name][what]) for name in counted}
        for what, tokens in (("rollout", "completion_tokens"), ("training", "tokens"))
    }
    compared = {
        **{what: ratio_over_rounds(of["mcore_rl"], of["trl"]) for what, of in rates.items()},
        "step": ratio_over_rounds(seconds["trl"]["step"], seconds["mcore_rl"]["step"]),
    }
    sides = {
        name: {
            **{f"{what}_tokens_per_cpu_s": round(median(of[name]), 1) for what, of in rates.items()},
            **side(counted[name], seconds[name], steps),
        }
        for name in counted
    }
    return {
        "ratios": {what: found["ratio"] for what, found in compared.items()},
        "ratio_quartiles": {what: found["ratio_quartiles"] for what, found in compared.items()},
        **circumstances(max(one["contention"] for one in sides.values()), peaks),
        "sides": sides,
    }


def seconds_of(turns: list[Turn]) -> dict[str, list[float]]:
    """Return the CPU seconds of each turn of one program, by part of a step."""
    return {
        "rollout": [turn["rollout_s"] for turn in turns],
        "scoring": [turn["rollout_and_scoring_s"] - turn["rollout_s"] for turn in turns],
        "training": [turn["step_s"] - turn["rollout_and_scoring_s"] for turn in turns],
        "step": [turn["step_s"] for turn in turns],
    }


def rates_of(turns: list[Turn], tokens: str, seconds: list[float]) -> list[float]:
    """Return the tokens of that name per second, of each turn."""
    return [turn[tokens] / of_turn for turn, of_turn in zip(turns, seconds, strict=True)]


def side(turns: list[Turn], seconds: dict[str, list[float]], steps: int) -> dict[str, Any]:
    """Return figures of one program, beside its rates."""
    spread = sorted(seconds["step"])
    quarter = len(spread) // 4
    return {
        "step_cpu_s": round(median(seconds["step"]) / steps, 4),
        "split_cpu_s": {name: round(median(of_turns) / steps, 4) for name, of_turns in seconds.items()},
        "spread": round((spread[-1 - quarter] - spread[quarter]) / median(spread), 3),
        "contention": round(sum(turn["wall_s"] for turn in turns) / sum(seconds["step"]), 2),
        "completion_tokens": round(_mean(turns, "completion_tokens"), 2),
        "solved": round(_mean(turns, "solved"), 3),
        "turns": [{name: round(value, 4) for name, value in turn.items()} for turn in turns],
    }


def _mean(turns: list[Turn], name: str) -> float:
    return sum(turn[name] for turn in turns) / sum(turn["completions"] for turn in turns)


def table(rows: dict[str, dict[str, Any]]) -> str:
    """The rows as text."""
    lines = ["row   what                   mcore_rl       TRL   ratio (quartiles)   target  contention ours / TRL"]
    whats = (
        ("rollout", "rollout tokens/s", "rollout_tokens_per_cpu_s"),
        ("training", "training tokens/s", "training_tokens_per_cpu_s"),
        ("step", "s per step", "step_cpu_s"),
    )
    for kind, row in rows.items():
        ours, theirs = row["sides"]["mcore_rl"], row["sides"]["trl"]
        for name, label, field in whats:
            low, high = row["ratio_quartiles"][name]
            lines.append(
                f"{kind:5s} {label:20s} {ours[field]:10.4g}  {theirs[field]:8.4g}  {row['ratios'][name]:6.2f}"
                f" ({low:.2f}-{high:.2f})  {TARGETS[name]:6.2f}  {ours['contention']:.2f} / {theirs['contention']:.2f}"
            )
    return "\n".join(lines)


def trl_versions(python: str) -> dict[str, str]:
    """Return the versions in TRL's environment."""
    done = subprocess.run([python, "-c", TRL_VERSIONS], stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", help="of an environment with TRL; without it nothing is measured")
    parser.add_argument("--model", type=Path, help="a Hugging Face folder in the place of the tiny model")
    parser.add_argument("--folder", type=Path, help="kept, and used again (default: a temporary one)")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument(
        "--set",
        nargs="+",
        default=[],
        metavar="FIELD=VALUE",
        help="fields of our config, as platform.bf16_products=true; TRL stays in fp32",
    )
    parser.add_argument("--rounds", type=int, default=7, help="turns of each that count")
    parser.add_argument("--steps", type=int, default=3, help="of a turn")
    arguments = parser.parse_args()
    if not arguments.trl_python:
        print("bench.rl: skipped, there is nothing to compare with. Name a Python that has TRL: --trl-python PATH")
        return
    torch.set_num_threads(1)
    rows = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.folder or Path(temporary)).absolute()
        if arguments.model:
            build_from(arguments.model.absolute(), folder)
        else:
            build(folder)
        for kind in arguments.kinds:
            rows[kind] = compare(kind, arguments.trl_python, folder, arguments.rounds, arguments.steps, arguments.set)
            print(f"{table({kind: rows[kind]})}\n{circumstances_line(rows[kind])}", flush=True)
    both = {"mcore_rl": versions(), "trl": trl_versions(arguments.trl_python)}
    words = ["--trl-python", "PATH", "--rounds", str(arguments.rounds), "--steps", str(arguments.steps)]
    words += ["--model", arguments.model.name] if arguments.model else []
    words += ["--kinds", *arguments.kinds, *(["--set", *arguments.set] if arguments.set else [])]
    write_results(
        RESULTS / ("rl_model.json" if arguments.model else "rl.json"),
        {"versions": both, "targets": TARGETS, "rows": rows},
        words,
    )


if __name__ == "__main__":
    main()
