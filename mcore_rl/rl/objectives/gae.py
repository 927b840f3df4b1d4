"""Advantages of tokens from rewards of tokens: generalized advantage estimation (arXiv 1506.02438).

Row n of a tensor `[N, C]` is one completion, padded after its last token: column t belongs to its token t, and a value
is the critic's estimate before that token is seen. Everything is float64, so that the order of sums over ranks does not
show in float32.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_rl.parallel.mesh import Axis
from mcore_rl.rl.objectives.advantages import ROUNDING, StepReward


def token_rewards(
    rewards_N: Tensor,
    kl_NC: Tensor,
    lengths_N: Tensor,
    *,
    kl_coeff: float,
    steps_NI: Sequence[Sequence[StepReward]] = (),
) -> Tensor:
    """Return the reward of each token, `[N, C]`: minus the KL at every token, plus the reward at the last one, or plus
    each step's reward at the step's last token (arXiv 2203.02155).

    Args:
        rewards_N: reward of each completion.
        kl_NC: estimate of the KL to the reference at each token.
        lengths_N: tokens of each completion; one of 0 tokens has no reward.
        kl_coeff: weight of the KL.
        steps_NI: steps of each completion in the place of `rewards_N`; empty: there are none.
    """
    rewards_NC = -kl_coeff * kl_NC.double()
    for n, length in enumerate(lengths_N.tolist()):
        steps = steps_NI[n] if steps_NI else [StepReward(length - 1, float(rewards_N[n]))]
        for step in steps if length else ():
            assert 0 <= step.end < length, (step, length)
            rewards_NC[n, step.end] += step.value
    return rewards_NC.where(_is_token(rewards_NC, lengths_N), 0.0)


def generalized_advantages(
    rewards_NC: Tensor,
    values_NC: Tensor,
    lengths_N: Tensor,
    *,
    gamma: float,
    lambda_N: Tensor,
    ends_N: Tensor,
) -> Tensor:
    """Return the advantages `[N, C]`, A_t = d_t + gamma lambda A_{t+1} with d_t = R_t + gamma V_{t+1} - V_t; zeros in
    the padding (arXiv 1506.02438, equation 16).

    Args:
        rewards_NC: rewards of tokens.
        values_NC: values V_t, before token t is seen.
        lengths_N: tokens of each completion.
        gamma: discount of a token.
        lambda_N: weight of later differences d in each completion.
        ends_N: value after the last token: 0 where the completion has ended.
    """
    is_token_NC = _is_token(values_NC, lengths_N)
    next_NC = torch.zeros_like(values_NC)
    next_NC[:, :-1] = values_NC[:, 1:].where(is_token_NC[:, 1:], 0.0)
    has_token_N = lengths_N > 0
    next_NC[has_token_N, lengths_N[has_token_N] - 1] = ends_N[has_token_N]
    # Differences in the padding are 0, so that the sum from the right begins at each row's own last token.
    differences_NC = (rewards_NC + gamma * next_NC - values_NC).where(is_token_NC, 0.0)
    advantages_NC = torch.zeros_like(values_NC)
    later_N = torch.zeros_like(lambda_N)
    for t in reversed(range(values_NC.shape[1])):
        later_N = differences_NC[:, t] + gamma * lambda_N * later_N
        advantages_NC[:, t] = later_N
    return advantages_NC


def length_adaptive_lambda(lengths_N: Tensor, alpha: float) -> Tensor:
    """Return 1 - 1 / (alpha tokens), at least 0, for each completion, so that the reward at the end reaches as large a
    part of a long completion as of a short one (VAPO, arXiv 2504.05118).
    """
    return (1.0 - 1.0 / (alpha * lengths_N.clamp(min=1).double())).clamp(min=0.0)


class Moments(NamedTuple):
    """Statistics of a number over all tokens of the world."""

    num_values: int
    mean: float
    squares: float
    """Sum of squared differences from the mean."""

    @property
    def size(self) -> float:
        """The root of the mean square of the numbers."""
        return math.hypot(self.mean, self.std(0))

    def are_equal(self, size: float) -> bool:
        """Return whether the numbers differ by no more than the rounding of sums of numbers of this size."""
        return self.squares <= self.num_values * (ROUNDING * size) ** 2

    def std(self, ddof: int) -> float:
        """Return the standard deviation; 0 for fewer than 1 + ddof numbers."""
        return (self.squares / (self.num_values - ddof)) ** 0.5 if self.num_values > ddof else 0.0


def world_moments(values_T: Tensor, dp: Axis) -> Moments:
    """Collective over `dp`: count, mean and squared differences of the values of all its ranks, each a flat tensor on
    the device, of any length and perhaps empty.

    The mean is found first, because a difference of large sums would lose the digits of a small deviation.
    """
    sums = torch.stack([torch.ones_like(values_T, dtype=torch.float64).sum(), values_T.double().sum()])
    dist.all_reduce(sums, group=dp.group)
    count, total = sums.tolist()
    mean = total / max(count, 1.0)
    squares = (values_T.double() - mean).square().sum()
    dist.all_reduce(squares, group=dp.group)
    return Moments(int(count), mean, squares.item())


def whitened(advantages_NC: Tensor, lengths_N: Tensor, moments: Moments, *, ddof: int, eps: float) -> Tensor:
    """Return (A - mean) / (std + eps) at every token, zeros in the padding and where all advantages are equal."""
    centred_NC = (advantages_NC - moments.mean).where(_is_token(advantages_NC, lengths_N), 0.0)
    deviation = moments.std(ddof) + eps
    return torch.zeros_like(advantages_NC) if moments.are_equal(moments.size) else centred_NC / deviation


def clipped_value_loss(
    values_T: Tensor, old_T: Tensor, returns_T: Tensor, clip: float | None
) -> tuple[Tensor, Tensor]:
    """Return max((V - G)^2, (clip(V, old - clip, old + clip) - G)^2) / 2 of each token, and where the clipped term is
    the larger one, which has no gradient there (arXiv 1707.06347); with clip None (V - G)^2 / 2.
    """
    plain_T = (values_T - returns_T).square()
    if clip is None:
        return plain_T / 2, torch.zeros_like(plain_T, dtype=torch.bool)
    bounded_T = torch.maximum(torch.minimum(values_T, old_T + clip), old_T - clip)
    clipped_T = (bounded_T - returns_T).square()
    return torch.maximum(plain_T, clipped_T) / 2, clipped_T > plain_T


def _is_token(values_NC: Tensor, lengths_N: Tensor) -> Tensor:
    """Return bool `[N, C]`: which columns are tokens, not padding."""
    return torch.arange(values_NC.shape[1], device=values_NC.device) < lengths_N[:, None]
