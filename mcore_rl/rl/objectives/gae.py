"""Token advantages from token rewards: generalized advantage estimation (arXiv 1506.02438).

Row n of a tensor `[N, C]` is one completion, padded at the end. Column t belongs to its token t, and a value is the
critic's estimate before it sees this token. Everything is float64, so that the order of sums over ranks does not affect
the float32 results.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_rl.megatron.mesh import Axis
from mcore_rl.rl.objectives.advantages import ROUNDING, StepReward


def token_rewards(
    rewards_N: Tensor,
    kl_NC: Tensor,
    lengths_N: Tensor,
    *,
    kl_coeff: float,
    steps_NI: Sequence[Sequence[StepReward]] = (),
) -> Tensor:
    """Return the reward of each token, `[N, C]`: minus the KL at every token, plus the completion's reward at its last
    token or each step's reward at the step's last token (arXiv 2203.02155).

    Args:
        rewards_N: reward of each completion.
        kl_NC: estimate of the KL to the reference at each token.
        lengths_N: number of tokens of each completion; a completion of 0 tokens gets no reward.
        kl_coeff: weight of the KL.
        steps_NI: steps of each completion, in place of `rewards_N`; empty: use `rewards_N`.
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
    padding (arXiv 1506.02438, equation 16).

    Args:
        rewards_NC: token rewards R_t.
        values_NC: values V_t, before token t is seen.
        lengths_N: number of tokens of each completion.
        gamma: discount per token.
        lambda_N: GAE lambda of each completion.
        ends_N: value after the last token: 0 if the completion ended.
    """
    is_token_NC = _is_token(values_NC, lengths_N)
    next_NC = torch.zeros_like(values_NC)
    next_NC[:, :-1] = values_NC[:, 1:].where(is_token_NC[:, 1:], 0.0)
    has_token_N = lengths_N > 0
    next_NC[has_token_N, lengths_N[has_token_N] - 1] = ends_N[has_token_N]
    # Differences are 0 in padding, so that the sum from the right starts at each row's last token.
    differences_NC = (rewards_NC + gamma * next_NC - values_NC).where(is_token_NC, 0.0)
    advantages_NC = torch.zeros_like(values_NC)
    later_N = torch.zeros_like(lambda_N)
    for t in reversed(range(values_NC.shape[1])):
        later_N = differences_NC[:, t] + gamma * lambda_N * later_N
        advantages_NC[:, t] = later_N
    return advantages_NC


def length_adaptive_lambda(lengths_N: Tensor, alpha: float) -> Tensor:
    """Return 1 - 1 / (alpha x tokens), at least 0, for each completion, so that the reward at the end reaches the same
    fraction of long and short completions (VAPO, arXiv 2504.05118).
    """
    return (1.0 - 1.0 / (alpha * lengths_N.clamp(min=1).double())).clamp(min=0.0)


class Moments(NamedTuple):
    """Moments of a quantity over all tokens of the world."""

    num_values: int
    mean: float
    squares: float
    """Sum of squared differences from the mean."""

    @property
    def size(self) -> float:
        """Root mean square of the values."""
        return math.hypot(self.mean, self.std(0))

    def are_equal(self, size: float) -> bool:
        """Return whether the values are equal up to the rounding of sums of numbers of magnitude `size`."""
        return self.squares <= self.num_values * (ROUNDING * size) ** 2

    def std(self, ddof: int) -> float:
        """Return the standard deviation; 0 for fewer than 1 + ddof values."""
        return (self.squares / (self.num_values - ddof)) ** 0.5 if self.num_values > ddof else 0.0


def world_moments(values_T: Tensor, dp: Axis) -> Moments:
    """Collective over `dp`: return count, mean and summed squared differences of the values of all ranks.

    Each rank passes a flat tensor on its device, of any length, possibly empty. The mean is computed first, because a
    difference of large sums would lose the digits of a small deviation.
    """
    sums = torch.stack([torch.ones_like(values_T, dtype=torch.float64).sum(), values_T.double().sum()])
    dist.all_reduce(sums, group=dp.group)
    count, total = sums.tolist()
    mean = total / max(count, 1.0)
    squares = (values_T.double() - mean).square().sum()
    dist.all_reduce(squares, group=dp.group)
    return Moments(int(count), mean, squares.item())


def whitened(advantages_NC: Tensor, lengths_N: Tensor, moments: Moments, *, ddof: int, eps: float) -> Tensor:
    """Return (A - mean) / (std + eps) at every token; zeros in padding, and everywhere if all advantages are equal."""
    centred_NC = (advantages_NC - moments.mean).where(_is_token(advantages_NC, lengths_N), 0.0)
    deviation = moments.std(ddof) + eps
    return torch.zeros_like(advantages_NC) if moments.are_equal(moments.size) else centred_NC / deviation


def clipped_value_loss(
    values_T: Tensor, old_T: Tensor, returns_T: Tensor, clip: float | None
) -> tuple[Tensor, Tensor]:
    """Return the clipped squared error of each token (arXiv 1707.06347), and a mask of tokens without a gradient: True
    where the clipped term is larger.

    The error is max((V - G)^2, (clip(V, old - clip, old + clip) - G)^2) / 2, and (V - G)^2 / 2 if `clip` is None.
    """
    plain_T = (values_T - returns_T).square()
    if clip is None:
        return plain_T / 2, torch.zeros_like(plain_T, dtype=torch.bool)
    bounded_T = torch.maximum(torch.minimum(values_T, old_T + clip), old_T - clip)
    clipped_T = (bounded_T - returns_T).square()
    return torch.maximum(plain_T, clipped_T) / 2, clipped_T > plain_T


def _is_token(values_NC: Tensor, lengths_N: Tensor) -> Tensor:
    """Return a mask, bool `[N, C]`: True for tokens, False for padding."""
    return torch.arange(values_NC.shape[1], device=values_NC.device) < lengths_N[:, None]
