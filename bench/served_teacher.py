"""Distillation from a teacher behind a real vLLM: the student's greedy accuracy before and after, over seeds.

    make venv-vllm && python -m bench.served_teacher
    python -m bench.served_teacher --table

The task is to answer a string of 4 to 7 digits with the digits in reverse. Teacher and student are small Qwen3-MoEs
with one tokenizer: the teacher has four layers and is fine-tuned for 700 steps, the student has two and stops early. A
vLLM for CPUs serves the teacher's Hugging Face folder, and no run updates it. Students train on rollout batches of 128
completions with 4 updates each, without a reward. The accuracy is that of greedy answers to 256 prompts that no run
distils on.

| arm | what the student learns from |
|---|---|
| `reverse` | KL(student || teacher) at the sampled tokens, as an advantage |
| `forward` | KL(teacher || student) over the teacher's 8 likeliest tokens and one for all the others, in the loss |
| `both` | half of each |

Runs that are done are not run again. bench/results/served_teacher.json gets the results, with machine, versions and
commit.
"""

import argparse
import datetime
import json
import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from bench.claims import EXAMPLES, MODEL, RL, UPDATES
from bench.learning import cell, run_study, study_toml
from bench.rl_folder import program, write_tokenizer
from bench.study import SFT
from mcore_rl.cli.study import interval, read_run
from mcore_rl.workers.launcher import free_port

RESULTS = Path(__file__).parent / "results" / "served_teacher.json"
STUDENT = "model.num_layers=2"
TOKENIZER = "rl.distill.tokenizer.path=tokenizer"
"""The teacher's too. It has few characters; without this the server would be asked about texts that have others."""
LENGTHS = ("rl.prompts.smallest=2", "rl.prompts.largest=10")
"""Lengths of the strings that are fine-tuned on."""
PROMPTS = ("rl.prompts.smallest=4", "rl.prompts.largest=7", "rl.eval.num_prompts=256")
ARMS = {
    "reverse": [],
    "forward": ["rl.distill.forward_weight=1", "rl.distill.top_k=8"],
    "both": ["rl.distill.forward_weight=0.5", "rl.distill.top_k=8"],
}
RATE = "1e-4"
"""Learning rate of all arms."""
TEACHER_STEPS = 700
COLUMNS = 3
"""Evaluations after the first one."""
SERVED = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


def make_models(folder: Path, student_steps: int) -> None:
    """Write the inputs, train teacher and student, and export the teacher, unless they are there."""
    folder.mkdir(parents=True, exist_ok=True)
    # vLLM's attention for CPUs takes no narrower heads.
    for name, text in (("model", MODEL.replace("head_dim = 16", "head_dim = 32")), ("sft", SFT), ("rl", RL)):
        (folder / f"{name}.toml").write_text(text)
    if not (folder / "sft.jsonl").exists():
        write_tokenizer(folder / "tokenizer")
        program(folder, ["problems", "rl.toml", *LENGTHS, "--count", str(EXAMPLES), "--output", "sft.jsonl"])
    for name, steps, model in (("teacher", TEACHER_STEPS, []), ("student", student_steps, [STUDENT])):
        if not (folder / name / "DONE").exists():
            settings = [f"run_dir={name}", "optim.lr=2e-3", f"train.steps={steps}", "data.train=['sft.jsonl']"]
            program(folder, ["sft", "sft.toml", *model, *settings])
    if not (folder / "hf").exists():
        program(folder, ["convert", "export", "teacher", "hf"])


@contextmanager
def served(folder: Path, python: Path) -> Iterator[str]:
    """Context with the address of a vLLM that serves the exported teacher; it ends with the context."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [str(python.absolute()), "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder / "hf")]
    command += ["--host", "127.0.0.1", "--port", str(port), "--enable-scale-out", "--enforce-eager"]
    command += ["--dtype", "float32", "--max-model-len", "128", "--max-num-batched-tokens", "2048"]
    with (folder / "vllm.log").open("w") as log:
        process = subprocess.Popen(command, env=os.environ | SERVED, stdout=log, stderr=subprocess.STDOUT)
    try:
        while True:
            if process.poll() is not None:
                raise SystemExit(f"vLLM ended with status {process.returncode}: see {folder / 'vllm.log'}")
            try:
                with urlopen(f"{url}/health"):
                    break
            except OSError:
                time.sleep(1)
        yield url
    finally:
        process.terminate()
        process.wait()


def accuracy_of(folder: Path, name: str) -> float:
    """Return the greedy accuracy of a fine-tuned model on the held-out prompts."""
    program(folder, ["eval", "rl.toml", f"checkpoint.load={name}", *PROMPTS])
    lines = (folder / "eval.log").read_text().splitlines()
    return float(json.loads(next(line for line in reversed(lines) if line.startswith("{")))["eval/accuracy"])


def results(folder: Path, run_dir: Path, python: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Return what the runs showed, with the versions on both sides."""
    runs = {arm: [read_run(arm, seed, run_dir / f"{arm}-{seed}") for seed in args.seeds] for arm in args.arms}
    first = next(iter(runs.values()))[0]
    asked = "import json, torch, transformers, vllm; print(json.dumps({m.__name__: m.__version__ for m in "
    asked += "(vllm, torch, transformers)}))"
    printed = subprocess.run([str(python), "-c", asked], capture_output=True, text=True, check=True).stdout
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": "python -m bench.served_teacher",
        "steps": {"teacher": TEACHER_STEPS, "student": args.student_steps},
        "rollouts": args.rollouts,
        "lr": float(RATE),
        "seeds": args.seeds,
        "teacher": accuracy_of(folder, "teacher"),
        "arms": {arm: arm_results([run.evaluated() for run in of_seeds]) for arm, of_seeds in runs.items()},
        "server": json.loads(printed.splitlines()[-1]),
        "versions": first.versions,
        "machine": first.machine,
        "commit": first.commit,
    }


def arm_results(accuracies: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Return the results of an arm, of the accuracies of each seed's evaluations in order."""
    gains = [evaluated[-1] - evaluated[0] for evaluated in accuracies]
    return {"accuracies": accuracies, "gain": dict(zip(("mean", "half"), interval(gains), strict=True))}


def table(found: Mapping[str, Any]) -> str:
    """Return the Markdown table of the arms: the accuracies over a run, and the gain paired by seed."""
    titles = [f"{index * found['rollouts'] // COLUMNS} rollouts" for index in range(1, COLUMNS + 1)]
    lines = [f"| | start | {' | '.join(titles)} | gain |", "|---" + "|--:" * (COLUMNS + 2) + "|"]
    for arm, of_arm in found["arms"].items():
        cells = [cell(values) for values in zip(*of_arm["accuracies"], strict=True)]
        gain = f"{of_arm['gain']['mean']:.3f} +- {of_arm['gain']['half']:.3f}"
        lines.append(f"| `{arm}` | {' | '.join([*cells, gain])} |")
    return "\n".join(lines)


def main() -> None:
    """Train both models, serve the teacher, let each student learn from it, and write what was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--folder", type=Path, default=Path("runs/served_teacher"), help="folder of all runs")
    parser.add_argument("--python", type=Path, default=Path(".venv-vllm/bin/python"), help="the Python that has vLLM")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--student-steps", type=int, default=240, help="fine-tuning steps of the student")
    parser.add_argument("--rollouts", type=int, default=12, help=f"rollout batches of a run, a multiple of {COLUMNS}")
    parser.add_argument("--table", action="store_true", help="print the table of what was found, and run nothing")
    args = parser.parse_args()
    if not args.table:
        folder = args.folder.absolute()
        make_models(folder, args.student_steps)
        run_dir, steps = folder / "students", args.rollouts * UPDATES
        with served(folder, args.python) as url:
            words = [STUDENT, *PROMPTS, "checkpoint.load=student", f"optim.lr={RATE}", f"train.steps={steps}"]
            words += [f"train.eval_interval={steps // COLUMNS}", f"rl.distill.teacher={url}", TOKENIZER]
            words += ["rl.advantage.kind=zero"]
            arms = {arm: ARMS[arm] for arm in args.arms}
            run_study(folder, study_toml(run_dir, args.seeds, words, arms), run_dir, None)
        RESULTS.write_text(json.dumps(results(folder, run_dir, args.python, args), indent=1) + "\n")
    print(table(json.loads(RESULTS.read_text())))


if __name__ == "__main__":
    main()
