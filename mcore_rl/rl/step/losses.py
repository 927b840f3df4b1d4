"""Policy losses: each returns a weighted sum over tokens, to be minimised, and a count.

Each loss is the closed form in the paper that config/rl/loss.py cites. The ratio r of a token is its probability under
the policy divided by its probability under the old policy, which sampled the completions. A is the token's advantage,
and sg stops the gradient.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_rl.config.rl.loss import Aggregation, Clip, Correction
from mcore_rl.megatron.mesh import Axis
from mcore_rl.rl.batch import BatchTotals

LOG_RATIO_LIMIT = 20.0
"""Largest x, in nats, for which e^x is computed: a ratio of 5e8 only arises when training has broken down. In float32
e^88.8 overflows, and its gradient, times the 0 of a clip, would be NaN."""


def log_difference(logprobs_T: Tensor, other_T: Tensor) -> Tensor:
    """Return `logprobs - other`, finite: +-LOG_RATIO_LIMIT, without gradient, if exactly one logprob is -inf, and 0 if
    both are. NaN stays NaN.
    """
    both_T = (logprobs_T == -torch.inf) & (other_T == -torch.inf)
    difference_T = (logprobs_T - other_T).masked_fill(both_T, 0.0)
    difference_T = difference_T.masked_fill(difference_T == torch.inf, LOG_RATIO_LIMIT)
    return difference_T.masked_fill(difference_T == -torch.inf, -LOG_RATIO_LIMIT)


def bounded_exp(log_ratio_T: Tensor) -> Tensor:
    """Return e^x, capped at e^LOG_RATIO_LIMIT; no gradient at the cap."""
    return log_ratio_T.clamp(max=LOG_RATIO_LIMIT).exp()


def is_beyond_limit(logprobs_T: Tensor, other_T: Tensor) -> Tensor:
    """Return a mask, bool `[T]`: True where `log_difference` or `bounded_exp` limits `logprobs - other`."""
    difference_T = logprobs_T - other_T
    return (difference_T > LOG_RATIO_LIMIT) | (logprobs_T == -torch.inf) | (other_T == -torch.inf)


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyTokens:
    """This rank's `T` positions of one microbatch, flat, from `N` sequences, which context parallelism spreads over the
    ranks of `cp`; all have the same `lengths_N`. Values at untrained positions are finite and unused.
    """

    logprobs_T: Tensor
    """Logprobs under the policy, with gradient."""
    entropy_T: Tensor
    """Entropy of the policy's next token in nats, with gradient if the loss has an entropy bonus."""
    old_logprobs_T: Tensor
    """Logprobs under the old policy, assumed to have sampled the completions."""
    reference_logprobs_T: Tensor | None
    """Logprobs under the reference policy; None without a reference."""
    rollout_logprobs_T: Tensor | None
    """Logprobs from the rollout engine; None: no comparison with them."""
    advantages_T: Tensor
    mask_T: Tensor
    """bool: positions that are trained on."""
    loss_weights_T: Tensor
    """Weight of each position in the sum, from `loss_weights` over the whole minibatch."""
    sequence_T: Tensor
    """int64: sequence (0 ... N - 1) of each position; arbitrary where the mask is False."""
    lengths_N: Tensor
    """int64: number of trained tokens in each whole sequence."""
    router_shift_T: Tensor | None = None
    """Router-shift ratio of each token, 0 ... 1, without gradient (rl/step/router_shift.py); None means 1."""
    teacher_logprobs_T: Tensor | None = None
    """Logprobs under the teacher; None without a teacher."""
    teacher_kl_T: Tensor | None = None
    """KL to the teacher over the whole vocabulary, with gradient; None: estimate it from the sampled token."""
    teacher_forward_kl_T: Tensor | None = None
    """KL from the teacher over its likeliest tokens and all others as one, with gradient; None: it is not used."""
    is_stale_T: Tensor | None = None
    """bool: positions that predict a token sampled by weights older than the old policy's. None: no such tokens."""

    @property
    def log_ratio_T(self) -> Tensor:
        """log(policy / old policy) of each token, from `log_difference`; 0 at untrained positions."""
        return log_difference(self.logprobs_T, self.old_logprobs_T).where(self.mask_T, 0.0)

    def total(self, values_T: Tensor) -> Tensor:
        """Return the sum over trained positions."""
        return values_T.where(self.mask_T, 0.0).sum()


class TokenLoss(NamedTuple):
    """Loss of each token `[T]`, and masks of tokens that lost their gradient to a clip (CISPO: clipped weight)."""

    loss_T: Tensor
    """Loss to be minimised, with gradient. Values at untrained positions are unused but must be finite."""
    clipped_low_T: Tensor
    """bool: tokens clipped at the lower bound."""
    clipped_high_T: Tensor
    """bool: tokens clipped at the upper bound."""


def loss_weights(lengths_N: Tensor, totals: BatchTotals, aggregation: Aggregation, *, norm_tokens: int) -> Tensor:
    """Return the loss weight of each sequence's tokens, float64 `[N]`; 0 for sequences without a trained token. The
    world's weighted sum divided by `totals.num_tokens` is then the mean that `aggregation` names;
    "seq_mean_token_sum_norm" divides a sequence's sum by `norm_tokens` (arXiv 2503.20783).
    """
    if aggregation == "token_mean":
        loss_weights_N = torch.ones_like(lengths_N, dtype=torch.float64)
    elif aggregation == "seq_mean_token_mean":
        loss_weights_N = totals.num_tokens / (totals.num_sequences * lengths_N.double())
    else:
        loss_weights_N = torch.full_like(
            lengths_N, totals.num_tokens / (totals.num_sequences * norm_tokens), dtype=torch.float64
        )
    return loss_weights_N.where(lengths_N > 0, 0.0)


@torch.no_grad()
def sequence_sums(values_T: Tensor, sequence_T: Tensor, num_sequences: int, cp: Axis) -> Tensor:
    """Collective over `cp`: return the sum over each whole sequence, of which a rank may have a part; no gradient. Sums
    are float64 `[N]`, so that they do not depend on how the sequence is divided.
    """
    sums_N = torch.zeros(num_sequences, dtype=torch.float64, device=values_T.device)
    sums_N.index_add_(0, sequence_T, values_T.double())
    if cp.size > 1:
        dist.all_reduce(sums_N, group=cp.group)
    return sums_N


def anchored_means(values_T: Tensor, sequence_T: Tensor, lengths_N: Tensor, cp: Axis) -> Tensor:
    """Collective over `cp`: return at each token the mean of its whole sequence, with the gradient of the token itself.
    The sum over a sequence of f(anchored mean) / length has the value and the gradient of f(mean), without a collective
    in the backward pass.
    """
    means_N = sequence_sums(values_T, sequence_T, len(lengths_N), cp) / lengths_N.clamp(min=1)
    return means_N[sequence_T].to(values_T.dtype) + (values_T - values_T.detach())


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
    """KL to the reference policy or the old policy, as a term of the loss."""

    to: Literal["reference", "old"]
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
    off_policy_mask: float | None = None
    """Mean log ratio of engine to policy above which a completion's bad tokens are left out. None: never."""
    kl: KlTerm | None = None
    teacher_coeff: float | None = None
    """Coefficient of the KL to a teacher, at tokens with teacher logprobs. None: no such term."""
    forward_coeff: float = 0.0
    """Coefficient of the KL from a teacher, at tokens with `teacher_forward_kl_T`."""
    entropy_coeff: float = 0.0
    """Coefficient of the entropy bonus."""


def policy_loss(tokens: PolicyTokens, objective: Objective, cp: Axis) -> PolicyLoss:
    """Collective over `cp` (in the forward pass only): return the policy's loss: the token loss, corrected for the
    rollout-training mismatch, plus the KL penalty, plus the KLs to and from a teacher, minus the entropy bonus.
    """
    token_loss = objective.token_loss(tokens, cp)
    correction_T = None
    if objective.correction is not None:
        correction_T = importance_sampling_weights(tokens, objective.correction, cp)
    if objective.off_policy_mask is not None:
        kept_T = off_policy_weights(tokens, objective.off_policy_mask, cp)
        correction_T = kept_T if correction_T is None else correction_T * kept_T
    loss_T = token_loss.loss_T if correction_T is None else token_loss.loss_T * correction_T
    of_tokens = tokens.total(loss_T * tokens.loss_weights_T)
    if objective.kl is not None:
        to, coeff, estimator, gradient = objective.kl
        other_T = tokens.reference_logprobs_T if to == "reference" else tokens.old_logprobs_T
        assert other_T is not None, "rl.loss.kl_coeff needs the reference's logprobs"
        loss_T = loss_T + coeff * kl_penalty(tokens.logprobs_T, other_T, estimator, gradient)
    if objective.teacher_coeff is not None and tokens.teacher_logprobs_T is not None:
        teacher_kl_T = tokens.teacher_kl_T
        if teacher_kl_T is None:
            teacher_kl_T = kl_penalty(tokens.logprobs_T, tokens.teacher_logprobs_T, "k1", "k2")
        loss_T = loss_T + objective.teacher_coeff * teacher_kl_T
    if tokens.teacher_forward_kl_T is not None:
        loss_T = loss_T + objective.forward_coeff * tokens.teacher_forward_kl_T
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
    objective_T = torch.minimum(ratio_T * advantages_T, ratio_T.clamp(1 - clip.low, 1 + clip.high) * advantages_T)
    # The minimum picks the clipped side, which has no gradient, only if the ratio moved with the advantage.
    low_T = (ratio_T < 1 - clip.low) & (advantages_T < 0)
    high_T = (ratio_T > 1 + clip.high) & (advantages_T > 0)
    if dual_clip:
        bounded_T = torch.maximum(objective_T, dual_clip * advantages_T)
        objective_T = bounded_T.where(advantages_T < 0, objective_T)
        high_T = high_T | ((ratio_T > dual_clip) & (advantages_T < 0))
    return TokenLoss(-objective_T, low_T, high_T)


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
    """GSPO-token: clipped ratios s_t = sg[s] p_t / sg[p_t], the sequence's ratio with each token's own gradient. With a
    single advantage per sequence this equals GSPO, in value and gradient.
    """
    log_ratio_T = anchored_means(log_ratio_in_use(tokens, shift_floor), tokens.sequence_T, tokens.lengths_N, cp)
    return clipped(log_ratio_T, tokens.advantages_T, clip, dual_clip=dual_clip)


def rspo(tokens: PolicyTokens, cp: Axis, *, clip: Clip, shift_floor: float | None) -> TokenLoss:
    """RSPO: -A times the geometric mean of a sequence's ratios, each multiplied by the router-shift ratio, then clipped
    on the side to which the advantage pushes it. Without the router shift this is GMPO (arXiv 2507.20673).
    """
    log_ratio_T, advantages_T = log_ratio_in_use(tokens, shift_floor), tokens.advantages_T
    log_low, log_high = math.log1p(-clip.low), math.log1p(clip.high)
    low_T = (log_ratio_T < log_low) & (advantages_T < 0)
    high_T = (log_ratio_T > log_high) & (advantages_T > 0)
    clipped_T = log_ratio_T.masked_fill(low_T, log_low).masked_fill(high_T, log_high)
    mean_T = bounded_exp(anchored_means(clipped_T, tokens.sequence_T, tokens.lengths_N, cp))
    return TokenLoss(-mean_T * advantages_T, low_T, high_T)


def kimi_k2(tokens: PolicyTokens, cp: Axis, *, tau: float) -> TokenLoss:
    """Kimi K2: mean over sequences of (A - tau R)^2 with the log-ratio R of the whole sequence, to which each token
    contributes 1 / length; nothing is clipped.
    """
    means_T = anchored_means(tokens.log_ratio_T, tokens.sequence_T, tokens.lengths_N, cp)
    # R, a sum, is the mean times the length; the aggregation divides the gradient by the length again.
    log_ratio_of_sequence_T = means_T * tokens.lengths_N[tokens.sequence_T]
    never_T = torch.zeros_like(tokens.mask_T)
    return TokenLoss((tokens.advantages_T - tau * log_ratio_of_sequence_T).square(), never_T, never_T)


def cispo(tokens: PolicyTokens, cp: Axis, *, clip: Clip) -> TokenLoss:
    """CISPO: -sg[clip(r)] A log p: a clipped token has a bounded weight but keeps its gradient."""
    ratio_T, logprobs_T = bounded_exp(tokens.log_ratio_T.detach()), tokens.logprobs_T
    finite_T = logprobs_T.masked_fill(logprobs_T == -torch.inf, 0.0)
    loss_T = -ratio_T.clamp(1 - clip.low, 1 + clip.high) * tokens.advantages_T * finite_T
    # A token with zero advantage has no gradient for the clip to change.
    has_signal_T = tokens.advantages_T != 0
    return TokenLoss(loss_T, (ratio_T < 1 - clip.low) & has_signal_T, (ratio_T > 1 + clip.high) & has_signal_T)


def dppo_tv(tokens: PolicyTokens, cp: Axis, *, clip: Clip, ratio_limit: float) -> TokenLoss:
    """DPPO-TV: -min(r, limit) A with the gradient of -sg[min(r, limit)] A log p, and none where the probability moved
    by more than a bound to the side of the advantage (binary total variation, arXiv 2602.04879).
    """
    logprobs_T, advantages_T = tokens.logprobs_T, tokens.advantages_T
    old_T = tokens.old_logprobs_T.where(tokens.mask_T, logprobs_T.detach())
    log_ratio_T = log_difference(logprobs_T, old_T)
    weight_T = bounded_exp(log_ratio_T.detach()).clamp(max=ratio_limit)
    change_T = logprobs_T.detach().exp() - old_T.exp()
    low_T, high_T = (change_T < -clip.low) & (advantages_T < 0), (change_T > clip.high) & (advantages_T > 0)
    moving_T = log_ratio_T - log_ratio_T.detach()  # zero in value, log p in the gradient
    return TokenLoss(-weight_T * advantages_T * (1 + moving_T.masked_fill(low_T | high_T, 0.0)), low_T, high_T)


def sapo(tokens: PolicyTokens, cp: Axis, *, tau_positive: float, tau_negative: float) -> TokenLoss:
    """SAPO: -(4 / tau) sigmoid(tau (r - 1)) A, soft gates of ratios with GRPO's gradient at r = 1, for any tau
    (arXiv 2511.20347); nothing is clipped.
    """
    advantages_T = tokens.advantages_T
    tau_T = torch.full_like(advantages_T, tau_negative).masked_fill(advantages_T > 0, tau_positive)
    gate_T = 4 / tau_T * torch.sigmoid(tau_T * (bounded_exp(tokens.log_ratio_T) - 1))
    never_T = torch.zeros_like(tokens.mask_T)
    return TokenLoss(-gate_T * advantages_T, never_T, never_T)


def kl_penalty(logprobs_T: Tensor, reference_T: Tensor, estimator: str, gradient: str) -> Tensor:
    """Return KL(policy || reference) at sampled tokens: the value of `estimator`, with its own or k2's gradient."""
    value_T = kl_estimate(logprobs_T, reference_T, estimator)
    if gradient == "estimator":
        return value_T
    k2_T = kl_estimate(logprobs_T, reference_T, "k2")
    return value_T.detach() + (k2_T - k2_T.detach())  # zero in value, k2 in the gradient


@torch.no_grad()
def importance_sampling_weights(tokens: PolicyTokens, correction: Correction, cp: Axis) -> Tensor:
    """Collective over `cp`: return each token's weight, from the ratio of its probabilities under the old policy and
    the rollout engine, or with `sequence_` this ratio's geometric mean over the sequence. `truncate` caps it (truncated
    importance sampling); `mask` sets it to 0 outside the bounds (masked importance sampling).
    """
    assert tokens.rollout_logprobs_T is not None, "rl.loss.importance_sampling needs the rollout's logprobs"
    log_weight_T = log_difference(tokens.old_logprobs_T, tokens.rollout_logprobs_T).where(tokens.mask_T, 0.0)
    if correction.kind.startswith("sequence"):
        log_weight_T = anchored_means(log_weight_T, tokens.sequence_T, tokens.lengths_N, cp)
    weight_T = bounded_exp(log_weight_T)
    if correction.kind.endswith("truncate"):
        return weight_T.clamp(max=correction.high)
    return weight_T.where((weight_T >= correction.low) & (weight_T <= correction.high), 0.0)


@torch.no_grad()
def off_policy_weights(tokens: PolicyTokens, limit: float, cp: Axis) -> Tensor:
    """Collective over `cp`: return 0 for tokens with a negative advantage in a sequence whose mean of log(engine's
    probability / policy's) is above `limit`, and 1 for all others (arXiv 2512.02556).
    """
    assert tokens.rollout_logprobs_T is not None, "rl.loss.off_policy_mask needs the rollout's logprobs"
    gap_T = log_difference(tokens.rollout_logprobs_T, tokens.logprobs_T).where(tokens.mask_T, 0.0)
    means_T = anchored_means(gap_T, tokens.sequence_T, tokens.lengths_N, cp)
    return torch.ones_like(gap_T).masked_fill((means_T > limit) & (tokens.advantages_T < 0), 0.0)


def kl_estimate(logprobs_T: Tensor, other_T: Tensor, estimator: str) -> Tensor:
    """Return an estimate of KL(p || q) at each token sampled from p, with d = log(q / p): k1 = -d, k2 = d^2 / 2,
    k3 = e^d - 1 - d (http://joschu.net/blog/kl-approx.html). For k3, d is limited to at most LOG_RATIO_LIMIT.
    """
    difference_T = log_difference(other_T, logprobs_T)
    if estimator == "k1":
        return -difference_T
    if estimator == "k2":
        return difference_T.square() / 2
    # Both terms have the same bound: if only e^d were bounded, the gradient beyond it would change sign.
    difference_T = difference_T.clamp(max=LOG_RATIO_LIMIT)
    # expm1, because e^d - 1 would lose the small differences of a policy that has hardly moved.
    return difference_T.expm1() - difference_T


@torch.no_grad()
def update_statistics(
    tokens: PolicyTokens, token_loss: TokenLoss, correction_T: Tensor | None, cp: Axis
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Collective over `cp`: return statistics of one microbatch on this rank: sums over trained tokens, to be summed
    over the world, and values to be maximised over it. `correction_T` are importance-sampling weights, or None.
    """
    # In float64, because the square of the largest ratio is e^40.
    ratio_minus_1_T = tokens.log_ratio_T.double().clamp(max=LOG_RATIO_LIMIT).expm1()
    beyond_T = is_beyond_limit(tokens.logprobs_T, tokens.old_logprobs_T)
    # Each token counts 1 / length of its sequence, because a sequence may be spread over several ranks.
    share_T = 1.0 / tokens.lengths_N.clamp(min=1)[tokens.sequence_T].double()
    sums = {
        "count": tokens.mask_T.sum(),
        "sequences": tokens.total(share_T),
        "advantages_abs": tokens.total(tokens.advantages_T.abs()),
        "entropy": tokens.total(tokens.entropy_T),
        "kl_old": tokens.total(kl_estimate(tokens.old_logprobs_T, tokens.logprobs_T, "k3")),
        "ratio_minus_1": tokens.total(ratio_minus_1_T),
        "ratio_minus_1_squared": tokens.total(ratio_minus_1_T.square()),
    }
    for side, clipped_T in (("low", token_loss.clipped_low_T), ("high", token_loss.clipped_high_T)):
        counts_N = sequence_sums(clipped_T & tokens.mask_T, tokens.sequence_T, len(tokens.lengths_N), cp)
        sums[f"clipped_{side}"] = tokens.total(clipped_T.double())
        sums[f"clipped_{side}_sequences"] = tokens.total(share_T * (counts_N > 0)[tokens.sequence_T])
    untrained_T = torch.where(tokens.mask_T, 0.0, -torch.inf)
    maxima = {
        "log_ratio": (tokens.log_ratio_T + untrained_T).max(),
        # A minimum as the maximum of the negative: the world's reduction supports only sums and maxima.
        "minus_log_ratio": (untrained_T - tokens.log_ratio_T).max(),
    }
    if tokens.reference_logprobs_T is not None:
        beyond_T |= is_beyond_limit(tokens.reference_logprobs_T, tokens.logprobs_T)
        sums["kl_reference"] = tokens.total(kl_estimate(tokens.logprobs_T, tokens.reference_logprobs_T, "k3"))
    if tokens.teacher_logprobs_T is not None:
        is_excluded_T = is_beyond_limit(tokens.teacher_logprobs_T, tokens.logprobs_T)
        beyond_T |= is_excluded_T
        sums["teacher_clamped"] = tokens.total(is_excluded_T.double())
        if tokens.teacher_forward_kl_T is not None:
            sums["kl_from_teacher"] = tokens.total(tokens.teacher_forward_kl_T)
        kl_T = tokens.teacher_kl_T
        if kl_T is None:
            kl_T = kl_estimate(tokens.logprobs_T, tokens.teacher_logprobs_T, "k3")
        sums["kl_teacher"] = tokens.total(kl_T)
    if tokens.rollout_logprobs_T is not None:
        difference_T = log_difference(tokens.old_logprobs_T, tokens.rollout_logprobs_T)
        beyond_T |= is_beyond_limit(tokens.old_logprobs_T, tokens.rollout_logprobs_T)
        mismatch_T = kl_estimate(tokens.rollout_logprobs_T, tokens.old_logprobs_T, "k3")
        sums["mismatch_kl"] = tokens.total(mismatch_T)
        if tokens.is_stale_T is not None:
            # Engine and trainer with the same weights: the difference of the engines, without staleness.
            sums["mismatch_kl_current"] = tokens.total(mismatch_T.where(~tokens.is_stale_T, 0.0))
            sums["mismatch_abs"] = tokens.total(difference_T.abs())
            sums["mismatch_abs_current"] = tokens.total(difference_T.abs().where(~tokens.is_stale_T, 0.0))
            sums["stale"] = tokens.total(tokens.is_stale_T.double())
        maxima["mismatch"] = difference_T.abs().where(tokens.mask_T, 0.0).max()
    sums["clamped"] = tokens.total(beyond_T.double())
    if correction_T is not None:
        sums["correction_masked"] = tokens.total((correction_T == 0).double())
    return sums, maxima


@torch.no_grad()
def router_shift_statistics(tokens: PolicyTokens, floor: float) -> dict[str, Tensor]:
    """Return the sum of the router-shift ratio over trained tokens, and the number of ratios below `floor`."""
    shift_T = tokens.router_shift_T
    if shift_T is None:  # the policy still is the old policy
        shift_T = torch.ones_like(tokens.logprobs_T)
    return {
        "router_shift": tokens.total(shift_T.double()),
        "router_shift_floored": tokens.total((shift_T < floor).double()),
    }
