"""Warnings where nothing is learned, on numbers."""

import math

import pytest
import torch

from mcore_rl.metrics.metrics import reduced
from mcore_rl.rl.rollouts.signal import NUM_BATCHES, LearningWarnings, Onset, signal_of, update_signal

NAN = math.nan
NOTHING = [[0.0, 0.0], [0.0, 0.0]]
SOME = [[0.0, 1.0], [0.0, 0.0]]


def signal(scores: list[list[float]], correct: list[bool | None] | None = None):
    return signal_of(torch.tensor(scores, dtype=torch.float64), correct or [])


def test_a_signal_counts_groups_and_completions() -> None:
    # 0.1 + 0.2 is not quite 0.3: rounding is no signal. A group with a single score has none either.
    scores = [[0.1 + 0.2, 0.3, NAN], [1.0, 0.0, 1.0], [NAN, NAN, 5.0]]
    found = signal(scores, [True, False, None])
    assert (found.num_groups, found.num_without_signal, found.num_scores) == (3, 2, 6)
    assert (found.num_correct, found.num_decided, found.are_equal) == (1, 2, False)
    assert found.mean_score == pytest.approx((0.3 + 0.3 + 1 + 0 + 1 + 5) / 6)
    assert signal([[0.1 + 0.2, 0.3], [0.3, NAN]]).are_equal
    assert not signal([[NAN, NAN]]).are_equal
    assert signal_of(torch.zeros(0, 0), []).num_groups == 0


def test_groups_of_an_update_are_those_with_weights_in_it() -> None:
    """An update has the first of three groups of two whole, and a completion of the second."""
    rewards_PG = torch.tensor([[1.0, 1.0], [0.0, 1.0], [2.0, 2.0]], dtype=torch.float64)
    for weights, counts in (
        ([0.5, 0.5, 0.5, 0, 0, 0], (2, 1)),
        ([0, 0, 0, 0.5, 0.5, 0.5], (2, 1)),
        ([1.0, 0, 0, 0, 0, 0], (1, 1)),
        ([0, 0, 1.0, 1.0, 0, 0], (1, 0)),
    ):
        found = reduced(update_signal(rewards_PG, torch.tensor(weights, dtype=torch.float64)))
        assert (found["policy/groups"], found["policy/groups_without_signal"]) == counts


def test_equal_scores_are_warned_of_at_once_and_not_again_while_they_go_on() -> None:
    warnings = LearningWarnings(compares_groups=True, num_rollouts=99)
    (text,) = warnings.of_batch(signal(NOTHING, [False] * 4))
    assert text.startswith("warning: all 4 scores of a rollout batch are 0: ")
    assert "0 % of the completions are correct: the task is too hard" in text
    for scores in [NOTHING, SOME, NOTHING]:
        assert warnings.of_batch(signal(scores)) == []
    for _ in range(NUM_BATCHES):
        warnings.of_batch(signal([[0.0, 1.0], [1.0, 0.0]]))
    (again,) = warnings.of_batch(signal([[1.0, 1.0], [1.0, 1.0]], [True] * 4))
    assert "are 1: " in again and "the task is too easy" in again


@pytest.mark.parametrize("scores", [[[2.0]], [[NAN, 2.0]], [[NAN, NAN]]])
def test_fewer_than_two_scores_are_not_equal(scores: list[list[float]]) -> None:
    assert LearningWarnings(compares_groups=True, num_rollouts=99).of_batch(signal(scores)) == []


def test_groups_without_a_signal_are_counted_over_ten_batches() -> None:
    """Batches of five groups: 40 of 50 without a signal are 80 %, which is not above the limit; 41 are."""
    four_of_five = [[0.0, 0.0]] * 4 + [[0.0, 1.0]]
    warnings = LearningWarnings(compares_groups=True, num_rollouts=99)
    for _ in range(NUM_BATCHES):
        assert warnings.of_batch(signal(four_of_five, [False] * 9 + [True])) == []
    five_of_five = [[float(p)] * 2 for p in range(5)]
    (text,) = warnings.of_batch(signal(five_of_five, [False] * 5 + [True] * 5))
    assert text.startswith("warning: 82 % of the groups of the last 10 rollout batches have no signal")
    # 9 of 90 and 5 of 10 completions are right.
    assert "14 % of the completions are correct, and those of a prompt are alike" in text
    assert warnings.of_batch(signal(five_of_five)) == []


def test_a_window_that_is_not_full_and_groups_that_compare_nothing_are_not_judged() -> None:
    constant = [[0.0, 0.0], [1.0, 1.0]]
    few, tokens = (LearningWarnings(compares_groups=compares, num_rollouts=99) for compares in (True, False))
    for _ in range(NUM_BATCHES - 1):
        assert few.of_batch(signal(constant)) == tokens.of_batch(signal(constant)) == []
    assert len(few.of_batch(signal(constant))) == 1
    assert tokens.of_batch(signal(constant)) == []
    assert len(tokens.of_batch(signal(NOTHING))) == 1


@pytest.mark.parametrize(("num_rollouts", "num_counted"), [(1, 1), (8, 4), (9, 4), (19, 9), (20, 10), (500, 10)])
def test_a_short_run_hears_of_groups_without_a_signal_after_half_of_it(num_rollouts: int, num_counted: int) -> None:
    warnings = LearningWarnings(compares_groups=True, num_rollouts=num_rollouts)
    heard = [warnings.of_batch(signal([[0.0, 0.0], [1.0, 1.0]])) for _ in range(num_counted)]
    assert not any(heard[:-1]) and len(heard[-1]) == 1
    assert f"100 % of the groups of the last {num_counted} rollout batches have no signal" in heard[-1][0]


def test_an_update_that_the_balance_loss_alone_moves_is_warned_of() -> None:
    warnings = LearningWarnings(compares_groups=True, num_rollouts=99)
    assert warnings.of_update(has_loss=True, grad_norm=1.0) == []
    assert warnings.of_update(has_loss=False, grad_norm=0.0) == []
    (text,) = warnings.of_update(has_loss=False, grad_norm=0.00123)
    assert "gradient norm 0.00123" in text and "rl.rollout.dynamic_sampling=true" in text
    assert warnings.of_update(has_loss=False, grad_norm=0.1) == []


def test_a_condition_begins_again_after_ten_calls_without_it() -> None:
    onset = Onset()
    held = [True, *[False] * (NUM_BATCHES - 1), True, *[False] * NUM_BATCHES, True]
    assert [onset.begins(holds=holds) for holds in held].count(True) == 2
    assert Onset().begins(holds=True)
