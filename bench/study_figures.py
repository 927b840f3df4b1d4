"""Draws the figures of a study from its raw rows, the means of all arms over the seeds with bands of 95 % intervals:

python -m bench.study_figures bench/results/study.json docs/images/study.svg
"""

import argparse
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from mcore_rl.cli.study import StudyRow, StudyRun, interval, rows_of

COLOURS = ("#4269d0", "#efb118", "#ff725c", "#3ca951", "#a463f2", "#6cc5b0", "#9c6b4e", "#97bbf5")
DASHES = ("", "6 3", "2 2")
"""Strokes for the first eight arms, the next eight, and further arms."""
WIDTH, HEIGHT, LEFT, TOP, GAP = 380, 200, 64, 34, 56
"""Sizes in pixels of a figure's area and margins."""
PER_ROW = 2
Points = dict[int, float]
"""Position on the horizontal axis -> a run's value."""


def of_rollouts(*names: str) -> Callable[[StudyRun], Points]:
    """Return a function for a figure's values: the sum of these metrics for each rollout batch that has all of them."""

    def points(run: StudyRun) -> Points:
        series = [run.series[name] for name in names if name in run.series]
        if len(series) < len(names):
            return {}
        batches = enumerate(zip(*series, strict=True), start=1)
        return {
            index: math.fsum(value for value in values if value is not None)
            for index, values in batches
            if None not in values
        }

    return points


def of_layers(metric: str) -> Callable[[StudyRun], Points]:
    """Return a function for a figure's values: the mean of a metric in LAYER_SERIES for each layer."""
    return lambda run: {int(layer): value for layer, value in run.layers.get(metric, {}).items()}


@dataclass(frozen=True, slots=True)
class StudyFigure:
    """A figure with the lines of all arms."""

    title: str
    points: Callable[[StudyRun], Points]
    axis: str = "rollout batch"


FIGURES = (
    StudyFigure("Reward", of_rollouts("reward/mean")),
    StudyFigure("Routes changed by an update", of_rollouts("routes/changed_fraction")),
    StudyFigure("KL(old policy || policy), nats a token", of_rollouts("policy/kl_old_nats")),
    StudyFigure("The same after a rollout batch, live routes", of_rollouts("policy/kl_old_live_routes_nats")),
    StudyFigure("... and the same routes", of_rollouts("policy/kl_old_same_routes_nats")),
    StudyFigure("Tokens clipped", of_rollouts("policy/clip_ratio_low", "policy/clip_ratio_high")),
    StudyFigure("Entropy, nats", of_rollouts("policy/entropy_nats")),
    StudyFigure("Routes changed, by layer", of_layers("routes/layer_NN/changed_fraction"), axis="layer"),
    StudyFigure(
        "KL after a rollout batch that is due to routing, by layer",
        of_layers("policy/layer_NN/kl_old_routing_nats"),
        axis="layer",
    ),
)


@dataclass(frozen=True, slots=True)
class Curve:
    """An arm's line: positions, means over the seeds, and half widths of 95 % intervals (None with a single seed)."""

    arm: int
    xs: list[int]
    means: list[float]
    halves: list[float | None]


def curve_of(arm: int, row: StudyRow, points: Callable[[StudyRun], Points]) -> Curve:
    """Return an arm's line at the positions that all of its runs have."""
    runs = [found for run in row.runs if (found := points(run))]
    xs = sorted(set.intersection(*(set(found) for found in runs))) if runs else []
    around = [interval([found[x] for found in runs]) for x in xs]
    return Curve(arm, xs, [mean for mean, _ in around], [half for _, half in around])


def as_svg(rows: Sequence[StudyRow], figures: Sequence[StudyFigure] = FIGURES) -> str:
    """Return the picture of all arms with a finished run; figures without numbers are left out."""
    shown = [
        (figure, curves)
        for figure in figures
        if (curves := [curve for arm, row in enumerate(rows) if (curve := curve_of(arm, row, figure.points)).xs])
    ]
    cell_width, cell_height = LEFT + WIDTH + 24, TOP + HEIGHT + GAP
    num_rows = -(-len(shown) // PER_ROW)
    legend_top = num_rows * cell_height + 16
    height = legend_top + 20 * len(rows) + 30
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{PER_ROW * cell_width}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for index, (figure, curves) in enumerate(shown):
        down, across = divmod(index, PER_ROW)
        lines.append(f'<g transform="translate({across * cell_width + LEFT},{down * cell_height + TOP})">')
        lines += [*_figure(figure, curves), "</g>"]
    for arm, row in enumerate(rows):
        y = legend_top + 20 * arm
        lines.append(f'<line x1="{LEFT}" x2="{LEFT + 40}" y1="{y - 4}" y2="{y - 4}" {_stroke(arm)}/>')
        runs = f"{len(row.runs)} seed{'s' * (len(row.runs) > 1)}" if row.runs else "no run is done"
        lines.append(f'<text x="{LEFT + 48}" y="{y}">{escape(row.arm)}: {runs}</text>')
    note = "Lines: means over seeds; bands: 95 % intervals (Student's t), where there are several seeds."
    lines.append(f'<text x="{LEFT}" y="{height - 12}" fill="#555">{note}</text>')
    return "\n".join([*lines, "</svg>\n"])


def _figure(figure: StudyFigure, curves: Sequence[Curve]) -> list[str]:
    first, last = min(curve.xs[0] for curve in curves), max(curve.xs[-1] for curve in curves)
    # With two seeds bands may be far wider than the lines, so the lines decide the axis.
    most = max(max(curve.means) for curve in curves) or 1.0
    least = min(0.0, *(min(curve.means) for curve in curves))

    def x_of(x: float) -> str:
        return f"{(x - first) / max(1, last - first) * WIDTH:.1f}"

    def y_of(y: float) -> str:
        share = (min(max(y, least), most) - least) / (most - least or 1.0)  # a flat line may be below 0
        return f"{(1 - share) * HEIGHT:.1f}"

    lines = [f'<text x="0" y="-12" font-weight="bold">{escape(figure.title)}</text>']
    for tick in range(5):
        value = least + tick / 4 * (most - least)
        lines.append(f'<line x1="0" x2="{WIDTH}" y1="{y_of(value)}" y2="{y_of(value)}" stroke="#ddd"/>')
        lines.append(f'<text x="-6" y="{float(y_of(value)) + 4:.1f}" text-anchor="end">{value:.2g}</text>')
    lines += [
        f'<text x="{x_of(value)}" y="{HEIGHT + 16}" text-anchor="middle">{value}</text>'
        for value in sorted({round(first + tick / 4 * (last - first)) for tick in range(5)})
    ]
    lines.append(f'<text x="{WIDTH / 2}" y="{HEIGHT + 32}" text-anchor="middle">{figure.axis}</text>')
    for curve in curves:
        banded = [
            (x, mean, half)
            for x, mean, half in zip(curve.xs, curve.means, curve.halves, strict=True)
            if half is not None
        ]
        if banded:
            above = [f"{x_of(x)},{y_of(mean + half)}" for x, mean, half in banded]
            below = [f"{x_of(x)},{y_of(mean - half)}" for x, mean, half in reversed(banded)]
            colour = COLOURS[curve.arm % len(COLOURS)]
            lines.append(f'<polygon points="{" ".join(above + below)}" fill="{colour}" opacity="0.15"/>')
    for curve in curves:
        along = [f"{x_of(x)},{y_of(mean)}" for x, mean in zip(curve.xs, curve.means, strict=True)]
        lines.append(f'<polyline points="{" ".join(along)}" fill="none" {_stroke(curve.arm)}/>')
    return lines


def _stroke(arm: int) -> str:
    dash = DASHES[min(arm // len(COLOURS), len(DASHES) - 1)]
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return f'stroke="{COLOURS[arm % len(COLOURS)]}" stroke-width="1.8"{dashed}'


def draw(rows_file: Path, picture: Path) -> None:
    """Write the picture of a study.json."""
    runs = [StudyRun(**run) for run in json.loads(rows_file.read_text(encoding="utf-8"))["runs"]]
    picture.write_text(as_svg(rows_of(runs, collapse_below=0.0)), encoding="utf-8")


def main() -> None:
    """Draw the picture of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("rows", type=Path, help="study.json")
    parser.add_argument("picture", type=Path, help="the .svg to write")
    args = parser.parse_args()
    draw(args.rows, args.picture)


if __name__ == "__main__":
    main()
