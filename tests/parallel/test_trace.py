"""Tokens beside the samples are the same on every mesh, with the routes that were changed by hand."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest

from tests.parallel.rl_steps import GROUPS, SIZE
from tests.parallel.test_refused_completions import MESHES, Batch, N, honest, learn, of_steps, refusing, texts, wrong

ODD = (0, 6)
"""Samples of which one row of routes is of other experts, the last: that of the token before the last."""


@functools.cache
def traced(mesh: str, folder: Path) -> list[dict[str, Any]]:
    routes = {n: honest()[n].clone() for n in range(N)}
    for n in ODD:
        routes[n][-1] = wrong(n)[-1]
    learn(refusing(of_steps(2, MESHES[mesh])), Batch(routes, texts(), range(GROUPS)), folder / mesh)
    path = folder / mesh / "samples/step_0000000.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traced")


def test_changed_routes_and_advantages_are_those_made_by_hand(folder: Path) -> None:
    samples = traced("1", folder)
    assert len(samples) == N
    for n, sample in enumerate(samples[: 4 * SIZE]):
        changed = sample["changed_routes"]["rollout_routes"]
        assert (sample["tokens"] - 2 in changed) == (n in ODD)
        assert len(sample["pieces"]) == len(sample["log_ratios"]) == sample["tokens"]
        group = samples[n // SIZE * SIZE : n // SIZE * SIZE + SIZE]
        mean = sum(one["reward"] for one in group) / SIZE
        assert (sample["advantage"] > 0) == (sample["reward"] > mean)
    assert all("pieces" not in sample for sample in samples[4 * SIZE :])


@pytest.mark.parametrize("mesh", ["tp2-pp2", "cp2"])
def test_tokens_are_the_same_on_every_mesh(mesh: str, folder: Path) -> None:
    for one, other in zip(traced(mesh, folder), traced("1", folder), strict=True):
        assert one.get("changed_routes") == other.get("changed_routes")
        if "log_ratios" in one:
            assert one["log_ratios"] == pytest.approx(other["log_ratios"], abs=2e-4)
            assert one["advantage"] == pytest.approx(other["advantage"], rel=1e-5)
