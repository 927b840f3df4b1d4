"""The table of docs/benchmarks.md on learning: the quickstart's arms over seeds, with torch's and with compiled layers.

    python -m bench.quickstart                              ten seeds with both kinds of layers: hours on one core
    python -m bench.quickstart --seeds 1 2 --layers torch   a part of it; what is done is not run again

All start from one model that tools/quickstart.py has pretrained. Demonstrations, fine-tuning, reinforcement learning
and held-out prompts are of a seed, on one rank, by the commands of the quickstart with its numbers of steps. The
accuracy is that of one answer to each of 256 held-out prompts, greedy and at temperature 1, after fine-tuning and after
each arm; a gain is the difference of both on the same prompts. The run of an arm answers them greedily on its way too.

The same command goes on where it was ended: bench/results/quickstart.json gets a row of each evaluation as it
ends, and what has its row there is not run again, in whatever folder. A cell of the table is the mean over the seeds
done with its 95 % interval (Student's t), the range over these seeds behind it. README's picture,
docs/images/gains.svg, has every row: the accuracy over the rollout batches.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.learning import ROOT, cell, commit, rows_of, write_rows
from bench.rl_folder import program

LAYERS = ("torch", "cpu")
ARMS = ("grpo_r2", "gspo")
TEMPERATURES = (0.0, 1.0)
NUM_PROMPTS = 256
ONE_RANK = ("mesh.tp=1", "mesh.ep=1", "mesh.pp=1")
RESULTS = Path(__file__).parent / "results" / "quickstart.json"
IMAGE = ROOT / "docs" / "images" / "gains.svg"
NAMES = {"sft": "fine-tuned", "grpo_r2": "GRPO, replay", "gspo": "GSPO"}
TITLE = "Correct answers to held-out problems during reinforcement learning"
ROLLOUTS = 60
"""Rollout batches of an arm."""
WIDTH, HEIGHT = 280, 144
"""Both panels of the picture."""
COLOURS = """
text { font: 13px system-ui, sans-serif; fill: #1f2328 } .title { font-weight: 600; font-size: 15px }
.page { fill: #ffffff; stroke: #d0d7de } .grid { stroke: #d0d7de }
polyline { fill: none; stroke-opacity: .6 } .grpo_r2 { stroke: #0969da } .gspo { stroke: #bc4c00 }
circle { stroke: none } circle.sft { fill: #59636e } circle.grpo_r2 { fill: #0969da } circle.gspo { fill: #bc4c00 }
text.grpo_r2 { stroke: none; fill: #0969da } text.gspo { stroke: none; fill: #bc4c00 }
@media (prefers-color-scheme: dark) {
text { fill: #f0f6fc } .page { fill: #0d1117; stroke: #3d444d } .grid { stroke: #3d444d }
.grpo_r2 { stroke: #58a6ff } .gspo { stroke: #f0883e }
circle.sft { fill: #9198a1 } circle.grpo_r2 { fill: #58a6ff } circle.gspo { fill: #f0883e }
text.grpo_r2 { fill: #58a6ff } text.gspo { fill: #f0883e }
}
"""
"""The background is of the picture, so that its text is legible on any page."""
Row = dict[str, Any]
"""An evaluation: layers, seed, model (sft or an arm), temperature, commit, and the metrics `eval/...`; for the greedy
answers of an arm also `curve`, pairs of rollout batches and accuracy on the way.
"""


def quickstart(folder: Path, stage: str, settings: Sequence[str] = ()) -> None:
    """Run a stage of tools/quickstart.py, from where it was ended; its output goes to a log file in the folder."""
    command = [sys.executable, "tools/quickstart.py", "--folder", str(folder), "--only", stage, *settings]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{stage}.log").open("a") as log:
        subprocess.run(command, cwd=ROOT, check=True, stdout=log, stderr=subprocess.STDOUT)


def make_start(folder: Path) -> None:
    """Make text, tokenizer and the pretrained model of all seeds, unless they are there."""
    for stage in ("data", "pretrain", "convert"):
        quickstart(folder, stage, ONE_RANK)


def evaluate(cell_folder: Path, model: str, temperature: float, settings: Sequence[str]) -> Row:
    """Return the metrics of the answers of a model to the held-out prompts of the seed."""
    asked = [f"rl.eval.num_prompts={NUM_PROMPTS}", f"rl.eval.temperature={temperature}"]
    folders = ["run_dir=no_run", f"checkpoint.load={model}", "data.tokenizer.path=tokenizer.model"]
    program(cell_folder, ["eval", "tiny_moe/grpo", *folders, *asked, *settings])
    lines = (cell_folder / "eval.log").read_text().splitlines()
    found = json.loads(next(line for line in reversed(lines) if line.startswith("{")))
    return {name: value for name, value in found.items() if name.startswith("eval/")}


def table(rows: Sequence[Row]) -> str:
    """Return the Markdown table of all arms over the seeds that have both the arm's row and fine-tuning's."""
    accuracy = {
        (row["layers"], row["model"], row["temperature"], row["seed"]): float(row["eval/accuracy"]) for row in rows
    }
    titles = ("layers", "answers", "arm", "seeds", "after fine-tuning", "after the arm", "gain", "smallest gain")
    lines = [f"| {' | '.join(titles)} |", "|---|---|---|--:|--:|--:|--:|--:|"]
    for layers in LAYERS:
        for temperature in TEMPERATURES:
            for arm in ARMS:
                pairs = [
                    (before, accuracy[layers, arm, temperature, seed])
                    for (*key, seed), before in accuracy.items()
                    if key == [layers, "sft", temperature] and (layers, arm, temperature, seed) in accuracy
                ]
                if not pairs:
                    continue
                gains = [after - before for before, after in pairs]
                shown = ["greedy" if temperature == 0 else f"temperature {temperature:g}", f"`{arm}`", str(len(pairs))]
                shown += [with_range([before for before, _ in pairs]), with_range([after for _, after in pairs])]
                lines.append(f"| {' | '.join([f'`{layers}`', *shown, cell(gains), f'{min(gains):.3f}'])} |")
    return "\n".join(lines)


def with_range(values: Sequence[float]) -> str:
    """Return the mean with its interval, and the smallest and largest value."""
    return f"{cell(values)} ({min(values):.2f} to {max(values):.2f})"


def chart(rows: Sequence[Row]) -> str:
    """Return a picture in SVG, legible on light and dark pages: for each temperature the accuracy of every start over
    the rollout batches of each arm.
    """
    found = {(row["layers"], row["seed"], row["temperature"], row["model"]): row for row in rows}
    starts = sorted({key[:2] for key in found})
    shapes = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 284" role="img" aria-label="{TITLE}">',
        f"<style>{COLOURS}</style>",
        '<rect class="page" width="760" height="284" rx="8"/>',
        f'<text x="20" y="28" class="title">{TITLE}</text>',
        f'<text x="20" y="48">{len(starts)} starts (seed and layers), 256 problems each, in percent:</text>',
        *(f'<text x="{x}" y="48" class="{arm}">{NAMES[arm]}</text>' for x, arm in zip((420, 540), ARMS, strict=True)),
    ]
    for panel, temperature in enumerate(TEMPERATURES):
        shapes.append(f'<g transform="translate({60 + 370 * panel},84)">')
        name = "greedy answers" if temperature == 0 else f"answers at temperature {temperature:g}"
        shapes.append(f'<text x="0" y="-12">{name}</text>')
        for percent in (0, 25, 50, 75, 100):
            y = HEIGHT * (1 - percent / 100)
            shapes.append(f'<line class="grid" x1="0" x2="{WIDTH}" y1="{y:g}" y2="{y:g}"/>')
            shapes.append(f'<text x="-8" y="{y + 4:g}" text-anchor="end">{percent}</text>')
        for batches in (0, ROLLOUTS // 2, ROLLOUTS):
            x = WIDTH * batches / ROLLOUTS
            shapes.append(f'<text x="{x:g}" y="{HEIGHT + 20}" text-anchor="middle">{batches}</text>')
        shapes.append(f'<text x="{WIDTH / 2:g}" y="{HEIGHT + 38}" text-anchor="middle">rollout batches</text>')
        for start in starts:
            for arm in ARMS:
                ends = [found.get((*start, temperature, model)) for model in ("sft", arm)]
                if not all(ends):
                    continue
                first, last = (float(end["eval/accuracy"]) for end in ends if end)
                curve = [(0, first), *(ends[1] or {}).get("curve", ()), (ROLLOUTS, last)]
                points = [(WIDTH * batches / ROLLOUTS, HEIGHT * (1 - accuracy)) for batches, accuracy in curve]
                line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
                shapes.append(f'<polyline class="{arm}" points="{line}"/>')
                shapes.append(f'<circle class="sft" cx="0" cy="{points[0][1]:.1f}" r="4"/>')
                shapes.append(f'<circle class="{arm}" cx="{WIDTH}" cy="{points[-1][1]:.1f}" r="4"/>')
        shapes.append("</g>")
    return "\n".join([*shapes, "</svg>", ""])


def curve(run_dir: Path, arm: str, seed: int) -> list[tuple[int, float]]:
    """Return rollout batches and greedy accuracy of the evaluations on the way of an arm's run."""
    rows = rows_of(run_dir, arm, seed)
    return [(row["rollouts"], float(row["eval/accuracy"])) for row in rows if 0 < row["rollouts"] < ROLLOUTS]


def main() -> None:
    """Make the start once, then run and evaluate each arm of each seed that has no row yet."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--folder", type=Path, default=Path("runs/bench_quickstart"), help="folder of all runs")
    parser.add_argument("--output", type=Path, default=RESULTS, help="file of the evaluations, which are added to it")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(1, 11)))
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=list(LAYERS))
    args = parser.parse_args()
    folder = args.folder.absolute()
    rows: list[Row] = json.loads(args.output.read_text())["rows"] if args.output.exists() else []

    def is_done(*key: object) -> bool:
        return any((row["layers"], row["seed"], row["model"], row["temperature"]) == key for row in rows)

    for seed, layers in ((seed, layers) for seed in args.seeds for layers in args.layers):
        here = folder / f"{layers}-{seed}"
        settings = [f"train.seed={seed}", f"platform.layers={layers}", *ONE_RANK]
        for model in ("sft", *ARMS):
            temperatures = [one for one in TEMPERATURES if not is_done(layers, seed, model, one)]
            if not temperatures:
                continue
            make_start(folder / "start")
            here.mkdir(parents=True, exist_ok=True)
            for name in ("tokenizer.model", "imported"):
                if not (here / name).is_symlink():
                    (here / name).symlink_to(folder / "start" / name)
            quickstart(here, "sft", settings)
            if model in ARMS:
                quickstart(here, model, [*settings, f"rl.eval.num_prompts={NUM_PROMPTS}"])
            for temperature in temperatures:
                found = evaluate(here, model, temperature, settings)
                key = {"layers": layers, "seed": seed, "model": model, "temperature": temperature}
                if model in ARMS and temperature == 0:
                    found["curve"] = curve(here / model, model, seed)
                rows.append({**key, "commit": commit(), **found})
                write_rows(args.output, rows=rows)
        print(table(rows), flush=True)
        if args.output == RESULTS:
            IMAGE.write_text(chart(rows))


if __name__ == "__main__":
    main()
