"""Advantages by hand and by the statistics module."""

import math
import statistics

import pytest
import torch
from torch import tensor

from mcore_rl.errors import ConfigError
from mcore_rl.rl.rewards.score import overlong_penalty
from mcore_rl.rl.rollouts.signal import constant_groups, groups_to_train_on
from mcore_rl.rl.step.advantages import (
    above_baseline,
    above_group_mean,
    decoupled_advantages,
    group_advantages,
    group_centered,
    kl_penalised_advantages,
    leave_one_out_zscore,
    step_advantages,
)
from mcore_rl.rl.step.objective import group_estimate
from mcore_rl.rl.types import StepReward
from tests.sections import advantage_config

EXAMPLE = tensor([[0.2, 0.9, 0.4, 0.1]], dtype=torch.float64)


def estimate(kind, **fields):
    """The function of a kind; those that divide by nothing have no fields."""
    has_fields = kind not in ("mean", "leave_one_out")
    return group_estimate(advantage_config(kind=kind, **(fields if has_fields else {})))


@pytest.mark.parametrize(
    ("kind", "ddof", "best"),
    [
        ("mean", 1, 0.5),
        ("zscore", 1, 1.405),
        ("zscore", 0, 1.622),
        ("leave_one_out", 1, 0.9 - 0.7 / 3),
        ("leave_one_out_zscore", 1, 4.364),
    ],
)
def test_the_best_of_four_is_worth_what_the_kind_says(kind, ddof, best):
    advantages = group_advantages(EXAMPLE, estimate(kind, ddof=ddof))
    assert advantages[0, 1].item() == pytest.approx(best, abs=5e-4)
    assert not constant_groups(EXAMPLE).any()


@pytest.mark.parametrize("kind", ["mean", "zscore", "leave_one_out", "leave_one_out_zscore"])
@pytest.mark.parametrize("ddof", [0, 1])
def test_every_kind_equals_its_definition_on_random_groups(kind, ddof):
    rewards = torch.rand(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    deviation = statistics.stdev if ddof else statistics.pstdev
    eps = 1e-3

    def expected(row, index):
        others = row[:index] + row[index + 1 :]
        return {
            "mean": row[index] - statistics.mean(row),
            "zscore": (row[index] - statistics.mean(row)) / (deviation(row) + eps),
            "leave_one_out": row[index] - statistics.mean(others),
            "leave_one_out_zscore": (row[index] - statistics.mean(others)) / (deviation(others) + eps),
        }[kind]

    advantages = group_advantages(rewards, estimate(kind, ddof=ddof, eps=eps))
    wanted = [[expected(row, index) for index in range(6)] for row in rewards.tolist()]
    torch.testing.assert_close(advantages, tensor(wanted, dtype=torch.float64), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["mean", "zscore", "leave_one_out", "leave_one_out_zscore"])
def test_groups_of_equal_rewards_get_exact_zeros_and_are_told(kind):
    # 0.1 + 0.1 + 0.1 over 3 is not 0.1 in floating point.
    rewards = tensor([[0.1, 0.1, 0.1], [0.0, 1.0, 0.0], [1 / 3, 1 / 3, 1 / 3]])
    advantages, constant = (group_advantages(rewards, estimate(kind, eps=0.0)), constant_groups(rewards))
    assert constant.tolist() == [True, False, True]
    assert advantages[constant].abs().max() == 0
    assert advantages[1, 1] > 0 > advantages[1, 0]
    assert advantages.isfinite().all()


def test_without_spread_among_the_others_a_reward_is_only_centered():
    advantages = leave_one_out_zscore(tensor([[1.0, 0.0, 0.0]]), ddof=1, eps=1e-6)
    assert advantages[0, 0].item() == pytest.approx(1.0)


def test_rewards_that_differ_by_rounding_are_equal():
    """Parts of 0.1 and 0.2 for one completion, a part of 0.3 for another."""
    rewards_PG = tensor([[0.1 + 0.2, 0.3, 0.3, 0.3], [0.1 + 0.2, 0.3, 0.3, 1.0]], dtype=torch.float64)
    assert constant_groups(rewards_PG).tolist() == [True, False]
    assert constant_groups(rewards_PG * 1e-20).tolist() == [True, False]
    advantages_PG = group_advantages(rewards_PG, estimate("leave_one_out_zscore"))
    assert advantages_PG[0].tolist() == [0, 0, 0, 0]
    assert advantages_PG[1, 3].item() == pytest.approx(0.7)


def test_centered_rows_sum_to_zero():
    assert group_centered(tensor([[1.0, 0.0, 0.5]])).tolist() == [[0.5, -0.5, 0.0]]


def test_a_reward_above_the_mean_of_those_of_its_prompt_that_have_not_failed():
    """In float64, by hand; 0.1 + 0.2 and 0.3 are equal."""
    nan = math.nan
    rewards = [[1.0, 0.0, 0.5, nan], [0.1 + 0.2, 0.3, 0.3, 0.3], [nan, nan, nan, nan], [nan, 3.0, nan, nan]]
    got = above_group_mean(tensor(rewards, dtype=torch.float64)).tolist()
    assert got[0][:3] == pytest.approx([0.5, -0.5, 0.0], abs=1e-15)
    assert got[1] == [0.0] * 4
    assert got[3][1] == 0.0
    failed = [math.isnan(one) for row in rewards for one in row]
    assert [math.isnan(one) for row in got for one in row] == failed


def test_a_reward_that_is_not_finite_never_gets_this_far():
    with pytest.raises(AssertionError, match="not finite"):
        group_advantages(tensor([[1.0, float("inf")]]), estimate("zscore"))


def test_a_token_is_worth_the_steps_that_end_at_it_or_later():
    steps = [[StepReward(1, 1.0), StepReward(3, 0.0)], [StepReward(0, 0.5)]]
    values = [1.0, 0.0, 0.5]
    mean, deviation = statistics.mean(values), statistics.stdev(values) + 1e-6
    first, second, third = ((value - mean) / deviation for value in values)
    advantages = step_advantages(steps, [5, 2], ddof=1, eps=1e-6)
    wanted = [[first + second, first + second, second, second, 0.0], [third, 0.0]]
    for got, want in zip(advantages, wanted, strict=True):
        assert got.tolist() == pytest.approx(want, abs=1e-6)


def test_equal_step_rewards_and_the_rounding_of_a_sum_carry_no_signal():
    """Steps of 0.1 + 0.2 and of 0.3 are worth the same; a deviation of 4e-17 would make advantages of size 1 of it."""
    equal = [[StepReward(0, 0.1)], [StepReward(1, 0.1)], []]
    rounded = [[StepReward(0, 0.1 + 0.2), StepReward(1, 0.3)], [StepReward(1, 0.3)]]
    for steps, lengths in ((equal, [2, 2, 1]), (rounded, [2, 2])):
        assert not any(tokens.any() for tokens in step_advantages(steps, lengths, ddof=1, eps=0.0))


def test_overlong_penalty_falls_from_the_buffer_to_the_end():
    lengths = tensor([10, 80, 81, 90, 100])
    penalty = overlong_penalty(lengths, max_tokens=100, buffer_tokens=20, penalty=0.5)
    assert penalty.tolist() == pytest.approx([0, 0, -0.025, -0.25, -0.5])


def test_kl_is_taken_from_the_reward_except_in_groups_of_equal_rewards():
    rewards_PG, kl_PG = tensor([[1.0, 0.0], [1.0, 1.0]]), tensor([[2.0, 4.0], [2.0, 6.0]])
    # 1 - 0.5 and 0 - 1 are 0.75 above and below their mean; the second group's differ by the KL alone.
    for kind, wanted in (("mean", 0.75), ("zscore", 0.75 / (1.5 / 2**0.5))):
        got = kl_penalised_advantages(rewards_PG, kl_PG, estimate(kind, eps=0.0), coeff=0.25, spares_equal_others=False)
        assert got.tolist() == [pytest.approx([wanted, -wanted]), [0.0, 0.0]]


def test_no_reward_is_divided_by_the_deviation_of_the_others_kl_alone():
    """The KL of a policy that is nearly its reference is as good as nothing, and so is what it changes."""
    divided = estimate("leave_one_out_zscore")
    none = math.nan
    rewards_PG = tensor([[1.0, 0.0, 0.0, 0.0], [1.0, none, 0.0, 0.0]], dtype=torch.float64)
    kl_PG = tensor([[0.0, 1e-9, 2e-9, 4e-9]] * 2, dtype=torch.float64)
    got_PG = kl_penalised_advantages(rewards_PG, kl_PG, divided, coeff=0.1, spares_equal_others=True)
    torch.testing.assert_close(got_PG, group_advantages(rewards_PG, divided), rtol=0, atol=1e-8)
    assert got_PG[:, 0].tolist() == pytest.approx([1.0, 1.0])
    # Where the others' rewards differ, the penalised ones are compared.
    best, *others = (reward - 0.1 * kl for reward, kl in zip((1.0, 0.5, 0.0, 0.0), (3, 1, 4, 2), strict=True))
    wanted = (best - statistics.mean(others)) / (statistics.stdev(others) + 1e-6)
    rewards_PG, kl_PG = tensor([[1.0, 0.5, 0.0, 0.0]]).double(), tensor([[3, 1, 4, 2]]).double()
    got_PG = kl_penalised_advantages(rewards_PG, kl_PG, divided, coeff=0.1, spares_equal_others=True)
    assert got_PG[0, 0].item() == pytest.approx(wanted, rel=1e-12)


def test_groups_with_signal_are_those_whose_rewards_differ():
    rewards = tensor([[1.0, 1.0], [0.0, 1.0], [0.5, 0.5], [1.0, 0.0], [0.0, 2.0]])
    assert constant_groups(rewards).tolist() == [True, False, True, False, False]
    assert groups_to_train_on(rewards, num_groups=2) == [1, 3]
    assert groups_to_train_on(rewards, num_groups=9) == [1, 3, 4]


def test_advantages_of_the_users_own_are_masked_like_ours_and_checked(tmp_path, monkeypatch):
    (tmp_path / "own_advantages.py").write_text(
        "def centered(rewards_PG, config, parts):\n"
        "    return rewards_PG - rewards_PG.mean(1, keepdim=True) + config.eps\n"
        "def flat(rewards_PG, config, parts):\n    return rewards_PG.flatten()\n"
        "def infinite(rewards_PG, config, parts):\n    return rewards_PG / 0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    rewards_PG = tensor([[1.0, 0.0], [0.5, 0.5]])
    centered = estimate("own_advantages:centered", eps=0.25)
    parts_PGK = rewards_PG[:, :, None]
    assert group_advantages(rewards_PG, centered, parts_PGK).tolist() == [[0.75, -0.25], [0, 0]]
    with pytest.raises(ConfigError, match=r"own_advantages:flat.*shape \(4,\) for rewards of shape \(2, 2\)"):
        group_advantages(rewards_PG, estimate("own_advantages:flat"), parts_PGK)
    with pytest.raises(ConfigError, match="not finite"):
        group_advantages(rewards_PG, estimate("own_advantages:infinite"), parts_PGK)


def test_gdpo_compares_each_part_in_its_group_and_their_sum_in_the_batch() -> None:
    """arXiv 2601.05242, in plain loops; the sum of the first group's rewards is equal for all, not its parts."""
    parts_PGK = tensor(
        [[[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [0.0, 1.0]], [[0.5, 3.0], [0.5, 9.0], [0.5, 1.0], [0.5, 2.0]]],
        dtype=torch.float64,
    )
    weights = (2.0, 0.5)
    sums = []
    for group in parts_PGK.tolist():
        for completion in group:
            total = 0.0
            for k, weight in enumerate(weights):
                column = [each[k] for each in group]
                mean = sum(column) / 4
                std = math.sqrt(sum((value - mean) ** 2 for value in column) / 3)
                total += weight * (completion[k] - mean) / (std + 1e-6) if std else 0.0
            sums.append(total)
    mean = sum(sums) / 8
    std = math.sqrt(sum((value - mean) ** 2 for value in sums) / 7)
    expected = tensor([(value - mean) / (std + 1e-6) for value in sums], dtype=torch.float64).view(2, 4)
    rewards_PG = (parts_PGK * tensor(weights, dtype=torch.float64)).sum(2)
    got = decoupled_advantages(rewards_PG, parts_PGK, weights, ddof=1, eps=1e-6)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
    assert got[0].abs().min() > 0.5
    # A completion without a reward is as if it were not there, and equal parts are no signal.
    failed = rewards_PG.clone()
    failed[1, 3] = math.nan
    without = decoupled_advantages(failed, parts_PGK, weights, ddof=1, eps=1e-6)
    parts_PGK[1, 3] = 1e9
    assert without[1, 3] == 0 and without.equal(decoupled_advantages(failed, parts_PGK, weights, ddof=1, eps=1e-6))
    ones = torch.ones(2, 4, 2)
    assert decoupled_advantages(ones.sum(2), ones, weights, ddof=1, eps=1e-6).equal(torch.zeros(2, 4))


@pytest.mark.parametrize("kind", ["zscore", "mean", "leave_one_out", "leave_one_out_zscore"])
def test_a_completion_without_a_reward_is_as_if_it_were_not_there(kind: str) -> None:
    none = math.nan
    rewards = tensor([[1.0, none, 0.5, 0.0], [0.0, 0.25, 1.0, 0.5], [none, none, none, 1.0], [none, none, none, none]])
    of_kind = estimate(kind, ddof=0, eps=1e-3)
    advantages = group_advantages(rewards, of_kind)
    without = group_advantages(tensor([[1.0, 0.5, 0.0]]), of_kind)
    whole = group_advantages(tensor([[0.0, 0.25, 1.0, 0.5]]), of_kind)
    torch.testing.assert_close(advantages[0, [0, 2, 3]], without[0], rtol=0, atol=0)
    torch.testing.assert_close(advantages[1], whole[0], rtol=0, atol=0)
    assert advantages[0, 1] == 0 and not advantages[2:].any()
    assert constant_groups(rewards).tolist() == [False, False, True, True]
    assert constant_groups(tensor([[0.5, none, 0.5], [0.5, none, 0.25]])).tolist() == [True, False]


def test_remax_subtracts_the_greedy_reward_and_leaves_what_has_no_reward_out() -> None:
    rewards_PG = torch.tensor([[1.0, 0.5], [0.25, torch.nan], [1.0, 2.0], [0.1 + 0.2, 0.5]], dtype=torch.float64)
    greedy_P = torch.tensor([0.75, 0.0, torch.nan, 0.3], dtype=torch.float64)
    got_PG = above_baseline(rewards_PG, greedy_P).tolist()
    assert got_PG[:3] == [[0.25, -0.25], [0.25, 0.0], [0.0, 0.0]]
    # Rounding is no distance: Adam makes a step of an advantage of any size.
    assert 0.1 + 0.2 != 0.3 and got_PG[3] == [0.0, 0.2]
    # Equal rewards have a signal too: both are better than what the policy would say itself.
    assert above_baseline(torch.ones(1, 2), torch.zeros(1)).tolist() == [[1.0, 1.0]]
