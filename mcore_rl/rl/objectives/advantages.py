"""Advantages from rewards: how much better a completion is than other completions of the same prompt."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mcore_rl.errors import ConfigError

ROUNDING = 1e-12
"""Relative difference below which float64 sums count as equal: their last bits depend on the order of summation."""


Estimate = Callable[[Tensor], Tensor]
"""Function from rewards `[P, G]`, float64, to advantages of the same shape."""


def group_advantages(rewards_PG: Tensor, estimate: Estimate) -> Tensor:
    """Return the advantages `[P, G]` from `estimate`, with zeros for groups of equal rewards.

    NaN marks a completion without a reward, because scoring failed: its advantage is zero, and the rest of the group
    gets the advantages of a group without this completion.
    """
    assert not rewards_PG.isinf().any(), "a reward is not finite; scoring counts such as failed"
    counts_P = (~rewards_PG.isnan()).sum(dim=1)
    advantages_PG = torch.zeros_like(rewards_PG)
    for count in sorted(set(counts_P.tolist()) - {0, 1}):
        of_count_P = counts_P == count
        chosen_PG = of_count_P[:, None] & ~rewards_PG.isnan()
        # Rows with the same count form a matrix again, without the completions that have no reward.
        complete_PG = rewards_PG[chosen_PG].view(-1, count)
        # Exact zeros: a mean of equal numbers may differ from them in the last bit, and eps would amplify that.
        found_PG = estimate(complete_PG).masked_fill(constant_groups(complete_PG)[:, None], 0.0)
        if not found_PG.isfinite().all():
            raise ConfigError(
                f"rl.advantage returned numbers that are not finite for the rewards {complete_PG.tolist()}. Correct "
                "the function."
            )
        advantages_PG[chosen_PG] = found_PG.flatten()
    return advantages_PG


def constant_groups(rewards_PG: Tensor) -> Tensor:
    """Return a mask of groups without a learning signal, bool `[P]`: all rewards that are not NaN are equal, or there
    are fewer than two.
    """
    return _are_equal(rewards_PG)


def _are_equal(rewards_XN: Tensor) -> Tensor:
    """Return where the rewards of the last axis, without NaN, are equal up to rounding or fewer than two.

    Rounding matters: 0.1 + 0.2 for two parts of a reward is not exactly 0.3.
    """
    has_none_XN = rewards_XN.isnan()
    largest_X = rewards_XN.masked_fill(has_none_XN, -torch.inf).amax(dim=-1)
    smallest_X = rewards_XN.masked_fill(has_none_XN, torch.inf).amin(dim=-1)
    return largest_X - smallest_X <= ROUNDING * rewards_XN.nan_to_num(nan=0.0).abs().amax(dim=-1)


def groups_to_train_on(scores_PG: Tensor, num_groups: int) -> list[int]:
    """Return the indices of the first `num_groups` groups with unequal scores, or of fewer if there are not enough
    (dynamic sampling, arXiv 2503.14476; the paper's score is whether the answer is correct).
    """
    indices: list[int] = (~constant_groups(scores_PG)).nonzero().flatten().tolist()
    return indices[:num_groups]


def group_centered(rewards_PG: Tensor) -> Tensor:
    """Subtract each prompt's mean reward, so that every row sums to zero (arXiv 2503.20783)."""
    return rewards_PG - rewards_PG.mean(dim=1, keepdim=True)


def above_group_mean(rewards_PG: Tensor) -> Tensor:
    """Subtract each prompt's mean reward, ignoring NaN (REINFORCE++-Baseline, arXiv 2501.03262). NaN stays NaN, and
    groups of equal rewards get exact zeros.
    """
    centered_PG = rewards_PG - rewards_PG.nanmean(dim=1, keepdim=True)
    return centered_PG.masked_fill(constant_groups(rewards_PG)[:, None] & ~rewards_PG.isnan(), 0.0)


def group_zscore(rewards_PG: Tensor, *, ddof: int, eps: float) -> Tensor:
    """Divide `group_centered` by the row's standard deviation + eps (arXiv 2402.03300)."""
    return group_centered(rewards_PG) / (rewards_PG.std(dim=1, correction=ddof, keepdim=True) + eps)


def leave_one_out(rewards_PG: Tensor) -> Tensor:
    """Subtract from each reward the mean reward of the prompt's other completions (RLOO, arXiv 2402.14740)."""
    group_size = rewards_PG.shape[1]
    # r - (sum - r) / (G - 1) = (r - mean) G / (G - 1)
    return group_centered(rewards_PG) * (group_size / (group_size - 1))


def leave_one_out_zscore(rewards_PG: Tensor, *, ddof: int, eps: float) -> Tensor:
    """Divide `leave_one_out` by the standard deviation of the other rewards + eps, unless those are all equal."""
    spread_PG = _others(rewards_PG).std(dim=2, correction=ddof) + eps
    return leave_one_out(rewards_PG) / spread_PG.masked_fill(others_are_equal(rewards_PG), 1.0)


def others_are_equal(rewards_PG: Tensor) -> Tensor:
    """Return a mask, bool `[P, G]`: True where all other scored completions of the prompt have the same reward."""
    return _are_equal(_others(rewards_PG))


def _others(rewards_PG: Tensor) -> Tensor:
    """Return, for each completion, the rewards of the prompt's other completions, `[P, G, G - 1]`."""
    group_size = rewards_PG.shape[1]
    off_diagonal = ~torch.eye(group_size, dtype=torch.bool, device=rewards_PG.device)
    others_PGO = rewards_PG[:, None, :].expand(-1, group_size, -1)[:, off_diagonal]
    return others_PGO.reshape(-1, group_size, group_size - 1)


class StepReward(NamedTuple):
    """Reward of a step of a completion; `end` is the index of the step's last token among the completion's sampled
    tokens.
    """

    end: int
    value: float


def step_advantages(
    steps_GI: Sequence[Sequence[StepReward]], lengths_G: Sequence[int], *, ddof: int, eps: float
) -> list[Tensor]:
    """Return the advantages `[tokens]`, float32, of each completion of one prompt: at each token the sum of the
    z-scores of the steps that end there or later (arXiv 2402.03300, process supervision).

    Args:
        steps_GI: steps of each completion; mean and deviation are taken over all steps of the group.
        lengths_G: number of sampled tokens of each completion.
    """
    values_I = torch.tensor([step.value for steps in steps_GI for step in steps], dtype=torch.float64)
    assert values_I.isfinite().all(), "a step's reward is not finite"
    constant = len(values_I) == 0 or bool(_are_equal(values_I))
    advantages = []
    for steps, length in zip(steps_GI, lengths_G, strict=True):
        at_end_T = torch.zeros(length, dtype=torch.float64)
        for step in steps:
            assert 0 <= step.end < length, (step, length)
            at_end_T[step.end] += 0.0 if constant else step.value - values_I.mean()
        if not constant:
            at_end_T /= values_I.std(correction=ddof) + eps
        advantages.append(at_end_T.flip(0).cumsum(0).flip(0).float())  # sum from each token to the end
    return advantages


def overlong_penalty(lengths_N: Tensor, *, max_tokens: int, buffer_tokens: int, penalty: float) -> Tensor:
    """Return the penalty to add to each reward: 0 up to max - buffer tokens, then falling linearly to -penalty at max
    tokens (DAPO, arXiv 2503.14476).
    """
    excess_N = lengths_N - (max_tokens - buffer_tokens)
    return -penalty * (excess_N / buffer_tokens).clamp(0.0, 1.0)


def kl_penalised_advantages(
    rewards_PG: Tensor, kl_sums_PG: Tensor, estimate: Estimate, *, coeff: float, spares_equal_others: bool
) -> Tensor:
    """Return the advantages `[P, G]` of the rewards minus `coeff` times each completion's summed KL to the reference.

    Groups with equal rewards before the KL get zeros, as without the KL: there is no task signal to trade off, and
    dividing by the deviation of the KL terms would scale any penalty, however small, to advantages of size 1. For the
    same reason `leave_one_out_zscore` (`spares_equal_others`) does not divide where the prompt's other rewards are all
    equal before the KL.
    """
    penalised_PG = rewards_PG - coeff * kl_sums_PG
    advantages_PG = group_advantages(penalised_PG, estimate)
    if spares_equal_others:
        undivided_PG = group_advantages(penalised_PG, leave_one_out)
        advantages_PG = undivided_PG.where(others_are_equal(rewards_PG), advantages_PG)
    return advantages_PG.masked_fill(constant_groups(rewards_PG)[:, None], 0.0)


def above_baseline(rewards_PG: Tensor, baseline_P: Tensor) -> Tensor:
    """Subtract each prompt's baseline, in ReMax the reward of a greedy completion (arXiv 2310.10505, algorithm 2). The
    result is 0 where the two differ only by rounding, and where a reward is NaN (missing).
    """
    baseline_PG = baseline_P[:, None].expand_as(rewards_PG)
    is_equal_PG = _are_equal(torch.stack([rewards_PG, baseline_PG], dim=-1))
    return (rewards_PG - baseline_PG).masked_fill(is_equal_PG, 0.0)
