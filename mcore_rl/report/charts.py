"""Charts of the page as plain records, with the numbers of metrics.jsonl."""

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from mcore_rl.metrics.metric_table import row_of
from mcore_rl.metrics.verdict import wilson
from mcore_rl.report.figures import LAYER_MAPS, Band, Figure, Line
from mcore_rl.report.runs import RunRecord, Series
from mcore_rl.report.summary import ACCURACY, NUM_PROMPTS, by_conditions, own_conditions

Chart: TypeAlias = dict[str, Any]
"""Record with kind (lines, experts, layers, stack or bars), title, note, and the entries that page/*.js reads for
that kind.
"""

MAX_POINTS = 400
"""Points of a line; beyond them each is the mean of neighbouring steps, because a screen cannot show more."""
MAX_FRAMES, MAX_CELLS = 40, 120_000
"""Tables of the experts' load of a run, and numbers in all of them together."""
MAX_COLUMNS = 160
DIGITS = 6
BANDS = {
    "spread": " Band: plus and minus the standard deviation within a group.",
    "interval": " Band: interval of 95 % over the prompts.",
    "extent": " Line: mean of neighbouring steps; band: from their smallest value to their largest.",
}
"""Kinds of bands around a line, each with a sentence for the reader."""


def line_charts(
    figures: Sequence[Figure | Band], runs: Sequence[RunRecord], run_indices: Sequence[int]
) -> Iterator[Chart]:
    """Yield the charts of `figures` with numbers; accuracies share one only under the same conditions."""
    indexed = list(zip(run_indices, runs, strict=True))
    for figure in figures:
        if not (isinstance(figure, Figure) and figure.lines[0].metric == ACCURACY):
            yield from _line_chart(figure, indexed)
            continue
        conditions = {run_index: own_conditions(run) for run_index, run in indexed}
        for words in dict.fromkeys(conditions.values()):
            alike = [(run_index, run) for run_index, run in indexed if conditions[run_index] == words]
            for chart in _line_chart(figure, alike):
                yield chart | {"note": f"{chart['note']} {words}."}


def _line_chart(figure: Figure | Band, indexed: Sequence[tuple[int, RunRecord]]) -> Iterator[Chart]:
    series: list[Chart] = []
    for run_index, run in indexed:
        series += (
            _band_series(figure, run, run_index) if isinstance(figure, Band) else _line_series(figure, run, run_index)
        )
    if not series or (isinstance(figure, Figure) and not _is_worth_it(figure, series)):
        return
    first = figure.low if isinstance(figure, Band) else series[0]["metric"]
    row = row_of(first)
    bands = {line["band"] for line in series if "band" in line}
    yield {
        "kind": "lines",
        "title": figure.title,
        "note": (figure.note or row.text) + "".join(text for band, text in BANDS.items() if band in bands),
        "unit": "1" if row.unit == "fraction" else row.unit,
        "percent": row.unit == "fraction",
        "zero": isinstance(figure, Figure) and figure.zero,
        "smooth": isinstance(figure, Figure) and figure.smooth,
        "series": series,
    }


def _is_worth_it(figure: Figure, series: Sequence[Chart]) -> bool:
    """Return whether a figure shows more than zeros, or than the only part of a reward, which equals the reward."""
    if figure.lines[0].metric == "reward/part/*":
        return len({line["metric"] for line in series}) > 1
    return not figure.if_any or any(value for line in series for value in line["y"])


def _line_series(figure: Figure, run: RunRecord, run_index: int) -> Iterator[Chart]:
    found = [(line, _fitting(line, run)) for line in figure.lines]
    if figure.needs_shares:
        with_numbers = {line.share for line, names in found for name, _ in names if len(run.series(name))}
        if with_numbers != {False, True}:
            return
    for line, names in found:
        for name, label in names:
            series = run.series(name)
            if not len(series):
                continue
            bins = binned(len(series))
            one = _series(series, bins, run_index, name) | {"label": label, "style": line.style}
            if line.share:
                one["share"] = True
            one["y"] = [rounded(mean) for mean in means(series.values, bins)]
            one["last"] = rounded(series.values[-1])
            if around := _around(line, series, run, bins):
                one["band"], one["low"], one["high"] = around
            yield one


def _band_series(band: Band, run: RunRecord, run_index: int) -> Iterator[Chart]:
    low, high = run.series(band.low), run.series(band.high)
    if len(low) and low.steps == high.steps:
        bins = binned(len(low))
        yield _series(low, bins, run_index, band.low) | {
            "label": "",
            "style": "solid",
            "y": [],
            "low": [rounded(min(low.values[at] for at in steps)) for steps in bins],
            "high": [rounded(max(high.values[at] for at in steps)) for steps in bins],
        }


def _around(
    line: Line, series: Series, run: RunRecord, bins: Sequence[range]
) -> tuple[str, list[float], list[float]] | None:
    """Return the kind of the band around a line, a key of BANDS, with its lower and its upper edge."""
    if line.spread and (spread := run.series(line.spread)).steps == series.steps:
        pairs = list(zip(means(series.values, bins), means(spread.values, bins), strict=True))
        return (
            "spread",
            [rounded(mean - around) for mean, around in pairs],
            [rounded(mean + around) for mean, around in pairs],
        )
    if line.metric == ACCURACY and (counts := run.series(NUM_PROMPTS)).steps == series.steps:
        intervals = [
            wilson(mean, max(1, round(count)))
            for mean, count in zip(means(series.values, bins), means(counts.values, bins), strict=True)
        ]
        return "interval", [rounded(low) for low, _ in intervals], [rounded(high) for _, high in intervals]
    if len(bins) < len(series):
        return (
            "extent",
            [rounded(min(series.values[at] for at in steps)) for steps in bins],
            [rounded(max(series.values[at] for at in steps)) for steps in bins],
        )
    return None


def _series(series: Series, bins: Sequence[range], run_index: int, metric: str) -> Chart:
    return {
        "run": run_index,
        "metric": metric,
        "x": [rounded(mean) for mean in means(series.steps, bins)],
        "s": [rounded(mean) for mean in means(series.seconds, bins)],
        "binned": len(bins) < len(series),
    }


def _fitting(line: Line, run: RunRecord) -> list[tuple[str, str]]:
    if "*" not in line.metric:
        return [(line.metric, line.label)]
    before, after = line.metric.split("*")
    names = [name for name in run.names() if name.startswith(before) and name.endswith(after)]
    return [(name, line.label.format(name.removeprefix(before).removesuffix(after))) for name in names]


def binned(count: int) -> list[range]:
    """Return the indices of `count` values in MAX_POINTS bins of neighbours or fewer; sizes differ by at most 1."""
    num_bins = min(count, MAX_POINTS)
    return [range(at * count // num_bins, (at + 1) * count // num_bins) for at in range(num_bins)]


def means(values: Sequence[float], bins: Sequence[range]) -> list[float]:
    """Return the mean of the values of each bin."""
    return [math.fsum(values[at] for at in steps) / len(steps) for steps in bins]


def rounded(value: float) -> float:
    """Round to six digits; a whole number becomes an int."""
    short = float(f"{value:.{DIGITS}g}")
    return int(short) if short == int(short) and abs(short) < 1e15 else short


def expert_maps(run: RunRecord, run_index: int) -> Iterator[Chart]:
    """Yield the charts of tokens by layer and expert over time, in the tables of the records."""
    for name, title in (("moe/expert_load", "Load of the experts"), ("mtp/expert_load", "Load of the MTP experts")):
        tables = [(int(record["step"]), record[name]) for record in run.records if name in record]
        if not tables:
            continue
        cells = sum(len(row) for row in tables[-1][1])
        most = max(2, min(MAX_FRAMES, MAX_CELLS // max(1, cells)))
        frames = [tables[at] for at in evenly(len(tables), most)]
        yield {
            "kind": "experts",
            "title": title,
            "note": "Tokens of an expert over the mean of its layer; a table counts the steps since the table before.",
            "run": run_index,
            "most": max(2.0, *(over_mean(row) for _, table in frames for row in table)),
            "steps": [step for step, _ in frames],
            "tables": [table for _, table in frames],
        }


def layer_maps(run: RunRecord, run_index: int) -> Iterator[Chart]:
    """Yield maps of layer x step for the metrics of layers."""
    for pattern, (title, note) in LAYER_MAPS.items():
        before, after = pattern.split("NN")
        found = [
            (int(match[1]), run.series(name))
            for name in run.names()
            if (match := re.fullmatch(f"{re.escape(before)}(\\d+){re.escape(after)}", name))
        ]
        found = [(layer, series) for layer, series in found if len(series)]
        if not found:
            continue
        columns = evenly(len(found[0][1]), MAX_COLUMNS)
        yield {
            "kind": "layers",
            "title": title,
            "note": note,
            "run": run_index,
            "percent": pattern.endswith("fraction"),
            "least": 1 if pattern.endswith("over_mean") else 0,
            "most": max(max(series.values) for _, series in found),
            "layers": [layer for layer, _ in found],
            "steps": [found[0][1].steps[at] for at in columns],
            "values": [[rounded(series.values[at]) for at in columns if at < len(series)] for _, series in found],
        }


def over_mean(row: Sequence[float]) -> float:
    """Return tokens of the busiest expert over the mean of its layer; 0 for a dense layer."""
    total = sum(row)
    return max(row) * len(row) / total if total else 0.0


def on_one_scale(maps: Sequence[Chart]) -> list[Chart]:
    """Order maps by title, and give maps of one title the same range of colours."""
    titles = list(dict.fromkeys(chart["title"] for chart in maps))
    together = [chart for title in titles for chart in maps if chart["title"] == title]
    return [
        chart | {"most": max(other["most"] for other in maps if other["title"] == chart["title"])} for chart in together
    ]


def evenly(count: int, most: int) -> list[int]:
    """Return at most `most` of `count` indices, evenly spaced and including both ends."""
    if count <= most:
        return list(range(count))
    return sorted({round(at * (count - 1) / (most - 1)) for at in range(most)})


PHASES = {
    "rollout": "rollout",
    "reward": "reward",
    "old_logprobs": "old logprobs",
    "routes": "replay",
    "reference": "reference",
    "data": "waiting for data",
    "forward_backward": "forward and backward",
    "optimizer": "optimizer",
    "eval": "evaluation",
    "checkpoint": "checkpoint",
}
"""Phase of time/<phase>_s, in the order of a step -> its label."""
OTHER = "other"
ONCE = ("eval", "checkpoint")
"""Phases that lie between the steps."""


def phase_chart(runs: Sequence[RunRecord], run_indices: Sequence[int]) -> Chart | None:
    """Return the chart of mean seconds per step (per rollout batch, in RL) by phase; untimed work is "other"."""
    bars = [
        {"run": run_index, "parts": parts}
        for run_index, run in zip(run_indices, runs, strict=True)
        if (parts := phase_seconds(run))
    ]
    if not bars:
        return None
    unit = "rollout batch" if runs[0].stage == "rl" else "step"
    return {
        "kind": "stack",
        "title": f"Time of a {unit}, by phase",
        "note": f"Mean seconds per {unit}; evaluations and saves are spread over all of them.",
        "phases": [*PHASES.values(), OTHER],
        "bars": bars,
    }


def phase_seconds(run: RunRecord) -> list[tuple[str, float]]:
    """Return labels and mean seconds of the phases, in the order of a step."""
    is_rl = run.stage == "rl"
    whole = run.series("rl/step_s" if is_rl else "train/step_s")
    units = run.series("rl/rollouts").values[-1:] if is_rl else [run.last_step]
    if not len(whole) or not units or not units[0]:
        return []
    parts: list[tuple[str, float]] = []
    inside = 0.0
    for phase, label in PHASES.items():
        series = run.series(f"time/{phase}_s")
        if not len(series):
            continue
        mean_s = math.fsum(series.values) / (units[0] if phase in ONCE else len(series))
        inside += 0.0 if phase in ONCE else mean_s
        parts.append((label, rounded(mean_s)))
    other_s = math.fsum(whole.values) / len(whole) - inside
    return [*parts, (OTHER, rounded(other_s))] if other_s > 0 else parts


def accuracy_charts(runs: Sequence[RunRecord]) -> Iterator[Chart]:
    """Yield a chart of accuracy on held-out prompts, one bar per run, for each of the conditions of evaluation."""
    for conditions, found in by_conditions(runs).items():
        bars = [
            {
                "run": run_index,
                "value": rounded(one.value),
                "before": None if one.before is None else rounded(one.before),
                "interval": None if one.interval is None else [rounded(end) for end in one.interval],
                "count": one.num_prompts,
            }
            for run_index, one in found.items()
        ]
        note = f"{conditions}. The thin line is the interval of 95 % (Wilson) over the n prompts."
        if any(bar["before"] is not None for bar in bars):
            note += " A mark shows the run's start."
        yield {"kind": "bars", "title": "Accuracy on held-out prompts, by run", "note": note, "bars": bars}
