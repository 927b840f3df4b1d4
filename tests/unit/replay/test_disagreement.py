"""The limit on disagreement between the engine's routes and the trainer's."""

from typing import Any

from mcore_rl.config.replay import ReplayConfig
from mcore_rl.replay.accounts import RouteTotals
from mcore_rl.replay.disagreement import DisagreementLimit


def totals(*disjoint: float, compared: float = 1000.0, stale: float = 0.0) -> RouteTotals:
    layers = len(disjoint)
    current_L = [compared - stale] * layers
    none, compared_L = [0.0] * layers, [compared] * layers
    return RouteTotals(none, none, list(disjoint), compared_L, current_L, compared_L, 0.0, compared, 0.0, 0.0)


def limit_of(setting: Any) -> DisagreementLimit:
    return DisagreementLimit(ReplayConfig(kind="r3", max_disagreement=setting), [])


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
        assert DisagreementLimit(config, measured_L).problem(totals(share, 0.0)) is None
    assert measured_L == [0.06, 0.01]
    resumed = DisagreementLimit(config, measured_L)
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
        limit = DisagreementLimit(ReplayConfig(kind="r3"), measured_L)
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
    (problem,) = limit.problems_of_samples(samples)
    assert problem.startswith("sample 7: 54% of its 1000 choices (token, layer) have no expert in common")


def test_chance_in_a_short_sample_is_no_disagreement() -> None:
    """The limit of a fifth, four standard deviations of so many choices, and five: 8 + 4 * 2.53 + 5 of 40."""
    limit = limit_of("auto")
    assert [*limit.problems_of_samples({0: (23, 40), 1: (0, 0), 2: (5, 5)})] == []
    assert len([*limit.problems_of_samples({0: (24, 40)})]) == 1
    assert [*limit_of(0.9).problems_of_samples({0: (900, 1000)})] == []
    assert [*limit_of(None).problems_of_samples({0: (1000, 1000)})] == []
