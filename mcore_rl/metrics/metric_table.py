"""The table of all metrics, metrics.toml, which is their documentation: a name that is not in it is refused."""

import difflib
import re
import tomllib
from enum import Enum
from functools import cache
from pathlib import Path
from typing import NamedTuple, TypeAlias

Reported: TypeAlias = "float | list[Reported]"
"""Value of a metric as it is written: a number, or a list of rows for a matrix."""


class Reduce(Enum):
    """Reduction of several values of one metric, each with its count, to the value that is written."""

    SUM = "sum of the values"
    MEAN = "sum of the values / sum of the counts"
    EXP_MEAN = "e to the MEAN"
    MAX = "largest value"
    MIN = "smallest value"
    LAST = "the latest value"


SUM, MEAN, EXP_MEAN, MAX, MIN, LAST = Reduce


class MetricRow(NamedTuple):
    """Unit, reduction and meaning of a metric; 1 is a pure number, `fraction` a part of all such things, 0 to 1."""

    unit: str
    reduce: Reduce
    text: str


METRICS = {
    name: MetricRow(unit, Reduce[reduction], text)
    for name, (unit, reduction, text) in tomllib.loads(
        Path(__file__).with_name("metrics.toml").read_text(encoding="utf-8")
    ).items()
}


def row_name(name: str) -> str:
    """Return the key of METRICS for `name`, in which a layer's index is NN, a part of the reward NAME, and k is K;
    ValueError, which names the most similar row, where there is none.
    """
    key = re.sub(r"/layer_\d+/", "/layer_NN/", re.sub(r"^reward/part/.+", "reward/part/NAME", name))
    key = re.sub(r"^eval/pass_at_\d+$", "eval/pass_at_K", key)
    key = re.sub(r"^eval/(pairs|steps)/", r"\1/", key)
    if key not in METRICS:
        near = difflib.get_close_matches(key, METRICS, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise ValueError(f"no metric is called {name!r}: add a row to mcore_rl/metrics/metrics.toml.{hint}")
    return key


@cache
def row_of(name: str) -> MetricRow:
    """Return the row of METRICS for `name`."""
    return METRICS[row_name(name)]
