"""What routing replay refuses, and what it takes."""

import pytest

from mcore_rl.checks.model import replay_violations
from mcore_rl.config.model import ModelConfig, MoEConfig
from mcore_rl.config.replay import ReplayConfig

MOE = ModelConfig(moe=MoEConfig(num_experts=8, ffn_hidden_size=32))
DENSE = ModelConfig(family="qwen3")
DROPPING = MOE.model_copy(update={"moe": MOE.moe.model_copy(update={"capacity_factor": 1.0})})


@pytest.mark.parametrize("kind", ["none", "r2", "r3"])
def test_a_mixture_of_experts_can_be_replayed(kind) -> None:  # type: ignore[no-untyped-def]
    assert list(replay_violations(ReplayConfig(kind=kind), MOE)) == []


def test_a_run_without_replay_needs_no_experts() -> None:
    assert list(replay_violations(ReplayConfig(), DENSE)) == []


@pytest.mark.parametrize(
    ("replay", "model", "named"),
    [
        (ReplayConfig(kind="r2"), DENSE, "no experts"),
        (ReplayConfig(kind="r3"), DROPPING, "capacity_factor"),
        (ReplayConfig(kind="r2", missing="live"), MOE, 'missing="live"'),
        (ReplayConfig(missing="live"), MOE, 'missing="live"'),
        (ReplayConfig(kind="r2", missing="refuse"), MOE, 'missing="refuse" with replay.kind="r2"'),
        (ReplayConfig(missing="refuse"), MOE, 'missing="refuse" has no effect'),
        (ReplayConfig(reference="replay"), MOE, 'reference="replay"'),
        (ReplayConfig(split_layers=4), MOE, "replay.split_interval=none: no mismatch is divided"),
        (
            ReplayConfig(kind="r3", split_interval=1, split_layers=4, missing="live"),
            MOE,
            "tokens without routes have no part by layer",
        ),
    ],
)
def test_what_cannot_be_replayed_is_refused(replay, model, named) -> None:  # type: ignore[no-untyped-def]
    (reason,) = replay_violations(replay, model)
    assert named in reason


def test_dropping_by_capacity_is_carried_by_r2() -> None:
    assert list(replay_violations(ReplayConfig(kind="r2"), DROPPING)) == []
