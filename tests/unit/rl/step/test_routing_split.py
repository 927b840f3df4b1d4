"""The split of a mismatch into routing, staleness and the rest, with numbers by hand."""

from math import log

import pytest
import torch

from mcore_rl.metrics.metrics import Metric, reduced
from mcore_rl.rl.step.routing_split import (
    RatioSums,
    RoutingSplit,
    layer_groups,
    policy_split_metrics,
    ratio_sums,
    rollout_split_metrics,
)

NONE = RatioSums(0.0, 0.0, 0.0, 0.0)


def sums(*ratios: float) -> RatioSums:
    """Sums over tokens with these ratios of after to before: k3 is r - 1 - log r."""
    return RatioSums(
        sum(ratio - 1 - log(ratio) for ratio in ratios),
        sum(ratio - 1 for ratio in ratios),
        sum((ratio - 1) ** 2 for ratio in ratios),
        len(ratios),
    )


def found(metrics: list[Metric]) -> dict[str, float]:
    assert len({metric.name for metric in metrics}) == len(metrics)
    return {name: float(value) for name, value in reduced(metrics).items()}


def test_sums_are_over_the_tokens_of_the_mask_and_of_the_ratio_after_to_before() -> None:
    before_T = torch.tensor([0.5, 0.2, 0.4, 0.9]).log()
    after_T = torch.tensor([0.25, 0.4, 0.4, 0.1]).log()
    got = ratio_sums(before_T, after_T, torch.tensor([True, True, True, False])).tolist()
    # Ratios 1/2, 2 and 1: k3 log 2 - 1/2, 1 - log 2 and 0.
    assert got == pytest.approx([0.5, 0.5, 1.25, 3.0], rel=1e-5)
    one = RatioSums(*got)
    assert one.mean_kl == pytest.approx(0.5 / 3, rel=1e-5)
    assert one.variance == pytest.approx(1.25 / 3 - (0.5 / 3) ** 2, rel=1e-5)


def test_the_parts_of_the_layers_add_up_to_live_less_same_routes() -> None:
    same, middle, live = sums(1.1, 1.2), sums(1.3, 0.9), sums(2.0, 0.5)
    split = RoutingSplit(
        {"all": same, "current": same, "stale": NONE},
        {"all": live, "current": live, "stale": NONE},
        [
            ((1, 2), {"all": middle, "current": middle, "stale": NONE}),
            ((3,), {"all": live, "current": live, "stale": NONE}),
        ],
    )
    got = found(policy_split_metrics(split))
    assert got["policy/kl_old_same_routes_nats"] == pytest.approx((0.3 - log(1.1 * 1.2)) / 2)
    assert got["policy/kl_old_live_routes_nats"] == pytest.approx(0.25, rel=1e-6)
    # Ratios 2 and 1/2 have the mean 5/4 and the variance 9/16.
    assert got["policy/ratio_variance_live_routes"] == pytest.approx(9 / 16)
    parts = [got[f"policy/layer_0{layer}/kl_old_routing_nats"] for layer in (1, 2, 3)]
    assert parts[0] == parts[1] == pytest.approx((middle.mean_kl - same.mean_kl) / 2)
    assert parts[2] == pytest.approx(0.25 - (0.2 - log(1.3 * 0.9)) / 2)
    variances = [got[f"policy/layer_0{layer}/ratio_variance_routing"] for layer in (1, 2, 3)]
    assert sum(variances) == pytest.approx(9 / 16 - 0.05**2)
    of_rollout = found(rollout_split_metrics(split, is_ahead=False))
    assert "rollout/mismatch_kl_staleness_nats" not in of_rollout
    for layer, part in zip((1, 2, 3), parts, strict=True):
        assert of_rollout[f"rollout/layer_0{layer}/mismatch_kl_routing_nats"] == pytest.approx(part)


def test_staleness_is_what_the_tokens_of_older_weights_add_and_routing_is_of_the_others() -> None:
    split = RoutingSplit(
        {"all": sums(1.1, 3.0), "current": sums(1.1), "stale": sums(3.0)},
        {"all": sums(1.5, 4.0), "current": sums(1.5), "stale": sums(4.0)},
        [],
    )
    got = found(rollout_split_metrics(split, is_ahead=True))
    rest, routing = got["rollout/mismatch_kl_same_routes_nats"], 0.5 - log(1.5) - (0.1 - log(1.1))
    assert rest == pytest.approx(0.1 - log(1.1))
    assert got["rollout/mismatch_kl_live_routes_nats"] - rest == pytest.approx(routing)
    staleness = got["rollout/mismatch_kl_staleness_nats"]
    assert staleness == pytest.approx((3 - log(4.0) - (0.5 - log(1.5))) / 2)
    assert rest + routing + staleness == pytest.approx(sums(1.5, 4.0).mean_kl), "the three are all of it"
    assert got["rollout/mismatch_kl_same_routes_stale_nats"] == pytest.approx(2 - log(3.0))
    assert got["rollout/mismatch_kl_live_routes_stale_nats"] == pytest.approx(3 - log(4.0))
    assert got["rollout/ratio_variance_live_routes"] == 0.0, "of one token"


def test_where_no_token_is_of_present_weights_only_the_split_of_the_stale_ones_is_known() -> None:
    of_age = {"all": sums(2.0), "current": NONE, "stale": sums(2.0)}
    got = found(rollout_split_metrics(RoutingSplit(of_age, of_age, [((0,), of_age)]), is_ahead=True))
    assert sorted(got) == ["rollout/mismatch_kl_live_routes_stale_nats", "rollout/mismatch_kl_same_routes_stale_nats"]


def test_layers_are_grouped_in_order_and_evenly() -> None:
    assert layer_groups([1, 2, 3, 5, 7], 2) == [(1, 2), (3, 5, 7)]
    assert layer_groups([0, 1, 2], 24) == [(0,), (1,), (2,)]
    assert layer_groups([4], 1) == [(4,)]
