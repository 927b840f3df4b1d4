"""The figures of a page, by figures.toml: which metrics they draw, and in which order."""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Style = Literal["solid", "dash", "dots"]


@dataclass(frozen=True, slots=True)
class Line:
    """A metric in a figure; a name with `*` stands for all metrics that match, each a line of its own."""

    metric: str
    label: str = ""
    style: Style = "solid"
    spread: str = ""
    """Metric that is added and subtracted, as a band around the line."""
    share: bool = False
    """Whether it is a share of 1 that is drawn on an axis of its own, at the right."""


@dataclass(frozen=True, slots=True)
class Figure:
    """Lines over steps, for all runs of a stage; the figure is left out when no run has them."""

    title: str
    lines: tuple[Line, ...]
    zero: bool = False
    """Whether the axis reaches down to 0."""
    if_any: bool = False
    """Whether the figure is also left out when all values are 0."""
    smooth: bool = True
    """Whether the reader's choice of smoothing applies; false where every value matters or none is noisy."""
    needs_shares: bool = False
    """Whether a run without both a share and another line has no part in the figure."""
    note: str = ""
    """Text below the title; empty: the text of the first metric in METRICS."""


@dataclass(frozen=True, slots=True)
class Band:
    """A figure of the area between two metrics."""

    title: str
    low: str
    high: str
    note: str


def _figure(row: dict[str, Any]) -> Figure | Band:
    if "band" in row:
        low, high = row["band"]
        return Band(row["title"], low, high, row["note"])
    lines = tuple(Line(**line) if isinstance(line, dict) else Line(*line) for line in row["lines"])
    return Figure(**row | {"lines": lines})


_TABLE: dict[str, Any] = tomllib.loads(Path(__file__).with_name("figures.toml").read_text(encoding="utf-8"))
LEARNING, EXPERTS, SPEED = (tuple(map(_figure, _TABLE[page])) for page in ("learning", "experts", "speed"))
LAYER_MAPS: dict[str, tuple[str, str]] = {name: (title, note) for name, (title, note) in _TABLE["layer_maps"].items()}
"""Metrics of layers that are drawn as a map of layer x step: name -> title and note."""
