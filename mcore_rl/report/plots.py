"""One picture of a run, from its metrics.jsonl."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FormatStrFormatter
from numpy.typing import NDArray

from mcore_rl.errors import DataError
from mcore_rl.obs.jsonl import FILE_NAME, read_records

Curve = tuple[NDArray[np.float64], NDArray[np.float64]]
"""Steps and values."""

BLUE, ORANGE, GREY, GREEN = "#1f5fa8", "#d9731a", "#8a8f98", "#2f8f5b"
SMOOTHING_FRACTION = 0.02
MAX_CELLS_WITH_NUMBERS = 160


def plot_run(run_dir: Path) -> Path:
    """`<run_dir>/metrics.png`: loss, gradient norm and learning rate and, of an MoE, the experts' load."""
    records = list(read_records(run_dir / FILE_NAME))
    if not len(curve(records, "train/loss_nats")[0]):
        raise DataError(f"{run_dir / FILE_NAME} holds no loss yet: draw it after the first finite step")
    loads = last_loads(records)
    figure = Figure(figsize=(13, 8.4 if loads else 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    rows = figure.subfigures(2 if loads else 1, 1, squeeze=False)[:, 0]
    left, right = rows[0].subplots(1, 2)
    _draw_loss(left, records)
    _draw_optimizer(right, records)
    if loads:
        left, right = rows[1].subplots(1, 2, width_ratios=(4, 5))
        _draw_load_over_time(left, records)
        _draw_heat_map(right, *loads)
    figure.suptitle(run_dir.resolve().name, fontsize=13)
    path = run_dir / "metrics.png"
    figure.savefig(path, dpi=110)
    return path


def curve(records: Sequence[dict[str, object]], name: str) -> Curve:
    """Steps and values of one scalar, in order, where it is finite."""
    points = [(float(str(r["step"])), float(str(r[name]))) for r in records if name in r]
    table = np.array(points, dtype=np.float64).reshape(-1, 2)
    table = table[np.isfinite(table[:, 1])]
    return table[:, 0], table[:, 1]


def _draw_loss(axes: Axes, records: Sequence[dict[str, object]]) -> None:
    steps, loss = curve(records, "train/loss_nats")
    axes.plot(steps, loss, color=BLUE, alpha=0.3, linewidth=0.8)
    axes.plot(steps, _smooth(loss), color=BLUE, label=f"train {_smooth(loss)[-1]:.3f}")
    for name, label, marker in (("eval/loss_nats", "held out", "o"), ("test/loss_nats", "test", "*")):
        eval_steps, eval_loss = curve(records, name)
        if len(eval_steps):
            last = f"{label} {eval_loss[-1]:.3f}"
            axes.plot(eval_steps, eval_loss, color=ORANGE, marker=marker, markersize=5, label=last)
    _, unigram = curve(records, "data/unigram_nats")
    if len(unigram):
        axes.axhline(unigram[-1], color=GREY, linestyle="--", label=f"unigram entropy {unigram[-1]:.3f}")
    _finish(axes, "loss", "nats / token")
    axes.legend(frameon=False)


def _draw_optimizer(axes: Axes, records: Sequence[dict[str, object]]) -> None:
    steps, norm = curve(records, "train/grad_norm")
    axes.plot(steps, norm, color=GREEN, alpha=0.3, linewidth=0.8)
    axes.plot(steps, _smooth(norm), color=GREEN)
    _finish(axes, "gradient norm and learning rate", "gradient norm")
    axes.yaxis.label.set_color(GREEN)
    if len(norm) and (norm > 0).all():
        axes.set_yscale("log", subs=(2, 3, 5, 7))
        axes.yaxis.set_major_formatter(FormatStrFormatter("%g"))
        axes.yaxis.set_minor_formatter(FormatStrFormatter("%g"))
    right = axes.twinx()
    right.plot(*curve(records, "train/lr"), color=GREY)
    right.set_ylabel("learning rate", color=GREY)
    right.set_ylim(bottom=0)
    right.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    right.spines["top"].set_visible(False)


def _draw_load_over_time(axes: Axes, records: Sequence[dict[str, object]]) -> None:
    bands = []
    for record in records:
        layers = [
            float(str(value))
            for name, value in record.items()
            if name.startswith("moe/layer_") and name.endswith("/load_max_over_mean")
        ]
        if layers:
            bands.append((float(str(record["step"])), min(layers), max(layers)))
    if bands:
        band_steps, least, most = np.array(bands).T
        axes.fill_between(band_steps, least, most, color=BLUE, alpha=0.2, linewidth=0, label="all layers")
    steps, load = curve(records, "moe/load_max_over_mean")
    axes.plot(steps, _smooth(load), color=BLUE, label="mean of the layers")
    axes.axhline(1, color=GREY, linestyle="--", label="even")
    axes.set_ylim(bottom=0)
    _finish(axes, "load of the busiest expert", "tokens of the busiest / mean expert")
    axes.legend(frameon=False)


def _draw_heat_map(axes: Axes, steps: str, labels: list[str], load_LE: NDArray[np.float64]) -> None:
    """Load of every expert over its layer's mean: white is even, red busy, blue idle."""
    highest = max(2.0, float(np.nanmax(load_LE)))
    norm = TwoSlopeNorm(vmin=0, vcenter=1, vmax=highest)
    image = axes.imshow(np.ma.masked_invalid(load_LE), aspect="auto", cmap="RdBu_r", norm=norm)
    axes.set_facecolor("#e4e6e9")
    axes.figure.colorbar(image, ax=axes, label="tokens / mean of the layer", pad=0.02)
    if load_LE.size <= MAX_CELLS_WITH_NUMBERS:
        for (row, column), value in np.ndenumerate(load_LE):
            if np.isfinite(value):
                dark = value < 0.3 or value > 1 + 0.7 * (highest - 1)
                colour = "white" if dark else "black"
                axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=7, color=colour)
    axes.set_title(f"expert load, {steps}", loc="left")
    axes.set_xlabel("expert")
    axes.set_ylabel("layer")
    num_layers, num_experts = load_LE.shape
    axes.set_xticks(range(0, num_experts, -(-num_experts // 16)))
    every = -(-num_layers // 16)
    axes.set_yticks(range(0, num_layers, every), labels[::every])


def last_loads(
    records: Sequence[dict[str, object]],
) -> tuple[str, list[str], NDArray[np.float64]] | None:
    """Title, names of the rows, and load over mean of the last tables; nan for a dense layer."""
    tables = [record for record in records if "moe/expert_load" in record]
    if not tables:
        return None
    last = tables[-1]
    rows_LE = np.array(last["moe/expert_load"], dtype=np.float64)
    labels = [str(layer) for layer in range(len(rows_LE))]
    if "mtp/expert_load" in last:
        mtp_LE = np.array(last["mtp/expert_load"], dtype=np.float64)
        labels += [f"mtp {layer}" for layer in range(len(mtp_LE))]
        rows_LE = np.concatenate([rows_LE, mtp_LE])
    mean_L1 = rows_LE.mean(axis=1, keepdims=True)
    load_LE = np.divide(rows_LE, mean_L1, out=np.full_like(rows_LE, np.nan), where=mean_L1 > 0)
    return f"up to step {last['step']}", labels, load_LE


def _smooth(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Mean over a centred window of 2 % of the curve, narrower at its ends."""
    half = int(len(values) * SMOOTHING_FRACTION / 2)
    return np.array([values[max(0, i - half) : i + half + 1].mean() for i in range(len(values))])


def _finish(axes: Axes, title: str, y_label: str) -> None:
    axes.set_title(title, loc="left")
    axes.set_xlabel("step")
    axes.set_ylabel(y_label)
    axes.grid(alpha=0.25)
    axes.spines["top"].set_visible(False)
