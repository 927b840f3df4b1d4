"""Advantages from rewards: how much better a completion is than other completions of the same prompt."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_rl.errors import ConfigError
from mcore_rl.megatron.mesh import Axis
from mcore_rl.rl.rewards.score import Moments
from mcore_rl.rl.rollouts.signal import constant_groups
from mcore_rl.rl.types import StepReward

Estimate = Callable[..., Tensor]
"""Function from rewards `[P, G]`, float64, and their parts `[P, G, K]` if these are given, to advantages `[P, G]`."""


def group_advantages(rewards_PG: Tensor, estimate: Estimate, parts_PGK: Tensor | None = None) -> Tensor:
    """Return the advantages `[P, G]` from `estimate`, with zeros for groups of equal rewards. A completion with NaN,
    whose scoring failed, gets zero, and the rest of its group the advantages of a group without it.
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
        parts = () if parts_PGK is None else (parts_PGK[chosen_PG].unflatten(0, complete_PG.shape),)
        found_PG = estimate(complete_PG, *parts).masked_fill(constant_groups(complete_PG)[:, None], 0.0)
        if not found_PG.isfinite().all():
            raise ConfigError(
                f"rl.advantage returned numbers that are not finite for the rewards {complete_PG.tolist()}. Correct "
                "the function."
            )
        advantages_PG[chosen_PG] = found_PG.flatten()
    return advantages_PG


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


def decoupled_advantages(
    rewards_PG: Tensor, parts_PGK: Tensor, weights_K: Sequence[float], *, ddof: int, eps: float
) -> Tensor:
    """Return the advantages `[P, G]` of GDPO (arXiv 2601.05242): the weighted sum of each part's z-scores within its
    group, minus its mean over all scored completions, divided by its deviation + eps. A part that is equal for the
    whole group, or NaN, adds 0.
    """
    unscored_PG = rewards_PG.isnan()
    summed_PG = torch.zeros_like(rewards_PG)
    for part_PG, weight in zip(parts_PGK.unbind(2), weights_K, strict=True):
        zscores = partial(group_zscore, ddof=ddof, eps=eps)
        summed_PG += weight * group_advantages(part_PG.masked_fill(unscored_PG, torch.nan), zscores)
    scored = summed_PG[~unscored_PG]
    if len(scored) <= ddof or constant_groups(scored[None]).item():
        return torch.zeros_like(rewards_PG)
    return ((summed_PG - scored.mean()) / (scored.std(correction=ddof) + eps)).masked_fill(unscored_PG, 0.0)


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
    return constant_groups(_others(rewards_PG))


def _others(rewards_PG: Tensor) -> Tensor:
    """Return, for each completion, the rewards of the prompt's other completions, `[P, G, G - 1]`."""
    group_size = rewards_PG.shape[1]
    off_diagonal = ~torch.eye(group_size, dtype=torch.bool, device=rewards_PG.device)
    others_PGO = rewards_PG[:, None, :].expand(-1, group_size, -1)[:, off_diagonal]
    return others_PGO.reshape(-1, group_size, group_size - 1)


def step_advantages(
    steps_GI: Sequence[Sequence[StepReward]], lengths_G: Sequence[int], *, ddof: int, eps: float
) -> list[Tensor]:
    """Return the advantages `[tokens]`, float32, of each completion of one prompt: at each sampled token the sum of the
    z-scores, over all steps of the group, of the steps that end there or later (arXiv 2402.03300, process supervision).
    """
    values_I = torch.tensor([step.value for steps in steps_GI for step in steps], dtype=torch.float64)
    assert values_I.isfinite().all(), "a step's reward is not finite"
    constant = len(values_I) == 0 or bool(constant_groups(values_I))
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


def kl_penalised_advantages(
    rewards_PG: Tensor,
    kl_sums_PG: Tensor,
    estimate: Estimate,
    *,
    coeff: float,
    spares_equal_others: bool,
    parts_PGK: Tensor | None = None,
) -> Tensor:
    """Return the advantages `[P, G]` of the rewards minus `coeff` times each completion's summed KL to the reference.

    Groups with equal rewards before the KL get zeros: dividing by the deviation of the KL terms would scale any
    penalty, however small, to advantages of size 1. So `leave_one_out_zscore` (`spares_equal_others`) does not divide
    where the prompt's other rewards are all equal before the KL.
    """
    penalised_PG = rewards_PG - coeff * kl_sums_PG
    advantages_PG = group_advantages(penalised_PG, estimate, parts_PGK)
    if spares_equal_others:
        undivided_PG = group_advantages(penalised_PG, leave_one_out)
        advantages_PG = undivided_PG.where(others_are_equal(rewards_PG), advantages_PG)
    return advantages_PG.masked_fill(constant_groups(rewards_PG)[:, None], 0.0)


def above_baseline(rewards_PG: Tensor, baseline_P: Tensor) -> Tensor:
    """Subtract each prompt's baseline, in ReMax the reward of a greedy completion (arXiv 2310.10505, algorithm 2). The
    result is 0 where the two differ only by rounding, and where a reward is NaN (missing).
    """
    baseline_PG = baseline_P[:, None].expand_as(rewards_PG)
    is_equal_PG = constant_groups(torch.stack([rewards_PG, baseline_PG], dim=-1))
    return (rewards_PG - baseline_PG).masked_fill(is_equal_PG, 0.0)


def token_rewards(
    rewards_N: Tensor,
    kl_NC: Tensor,
    lengths_N: Tensor,
    *,
    kl_coeff: float,
    steps_NI: Sequence[Sequence[StepReward]] = (),
) -> Tensor:
    """Return the reward of each token, `[N, C]`: minus `kl_coeff` times the KL at every token, plus the completion's
    reward at its last token or, with `steps_NI`, each step's reward at the step's last token (arXiv 2203.02155). A
    completion of 0 tokens gets no reward.
    """
    rewards_NC = -kl_coeff * kl_NC.double()
    for n, length in enumerate(lengths_N.tolist()):
        steps = steps_NI[n] if steps_NI else [StepReward(length - 1, float(rewards_N[n]))]
        for step in steps if length else ():
            assert 0 <= step.end < length, (step, length)
            rewards_NC[n, step.end] += step.value
    return rewards_NC.where(_is_token(rewards_NC, lengths_N), 0.0)


def generalized_advantages(
    rewards_NC: Tensor, values_NC: Tensor, lengths_N: Tensor, *, gamma: float, lambda_N: Tensor, ends_N: Tensor
) -> Tensor:
    """Return the advantages `[N, C]`, A_t = d_t + gamma lambda A_{t+1} with d_t = R_t + gamma V_{t+1} - V_t; zeros in
    padding (arXiv 1506.02438, equation 16). V_t is the value before token t is seen; `ends_N` is the value after the
    last token: 0 if the completion ended.
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


def world_moments(values_T: Tensor, dp: Axis) -> Moments:
    """Collective over `dp`: return count, mean and summed squared differences of all ranks' values, from a flat tensor
    per rank, possibly empty. The mean comes first: a difference of large sums would lose a small deviation's digits.
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


def clipped_value_loss(values_T: Tensor, old_T: Tensor, returns_T: Tensor, clip: float | None) -> tuple[Tensor, Tensor]:
    """Return max((V - G)^2, (clip(V, old - clip, old + clip) - G)^2) / 2 of each token (arXiv 1707.06347), or (V - G)^2
    / 2 if `clip` is None, and a mask of tokens without a gradient: True where the clipped term is larger.
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
