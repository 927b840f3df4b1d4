"""Policy losses: each returns a weighted sum over tokens, to be minimised, and a count.

Each loss is the closed form in the paper that config/rl/loss.py cites. The ratio r of a token is its probability under
the policy divided by its probability under the old policy, which sampled the completions. A is the token's advantage,
and sg stops the gradient.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mcore_rl.config.rl.loss import Clip, Correction
from mcore_rl.megatron.mesh import Axis
from mcore_rl.rl.objectives.aggregation import anchored_means
from mcore_rl.rl.objectives.diagnostics import kl_estimate, router_shift_statistics, update_statistics
from mcore_rl.rl.objectives.policy_tokens import (
    PolicyTokens,
    TokenLoss,
    bounded_exp,
    log_difference,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyLoss:
    """Loss of one microbatch on this rank, with statistics for metrics."""

    loss: Tensor
    """Weighted sum over the trained tokens, with gradient."""
    count: Tensor
    """int32: number of trained tokens; the sum is divided once, by the world's total."""
    sums: dict[str, Tensor]
    """Statistics to be summed over the world."""
    maxima: dict[str, Tensor]
    """Statistics to be maximised over the world."""


TokenObjective = Callable[[PolicyTokens, Axis], TokenLoss]
"""Function from a microbatch's tokens and the context-parallel axis to the loss of each token. Collective over this
axis, in the forward pass only."""


class KlTerm(NamedTuple):
    """KL to the reference policy, as a term of the loss."""

    coeff: float
    estimator: str
    gradient: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """The terms of a policy's loss."""

    token_loss: TokenObjective
    shift_floor: float | None = None
    """Lower bound of the router-shift ratio, by which `token_loss` multiplies ratios. None: it is not used."""
    correction: Correction | None = None
    """Importance-sampling correction of `token_loss` for the rollout-training mismatch. None: no correction."""
    kl: KlTerm | None = None
    teacher_coeff: float | None = None
    """Coefficient of the KL to a teacher, at tokens with teacher logprobs. None: no such term."""
    entropy_coeff: float = 0.0
    """Coefficient of the entropy bonus."""


def policy_loss(tokens: PolicyTokens, objective: Objective, cp: Axis) -> PolicyLoss:
    """Collective over `cp` (in the forward pass only): return the policy's loss: the token loss, corrected for the
    rollout-training mismatch, plus the KL penalty, plus the KL to a teacher, minus the entropy bonus.
    """
    token_loss = objective.token_loss(tokens, cp)
    correction_T = None
    if objective.correction is not None:
        correction_T = importance_sampling_weights(tokens, objective.correction, cp)
    loss_T = token_loss.loss_T if correction_T is None else token_loss.loss_T * correction_T
    of_tokens = tokens.total(loss_T * tokens.loss_weights_T)
    if objective.kl is not None:
        assert tokens.reference_logprobs_T is not None, "rl.loss.kl_coeff needs the reference's logprobs"
        coeff, estimator, gradient = objective.kl
        loss_T = loss_T + coeff * kl_penalty(
            tokens.logprobs_T, tokens.reference_logprobs_T, estimator, gradient
        )
    if objective.teacher_coeff is not None and tokens.teacher_logprobs_T is not None:
        teacher_kl_T = tokens.teacher_kl_T
        if teacher_kl_T is None:
            teacher_kl_T = kl_penalty(tokens.logprobs_T, tokens.teacher_logprobs_T, "k1", "k2")
        loss_T = loss_T + objective.teacher_coeff * teacher_kl_T
    if objective.entropy_coeff:
        loss_T = loss_T - objective.entropy_coeff * tokens.entropy_T
    loss = tokens.total(loss_T * tokens.loss_weights_T)
    sums, maxima = update_statistics(tokens, token_loss, correction_T, cp)
    sums |= {"loss": loss.detach(), "objective": of_tokens.detach()}
    if objective.shift_floor is not None:
        sums |= router_shift_statistics(tokens, objective.shift_floor)
    return PolicyLoss(loss=loss, count=sums["count"].to(torch.int), sums=sums, maxima=maxima)


def clipped(log_ratio_T: Tensor, advantages_T: Tensor, clip: Clip, *, dual_clip: float | None) -> TokenLoss:
    """Return -min(r A, clip(r) A) (PPO, arXiv 1707.06347); with `dual_clip`, at most -dual_clip A where A < 0
    (arXiv 1912.09729).
    """
    ratio_T = bounded_exp(log_ratio_T)
    objective_T = torch.minimum(
        ratio_T * advantages_T, ratio_T.clamp(1 - clip.low, 1 + clip.high) * advantages_T
    )
    # The minimum picks the clipped side, which has no gradient, only if the ratio moved with the advantage.
    low_T = (ratio_T < 1 - clip.low) & (advantages_T < 0)
    high_T = (ratio_T > 1 + clip.high) & (advantages_T > 0)
    if dual_clip:
        bounded_T = torch.maximum(objective_T, dual_clip * advantages_T)
        objective_T = bounded_T.where(advantages_T < 0, objective_T)
        high_T = high_T | ((ratio_T > dual_clip) & (advantages_T < 0))
    return TokenLoss(-objective_T, low_T, high_T)


def weighted_logprob(log_ratio_T: Tensor, logprobs_T: Tensor, advantages_T: Tensor, clip: Clip) -> TokenLoss:
    """Return -sg[clip(r)] A log p: a clipped token has a bounded weight but keeps its gradient."""
    ratio_T = bounded_exp(log_ratio_T.detach())
    finite_T = logprobs_T.masked_fill(logprobs_T == -torch.inf, 0.0)
    loss_T = -ratio_T.clamp(1 - clip.low, 1 + clip.high) * advantages_T * finite_T
    # A token with zero advantage has no gradient for the clip to change.
    has_signal_T = advantages_T != 0
    return TokenLoss(
        loss_T, (ratio_T < 1 - clip.low) & has_signal_T, (ratio_T > 1 + clip.high) & has_signal_T
    )


def squared_error(log_ratio_of_sequence_T: Tensor, advantages_T: Tensor, *, tau: float) -> TokenLoss:
    """Return (A - tau R)^2 with the log-ratio R of the whole sequence; nothing is clipped."""
    never_T = torch.zeros_like(advantages_T, dtype=torch.bool)
    return TokenLoss((advantages_T - tau * log_ratio_of_sequence_T).square(), never_T, never_T)


def clipped_geometric_mean(
    log_ratio_T: Tensor, sequence_T: Tensor, lengths_N: Tensor, advantages_T: Tensor, clip: Clip, cp: Axis
) -> TokenLoss:
    """Collective over `cp`: return -A times the geometric mean of a sequence's ratios, each clipped on the side to
    which the advantage pushes it (GMPO, arXiv 2507.20673).
    """
    log_low, log_high = math.log1p(-clip.low), math.log1p(clip.high)
    low_T = (log_ratio_T < log_low) & (advantages_T < 0)
    high_T = (log_ratio_T > log_high) & (advantages_T > 0)
    clipped_T = log_ratio_T.masked_fill(low_T, log_low).masked_fill(high_T, log_high)
    mean_T = bounded_exp(anchored_means(clipped_T, sequence_T, lengths_N, cp))
    return TokenLoss(-mean_T * advantages_T, low_T, high_T)


def log_ratio_in_use(tokens: PolicyTokens, shift_floor: float | None) -> Tensor:
    """Return log r, or log(r sg[max(gamma, floor)]) with the router-shift ratio gamma; 0 at untrained positions."""
    if shift_floor is None or tokens.router_shift_T is None:
        return tokens.log_ratio_T
    factor_T = tokens.router_shift_T.detach().clamp(min=shift_floor)
    return tokens.log_ratio_T + factor_T.log().where(tokens.mask_T, 0.0)


def grpo(
    tokens: PolicyTokens, cp: Axis, *, clip: Clip, dual_clip: float | None, shift_floor: float | None
) -> TokenLoss:
    """GRPO: clipped token ratios. PPO differs only in its default aggregation."""
    log_ratio_T = log_ratio_in_use(tokens, shift_floor)
    return clipped(log_ratio_T, tokens.advantages_T, clip, dual_clip=dual_clip)


def gspo_token(
    tokens: PolicyTokens, cp: Axis, *, clip: Clip, dual_clip: float | None, shift_floor: float | None
) -> TokenLoss:
    """GSPO-token: clipped ratios s_t = sg[s] p_t / sg[p_t], the sequence's ratio with each token's own gradient.

    With a single advantage per sequence this equals GSPO, in value and gradient.
    """
    log_ratio_T = anchored_means(
        log_ratio_in_use(tokens, shift_floor), tokens.sequence_T, tokens.lengths_N, cp
    )
    return clipped(log_ratio_T, tokens.advantages_T, clip, dual_clip=dual_clip)


def rspo(tokens: PolicyTokens, cp: Axis, *, clip: Clip, shift_floor: float | None) -> TokenLoss:
    """RSPO: GMPO with ratios multiplied by the router-shift ratio before the clip."""
    log_ratio_T = log_ratio_in_use(tokens, shift_floor)
    return clipped_geometric_mean(
        log_ratio_T, tokens.sequence_T, tokens.lengths_N, tokens.advantages_T, clip, cp
    )


def kimi_k2(tokens: PolicyTokens, cp: Axis, *, tau: float) -> TokenLoss:
    """Kimi K2: mean over sequences of (A - tau R)^2, to which each token contributes 1 / length."""
    means_T = anchored_means(tokens.log_ratio_T, tokens.sequence_T, tokens.lengths_N, cp)
    # R, a sum, is the mean times the length; the aggregation divides the gradient by the length again.
    log_ratio_of_sequence_T = means_T * tokens.lengths_N[tokens.sequence_T]
    return squared_error(log_ratio_of_sequence_T, tokens.advantages_T, tau=tau)


def cispo(tokens: PolicyTokens, cp: Axis, *, clip: Clip) -> TokenLoss:
    """CISPO: logprobs weighted by clipped token ratios."""
    return weighted_logprob(tokens.log_ratio_T, tokens.logprobs_T, tokens.advantages_T, clip)


def kl_penalty(logprobs_T: Tensor, reference_T: Tensor, estimator: str, gradient: str) -> Tensor:
    """Return KL(policy || reference) at sampled tokens: the value of `estimator`, with its own or k2's gradient."""
    value_T = kl_estimate(logprobs_T, reference_T, estimator)
    if gradient == "estimator":
        return value_T
    k2_T = kl_estimate(logprobs_T, reference_T, "k2")
    return value_T.detach() + (k2_T - k2_T.detach())  # zero in value, k2 in the gradient


@torch.no_grad()
def importance_sampling_weights(tokens: PolicyTokens, correction: Correction, cp: Axis) -> Tensor:
    """Collective over `cp`: return each token's weight that corrects for the rollout-training mismatch, from the ratio
    of its probabilities under the old policy and the rollout engine.

    `truncate` caps the weights (truncated importance sampling); `mask` sets weights outside the bounds to 0 (masked
    importance sampling). Both use the token's ratio, or with `sequence_` the geometric mean over its sequence.
    """
    assert tokens.rollout_logprobs_T is not None, "rl.loss.importance_sampling needs the rollout's logprobs"
    log_weight_T = log_difference(tokens.old_logprobs_T, tokens.rollout_logprobs_T).where(tokens.mask_T, 0.0)
    if correction.kind.startswith("sequence"):
        log_weight_T = anchored_means(log_weight_T, tokens.sequence_T, tokens.lengths_N, cp)
    weight_T = bounded_exp(log_weight_T)
    if correction.kind.endswith("truncate"):
        return weight_T.clamp(max=correction.high)
    return weight_T.where((weight_T >= correction.low) & (weight_T <= correction.high), 0.0)
