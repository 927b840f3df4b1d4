"""Statistics of a policy update: distance from the old policy and the reference, and clipped tokens."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from mcore_rl.megatron.mesh import Axis
from mcore_rl.metrics.metrics import Metric
from mcore_rl.rl.objectives.aggregation import sequence_sums
from mcore_rl.rl.objectives.policy_tokens import (
    LOG_RATIO_LIMIT,
    PolicyTokens,
    TokenLoss,
    is_beyond_limit,
    log_difference,
)


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
    """Collective over `cp`: return statistics of one microbatch on this rank.

    Args:
        correction_T: importance-sampling weights that correct for the rollout engine; None without a correction.

    Returns:
        Sums over trained tokens, to be summed over the world, and values to be maximised over the world.
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
        beyond_T |= is_beyond_limit(tokens.teacher_logprobs_T, tokens.logprobs_T)
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


TOKEN_MEANS = {
    "loss": "policy/loss",
    "objective": "policy/objective",
    "entropy": "policy/entropy_nats",
    "kl_old": "policy/kl_old_nats",
    "kl_reference": "policy/kl_reference_nats",
    "kl_teacher": "teacher/kl_nats",
    "clipped_low": "policy/clip_ratio_low",
    "clipped_high": "policy/clip_ratio_high",
    "clamped": "policy/clamped_fraction",
    "router_shift": "policy/router_shift_ratio",
    "router_shift_floored": "policy/router_shift_floored_fraction",
    "mismatch_kl": "rollout/mismatch_kl_nats",
    "correction_masked": "rollout/importance_sampling_masked_fraction",
}
"""Metric name of each sum that is reported as a mean over trained tokens."""


def update_metrics(sums: Mapping[str, float], maxima: Mapping[str, float]) -> Iterator[Metric]:
    """Yield the metrics of an update from its statistics, reduced over the world and all microbatches."""
    count, sequences = sums["count"], sums["sequences"]
    for name, metric in TOKEN_MEANS.items():
        if name in sums:
            yield Metric(metric, sums[name], count)
    if "ptx_loss" in sums:
        yield Metric("ptx/loss_nats", sums["ptx_loss"], sums["ptx_count"])
    for side in ("low", "high"):
        yield Metric(f"policy/clip_ratio_{side}_sequences", sums[f"clipped_{side}_sequences"], sequences)
    mean = sums["ratio_minus_1"] / count
    yield Metric("policy/ratio_mean", count + sums["ratio_minus_1"], count)
    # Moments about 1, so that rounding does not swamp the small variance of ratios near 1.
    yield Metric("policy/ratio_variance", max(0.0, sums["ratio_minus_1_squared"] - count * mean**2), count)
    yield Metric("policy/log_ratio_max", maxima["log_ratio"])
    yield Metric("policy/log_ratio_min", -maxima["minus_log_ratio"])
    if "mismatch" in maxima:
        yield Metric("rollout/mismatch_max", maxima["mismatch"])


def staleness_metrics(sums: Mapping[str, float]) -> Iterator[Metric]:
    """Yield, from the same statistics, the fraction of stale tokens and the mismatch of current tokens."""
    num_current = sums["count"] - sums["stale"]
    yield Metric("rollout/stale_fraction", sums["stale"], sums["count"])
    if num_current:
        yield Metric("rollout/mismatch_kl_current_nats", sums["mismatch_kl_current"], num_current)
