"""Advantages of tokens against sums written out in Python, on ragged completions: of one token, of none, truncated."""

import math
import statistics

import pytest
import torch
from torch import tensor

from mcore_rl.megatron.mesh import Mesh
from mcore_rl.rl.rewards.score import Moments
from mcore_rl.rl.step.advantages import (
    clipped_value_loss,
    generalized_advantages,
    length_adaptive_lambda,
    token_rewards,
    whitened,
    world_moments,
)
from mcore_rl.rl.types import StepReward

LENGTHS = (5, 1, 0, 9, 3, 1, 14)
PADDED = 16
TRUNCATED = (3, 5)


def ragged(seed=0):
    """Rewards and values `[N, C]` in float64 with rubbish in the padding, and lengths."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(LENGTHS), PADDED)
    rewards, values = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    return rewards, values, tensor(LENGTHS)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.7), (0.97, 1.0), (1.0, 0.0)])
@pytest.mark.parametrize("bootstraps", [False, True])
def test_an_advantage_is_the_sum_of_discounted_later_differences(gamma, lam, bootstraps):
    rewards, values, lengths = ragged()
    last = [float(values[n, length - 1]) if n in TRUNCATED else 0.0 for n, length in enumerate(LENGTHS)]
    ends = last if bootstraps else [0.0] * len(LENGTHS)
    got = generalized_advantages(
        rewards,
        values,
        lengths,
        gamma=gamma,
        lambda_N=torch.full((len(LENGTHS),), lam, dtype=torch.float64),
        ends_N=tensor(ends, dtype=torch.float64),
    )
    for n, length in enumerate(LENGTHS):
        reward, value = rewards[n].tolist(), [*values[n, :length].tolist(), ends[n]]
        differences = [reward[t] + gamma * value[t + 1] - value[t] for t in range(length)]
        for t in range(length):
            wanted = math.fsum((gamma * lam) ** (k - t) * differences[k] for k in range(t, length))
            assert got[n, t].item() == pytest.approx(wanted, rel=0, abs=1e-9), (n, t)
        assert (got[n, length:] == 0).all()


def test_with_lambda_one_a_return_is_the_discounted_sum_of_rewards_and_the_critic_cancels_out():
    rewards, values, lengths = ragged()
    ones = torch.ones(len(LENGTHS), dtype=torch.float64)
    returns = values + generalized_advantages(rewards, values, lengths, gamma=0.9, lambda_N=ones, ends_N=ones * 0)
    for n, length in enumerate(LENGTHS):
        for t in range(length):
            wanted = math.fsum(0.9 ** (k - t) * rewards[n, k].item() for k in range(t, length))
            assert returns[n, t].item() == pytest.approx(wanted, rel=0, abs=1e-9)


def test_by_hand_the_value_before_a_token_and_the_one_after_it_differ_by_its_reward():
    """Values 1, 2 and a reward of 10 at the end: d_1 = 10 - 2, d_0 = 2 - 1; lambda 1/2."""
    got = generalized_advantages(
        tensor([[0.0, 10.0]], dtype=torch.float64),
        tensor([[1.0, 2.0]], dtype=torch.float64),
        tensor([2]),
        gamma=1.0,
        lambda_N=tensor([0.5], dtype=torch.float64),
        ends_N=tensor([0.0], dtype=torch.float64),
    )
    assert got.tolist() == [[1.0 + 0.5 * 8.0, 8.0]]


def test_a_token_pays_its_kl_and_the_last_one_gets_the_reward():
    kl, _, lengths = ragged()
    rewards_N = torch.arange(len(LENGTHS), dtype=torch.float64) + 1
    rewards_N[2] = torch.nan  # a completion without a reward, and without a trained token
    got = token_rewards(rewards_N, kl, lengths, kl_coeff=0.1)
    for n, length in enumerate(LENGTHS):
        wanted = [-0.1 * kl[n, t].item() + (n + 1) * (t == length - 1) for t in range(length)]
        assert got[n].tolist() == pytest.approx([*wanted, *[0.0] * (PADDED - length)], rel=0, abs=1e-12)


def test_steps_are_rewarded_where_they_end():
    steps = [[], [], [], [StepReward(2, 0.5), StepReward(8, -1.0)], [StepReward(2, 3.0)], [], []]
    zeros = torch.zeros(len(LENGTHS), PADDED)
    got = token_rewards(torch.ones(len(LENGTHS)), zeros, tensor(LENGTHS), kl_coeff=1.0, steps_NI=steps)
    wanted = torch.zeros(len(LENGTHS), PADDED, dtype=torch.float64)
    wanted[3, 2], wanted[3, 8], wanted[4, 2] = 0.5, -1.0, 3.0
    assert torch.equal(got, wanted)


def test_the_lambda_of_a_length_is_that_of_the_paper():
    assert length_adaptive_lambda(tensor([1000, 100, 20, 10, 0]), 0.05).tolist() == pytest.approx(
        [1 - 1 / 50, 1 - 1 / 5, 0.0, 0.0, 0.0]
    )


@pytest.mark.parametrize("ddof", [0, 1])
def test_whitened_advantages_have_mean_0_and_deviation_1_over_the_tokens(one_rank: Mesh, ddof: int) -> None:
    advantages, _, lengths = ragged(1)
    advantages = advantages * 1e-3 + 1e4  # a large mean, in which a naive sum of squares would lose the deviation
    tokens = [advantages[n, t].item() for n, length in enumerate(LENGTHS) for t in range(length)]
    moments = world_moments(tensor(tokens, dtype=torch.float64), one_rank.dp)
    deviation = (statistics.stdev if ddof else statistics.pstdev)(tokens)
    assert (moments.num_values, moments.mean) == (sum(LENGTHS), pytest.approx(statistics.fmean(tokens), rel=1e-15))
    assert moments.std(ddof) == pytest.approx(deviation, rel=1e-9)
    got = whitened(advantages, lengths, moments, ddof=ddof, eps=1e-8)
    for n, length in enumerate(LENGTHS):
        wanted = [(x - statistics.fmean(tokens)) / (deviation + 1e-8) for x in advantages[n, :length].tolist()]
        assert got[n].tolist() == pytest.approx([*wanted, *[0.0] * (PADDED - length)], rel=0, abs=1e-7)


def test_equal_advantages_and_no_tokens_at_all_whiten_to_zeros(one_rank: Mesh) -> None:
    same = torch.full((2, 3), 0.1, dtype=torch.float64)
    moments = world_moments(same.flatten()[:1], one_rank.dp)
    assert whitened(same, tensor([1, 0]), moments, ddof=1, eps=1e-6).tolist() == [[0.0] * 3] * 2
    assert world_moments(same.flatten()[:0], one_rank.dp) == Moments(0, 0.0, 0.0)
    # Their mean differs from them in the last bit, which would be their deviation.
    many = torch.full((1, 1001), 0.1, dtype=torch.float64)
    moments = world_moments(many.flatten(), one_rank.dp)
    assert not whitened(many, tensor([1001]), moments, ddof=1, eps=0.0).any()


def test_a_value_gains_nothing_beyond_the_clip():
    """Old value 0, clip 0.2; the return lies above (1) or below (-1), inside or beyond the clip."""
    values = tensor([0.1, 0.5, -0.5, 0.5, 0.1], dtype=torch.float64, requires_grad=True)
    returns = tensor([1.0, 1.0, 1.0, -1.0, 0.15], dtype=torch.float64)
    loss, clipped = clipped_value_loss(values, torch.zeros_like(returns), returns, 0.2)
    # |0.5 - 1| < |0.2 - 1|: the clipped term is the larger. |-0.5 - 1| > |-0.2 - 1|: the plain one is.
    wanted = [0.9**2 / 2, 0.8**2 / 2, 1.5**2 / 2, 1.5**2 / 2, 0.05**2 / 2]
    assert loss.tolist() == pytest.approx(wanted, abs=1e-12)
    assert clipped.tolist() == [False, True, False, False, False]
    (gradient,) = torch.autograd.grad(loss.sum(), values)
    assert gradient.tolist() == pytest.approx([-0.9, 0.0, -1.5, 1.5, -0.05], abs=1e-12)
    plain, never = clipped_value_loss(values, torch.zeros_like(returns), returns, None)
    assert torch.equal(plain, (values - returns).square() / 2) and not never.any()
