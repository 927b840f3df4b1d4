"""The limit on disagreement between the engine's routes and the trainer's."""

import dataclasses
from typing import Any

import pytest
import torch

from mcore_rl.config.replay import ReplayConfig
from mcore_rl.replay.accounts import RouteTotals
from mcore_rl.replay.disagreement import DisagreementLimit, StaleRoutes


def totals(*disjoint: float, compared: float = 1000.0, stale: float = 0.0) -> RouteTotals:
    layers = len(disjoint)
    current_L = [compared - stale] * layers
    none, compared_L = [0.0] * layers, [compared] * layers
    return RouteTotals(
        none,
        none,
        none,
        list(disjoint),
        compared_L,
        current_L,
        compared_L,
        torch.zeros(2, layers, 4),
        0.0,
        compared,
        0.0,
        0.0,
    )


def limit_of(setting: Any, top_k: int = 1) -> DisagreementLimit:
    return DisagreementLimit(ReplayConfig(kind="r3", max_disagreement=setting), top_k, [])


def test_auto_is_three_times_the_first_share_of_the_layer_and_at_least_one_in_a_hundred() -> None:
    limit = limit_of("auto")
    assert limit.problem(totals(20.0, 0.0)) is None
    assert limit.problem(totals(60.0, 10.0)) is None
    assert "layer 0: 6.1% of 1000 tokens (limit 6.0%). " in str(limit.problem(totals(61.0, 10.0)))
    assert "layer 1: 1.1% of 1000 tokens (limit 1.0%). " in str(limit.problem(totals(60.0, 11.0)))


def test_auto_refuses_a_first_pass_with_more_than_one_in_ten() -> None:
    assert limit_of("auto").problem(totals(100.0)) is None
    assert "layer 0: 10.1% of 1000 tokens (limit 10.0%). " in str(limit_of("auto").problem(totals(101.0)))


def test_a_first_pass_above_the_limit_sets_no_limit_for_those_that_follow() -> None:
    limit = limit_of("auto")
    assert limit.problem(totals(500.0)) and limit.problem(totals(101.0))
    assert limit.problem(totals(10.0)) is None and limit.problem(totals(31.0))


def test_a_run_that_resumes_has_the_limits_that_it_had() -> None:
    """Else a resume would let one token in ten disagree once more."""
    measured_L: list[float] = []
    config = ReplayConfig(kind="r3")
    for share in (20.0, 60.0):
        assert DisagreementLimit(config, 1, measured_L).problem(totals(share, 0.0)) is None
    assert measured_L == [0.06, 0.01]
    resumed = DisagreementLimit(config, 1, measured_L)
    assert "layer 0: 6.1% of 1000 tokens (limit 6.0%). " in str(resumed.problem(totals(61.0, 0.0)))


def test_routes_of_older_weights_are_no_part_of_the_share() -> None:
    limit = limit_of(0.5)
    assert limit.problem(totals(100.0, stale=800.0)) is None
    assert "layer 0: 50.5% of 200 tokens (limit 50.0%). " in str(limit.problem(totals(101.0, stale=800.0)))
    assert limit.problem(totals(0.0, stale=1000.0)) is None


def test_a_share_is_a_limit_of_every_pass_and_none_is_no_limit() -> None:
    assert limit_of(0.5).problem(totals(500.0)) is None and limit_of(0.5).problem(totals(501.0))
    assert limit_of(0.0).problem(totals(6.0))
    assert limit_of(None).problem(totals(1000.0)) is None


def test_five_tokens_are_no_disagreement() -> None:
    assert limit_of("auto").problem(totals(5.0, compared=5.0)) is None
    assert limit_of("auto").problem(totals(6.0, compared=6.0))


def test_a_handful_of_tokens_measures_no_limit() -> None:
    """Five disjoint tokens of five had set the limit to 300 % for the rest of the run; no token, to 1 %."""
    for few in (totals(5.0, compared=5.0), totals(99.0, compared=999.0), totals(0.0, compared=0.0)):
        measured_L: list[float] = []
        limit = DisagreementLimit(ReplayConfig(kind="r3"), 1, measured_L)
        assert limit.problem(few) is None and measured_L == []
        assert "limit 10.0%" in str(limit.problem(totals(101.0)))


def test_a_measured_limit_has_a_ceiling() -> None:
    limit = limit_of("auto")
    assert limit.problem(totals(100.0)) is None
    assert limit.problem(totals(200.0)) is None
    assert "layer 0: 20.1% of 1000 tokens (limit 20.0%). " in str(limit.problem(totals(201.0)))


def test_routes_of_another_request_in_one_completion_of_ten_are_found() -> None:
    """54 % of such a sample's choices were disjoint, and 5 % of a layer's tokens, which the first limit allows."""
    limit = limit_of("auto")
    assert limit.problem(totals(54.0)) is None
    samples = {n: (540 if n == 7 else 3, 1000) for n in range(10)}
    problems = limit.problems_of_samples(samples)
    assert [*problems] == [7]
    assert problems[7].startswith("sample 7: 54% of its 1000 choices (token, layer) have no expert in common")


def test_chance_in_a_short_sample_is_no_disagreement() -> None:
    """The limit of a fifth, four standard deviations of so many choices, and five: 8 + 4 * 2.53 + 5 of 40."""
    limit = limit_of("auto")
    assert limit.problems_of_samples({0: (23, 40), 1: (0, 0), 2: (5, 5)}) == {}
    assert [*limit.problems_of_samples({0: (24, 40)})] == [0]
    assert limit_of(0.9).problems_of_samples({0: (900, 1000)}) == {}
    assert limit_of(None).problems_of_samples({0: (1000, 1000)}) == {}


def test_with_several_experts_a_token_few_choices_are_disjoint_by_rounding() -> None:
    limit = limit_of("auto", top_k=2)
    assert limit.problem(totals(30.0)) is None
    assert "layer 0: 6.1% of 1000 tokens (limit 6.0%). " in str(limit.problem(totals(61.0)))
    assert "layer 0: 3.1% of 1000 tokens (limit 3.0%). " in str(limit_of("auto", top_k=2).problem(totals(31.0)))
    # 60 of 1,000 choices, four standard deviations, and five.
    assert limit.problems_of_samples({0: (95, 1000)}) == {}
    assert [*limit.problems_of_samples({0: (96, 1000)})] == [0]


def choices(chosen: float, missed: float, others: float = 1000.0) -> RouteTotals:
    """Two layers of four experts, the third of which in the second layer is the one in question."""
    chosen_LE, missed_LE = torch.full((2, 4), others), torch.zeros(2, 4)
    chosen_LE[1, 2], missed_LE[1, 2] = chosen, missed
    return dataclasses.replace(totals(0.0, 0.0), expert_choices_2LE=torch.stack([chosen_LE, missed_LE]))


def test_an_expert_that_the_engine_never_has_where_the_trainer_does_is_named() -> None:
    problem = str(limit_of("auto").problem(choices(1000.0, 800.0)))
    assert "others in the place of some experts" in problem and "layer 1: experts [2]. The engine" in problem
    assert limit_of(None).problem(choices(1000.0, 1000.0)) is None


@pytest.mark.parametrize(
    ("chosen", "missed", "is_wrong"),
    [(1000.0, 757.0, False), (1000.0, 758.0, True), (99.0, 99.0, False), (100.0, 99.0, True)],
)
def test_chance_and_an_experts_few_choices_are_no_exchange(chosen: float, missed: float, is_wrong: bool) -> None:
    """70 % and four standard deviations: 57.97 of 1,000 choices, 18.3 of 100."""
    others = 100.0 if chosen <= 100 else 1000.0
    assert bool(limit_of("auto").problem(choices(chosen, missed, others))) == is_wrong


def test_a_rare_expert_which_rounding_exchanges_is_none() -> None:
    assert limit_of("auto").problem(choices(190.0, 190.0, others=1000.0)) is None
    assert limit_of("auto").problem(choices(300.0, 300.0, others=1000.0))


TOP_K, LAYERS = 2, 3


def stale_routes(
    *,
    stale: tuple[int, int],
    current: tuple[int, int],
    stale_nats: float,
    current_nats: float = 1e-6,
    num_batches: int = 1,
) -> StaleRoutes:
    """Sums of batches: changed choices of a layer and tokens by age, and the mean difference of their logprobs."""
    found = StaleRoutes(TOP_K)
    changed, num_tokens = (of_stale + of_current for of_stale, of_current in zip(stale, current, strict=True))
    numbers = (changed, 0, current[0], 0, num_tokens, current[1], 0)
    sums = (stale_nats * stale[1], current_nats * current[1])
    for _ in range(num_batches):
        by_layer = ([float(number)] * LAYERS for number in numbers)
        choices_2LE = torch.zeros(2, LAYERS, 4)
        found.add_routes(RouteTotals(*by_layer, choices_2LE, 0.0, float(num_tokens), 0.0, 0.0))
        found.add_logprobs(
            {
                "count": stale[1] + current[1],
                "stale": stale[1],
                "mismatch_abs": sum(sums),
                "mismatch_abs_current": sums[1],
            }
        )
    return found


def test_older_tokens_with_their_logprobs_and_newer_weights_routes_are_a_warning_once() -> None:
    found = stale_routes(stale=(0, 10_000), current=(0, 10_000), stale_nats=0.1)
    warning = str(found.warning())
    assert "routes of 10000 tokens that older weights sampled agree" in warning
    assert "(0.00% of the choices differ, and 0.00% of those of tokens" in warning and "by 0.1 nats" in warning
    assert found.warning() is None


def test_older_tokens_with_their_own_routes_are_none() -> None:
    """The least change of the models of docs/replay.md, 0.12 of the choices for a nat, and a sixth of it."""
    for changed in (round(0.12 * 0.1 * TOP_K * 10_000), round(0.02 * 0.1 * TOP_K * 10_000)):
        found = stale_routes(stale=(changed, 10_000), current=(0, 10_000), stale_nats=0.1)
        assert found.warning() is None


def test_a_policy_that_hardly_moved_agrees_too() -> None:
    """Chance makes 4 * sqrt(2) / 10,000 of the choices: 0.028 nats would be needed to see less."""
    assert stale_routes(stale=(0, 10_000), current=(0, 10_000), stale_nats=0.028).warning() is None
    assert stale_routes(stale=(0, 10_000), current=(0, 10_000), stale_nats=0.029).warning()


def test_few_tokens_of_one_age_say_nothing_and_those_of_many_batches_do() -> None:
    few = stale_routes(stale=(0, 10_000), current=(0, 999), stale_nats=1.0)
    assert few.warning() is None
    for num_batches in (1, 2, 10):
        found = stale_routes(stale=(0, 500), current=(0, 500), stale_nats=0.2, num_batches=num_batches)
        assert bool(found.warning()) == (num_batches == 10)


def test_an_engine_that_rounds_hides_small_moves_not_large_ones() -> None:
    """2 % of the choices differ by rounding: up to 0.1 nats nothing can be said."""
    rounded = {"stale": (40_000, 1_000_000), "current": (40_000, 1_000_000), "current_nats": 0.02}
    assert stale_routes(**rounded, stale_nats=0.11).warning() is None
    assert stale_routes(**rounded, stale_nats=0.13).warning()


def test_without_older_tokens_or_with_logprobs_that_were_not_compared_nothing_is_said() -> None:
    assert stale_routes(stale=(0, 0), current=(0, 10_000), stale_nats=0.0).warning() is None
    found = StaleRoutes(TOP_K)
    found.add_logprobs({"count": 10.0})
    assert found.warning() is None
