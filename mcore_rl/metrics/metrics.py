"""Metrics as values: one number or tensor with its count, and how several of them are reduced to a single value."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_rl.metrics.metric_table import EXP_MEAN, MAX, MEAN, MIN, SUM, Reduce, Reported, row_of


@dataclass(frozen=True, slots=True)
class Metric:
    """One value of a metric with its count: for a mean, `value` is the sum over `count` things.

    A tensor stays on its device, without its graph, until it is written.
    """

    name: str
    value: float | Tensor
    count: float | Tensor = 1.0

    def __post_init__(self) -> None:
        row_of(self.name)
        for field in ("value", "count"):
            if isinstance(number := getattr(self, field), Tensor):
                object.__setattr__(self, field, number.detach())

    @property
    def reduce(self) -> Reduce:
        """Reduction of the metric in METRICS."""
        return row_of(self.name).reduce


def reduced(metrics: Iterable[Metric]) -> dict[str, Reported]:
    """Reduce all values of each name to one number, nested lists for a matrix; return name -> value, sorted by name."""
    by_name: dict[str, list[Metric]] = {}
    for metric in metrics:
        by_name.setdefault(metric.name, []).append(metric)
    return {name: _as_reported(_reduce(by_name[name])) for name in sorted(by_name)}


def _reduce(metrics: list[Metric]) -> Tensor:
    reduce = metrics[0].reduce
    values = torch.stack([torch.as_tensor(m.value, dtype=torch.float64, device="cpu") for m in metrics])
    if reduce is SUM:
        return values.sum(0)
    if reduce in (MEAN, EXP_MEAN):
        mean = values.sum(0) / sum(float(m.count) for m in metrics)
        return mean.exp() if reduce is EXP_MEAN else mean
    if reduce in (MAX, MIN):
        return values.amax(0) if reduce is MAX else values.amin(0)
    return values[-1]


def _as_reported(value: Tensor) -> Reported:
    if value.dim():
        return [_as_reported(row) for row in value]
    number = float(value)
    # Without ".0" a matrix of token counts is half as long on disk.
    return int(number) if math.isfinite(number) and number == int(number) and abs(number) < 2**53 else number
