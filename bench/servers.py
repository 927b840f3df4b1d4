"""RL with two vLLM servers beside the native engine: the same runs but for the engine, and their curves.

    make venv-vllm && python -m bench.servers            GRPO and GSPO, 30 rollout batches each with both engines

The task and the model are those of bench/digits.py, with heads of a width that vLLM has on CPUs. Each run starts its
servers. bench/results/servers.json gets, under `runs`, the reward of each rollout batch and the largest difference
between the engine's and the trainer's logprob of any token. That is the proof that a server samples from the weights
that train: a curve alone has the noise of other samples. Runs that are done are not run again.
"""

import argparse
import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.digits import UPDATES, write_inputs
from bench.rl_folder import program
from mcore_rl.metrics.jsonl import FILE_NAME, read_records

SHAPE = ["model.head_dim=32"]
KINDS, ENGINES = ("grpo", "gspo"), ("native", "vllm")
PYTHON = Path(".venv-vllm/bin/python")
RESULTS = Path(__file__).parent / "results" / "servers.json"


def engine_fields(engine: str, python: Path, urls: Sequence[str]) -> list[str]:
    """Return the overrides of an engine."""
    if engine == "native":
        return []
    if urls:
        servers = [f"rl.engine.urls={json.dumps(list(urls))}"]
    else:
        command = [str(python.absolute()), "-m", "vllm.entrypoints.openai.api_server"]
        servers = ["rl.engine.count=2", f"rl.engine.command={json.dumps(command)}"]
    return ["rl.engine.kind=vllm", *servers]


def curve(run_dir: Path) -> dict[str, Any]:
    """Return the figures of a run."""
    records = [record for record in read_records(run_dir / FILE_NAME) if "reward/mean" in record]
    rewards = [round(float(str(record["reward/mean"])), 4) for record in records]
    mismatches = [float(str(record["rollout/mismatch_max"])) for record in records]
    third = len(rewards) // 3
    return {
        "rollouts": len(rewards),
        "reward": rewards,
        "mean reward of the first and of the last third": [
            round(sum(part) / max(1, len(part)), 4) for part in (rewards[:third], rewards[-third:])
        ],
        "largest |old - engine| logprob in nats, of all tokens": max(mismatches),
    }


def main() -> None:
    """Make the start, run what is not done, and write the curves."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--folder", type=Path, default=Path("runs/servers"), help="folder of all runs")
    parser.add_argument("--output", type=Path, default=RESULTS, help="file of the figures")
    parser.add_argument("--python", type=Path, default=PYTHON, help="the Python that has vLLM")
    parser.add_argument("--urls", nargs="*", default=[], help="servers that run already")
    parser.add_argument("--rollouts", type=int, default=30, help="rollout batches of a run")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    args = parser.parse_args()
    folder = args.folder.absolute()
    write_inputs(folder)
    if not (folder / "sft" / "DONE").exists():
        program(folder, ["sft", "sft.toml", *SHAPE])
    for kind in args.kinds:
        for engine in ENGINES:
            name = f"{kind}_{engine}"
            if not (folder / name / "DONE").exists():
                words = [f"run_dir={folder / name}", f"rl.loss.kind={kind}", *SHAPE]
                words.append(f"train.steps={args.rollouts * UPDATES}")
                program(folder, ["rl", "rl.toml", *words, *engine_fields(engine, args.python, args.urls)])
            record = json.loads(args.output.read_text()) if args.output.exists() else {}
            record.setdefault("runs", {"command": "python -m bench.servers"})
            date = datetime.datetime.now(datetime.UTC).date().isoformat()
            record["runs"][name] = {"date": date} | curve(folder / name)
            args.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
