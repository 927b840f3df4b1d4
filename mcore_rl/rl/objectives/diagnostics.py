"""What is told of a policy update: how far the policy went, and what was clipped."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from mcore_rl.obs.metrics import Metric
from mcore_rl.parallel.mesh import Axis
from mcore_rl.rl.objectives.aggregation import sequence_sums
from mcore_rl.rl.objectives.policy_tokens import PolicyTokens, TokenLoss


class LossFacts(NamedTuple):
    """Of one microbatch on one rank: what is added up over the world, and what the maximum is taken of."""

    sums: dict[str, Tensor]
    maxima: dict[str, Tensor]


def kl_estimate(logprobs_T: Tensor, other_T: Tensor, estimator: str) -> Tensor:
    """KL(p || q) from tokens that p gave, with d = log q / p: k1 = -d, k2 = d^2 / 2, k3 = e^d - 1 - d."""
    difference_T = other_T - logprobs_T
    if estimator == "k1":
        return -difference_T
    return difference_T.square() / 2 if estimator == "k2" else difference_T.expm1() - difference_T


@torch.no_grad()
def loss_facts(tokens: PolicyTokens, token_loss: TokenLoss, mismatch_T: Tensor | None, cp: Axis) -> LossFacts:
    """Collective over `cp`: sums over trained tokens; a sequence counts 1 / length a token, so that it may lie on
    several ranks.
    """
    drift_T = tokens.log_ratio_T.expm1()
    share_T = 1.0 / tokens.lengths_N.clamp(min=1)[tokens.sequence_T].double()
    sums = {
        "count": tokens.mask_T.sum(),
        "sequences": tokens.total(share_T),
        "entropy": tokens.total(tokens.entropy_T),
        "kl_old": tokens.total(kl_estimate(tokens.old_logprobs_T, tokens.logprobs_T, "k3")),
        "drift": tokens.total(drift_T),
        "drift_squared": tokens.total(drift_T.square()),
    }
    for name, clipped_T in (("low", token_loss.clipped_low_T), ("high", token_loss.clipped_high_T)):
        counts_N = sequence_sums(clipped_T & tokens.mask_T, tokens.sequence_T, len(tokens.lengths_N), cp)
        sums[f"{name}_tokens"] = tokens.total(clipped_T.double())
        sums[f"{name}_sequences"] = tokens.total(share_T * (counts_N > 0)[tokens.sequence_T])
    trained = torch.where(tokens.mask_T, 0.0, -torch.inf)
    maxima = {
        "log_ratio": (tokens.log_ratio_T + trained).max(),
        "minus_log_ratio": (trained - tokens.log_ratio_T).max(),
    }
    if tokens.reference_logprobs_T is not None:
        sums["kl_reference"] = tokens.total(kl_estimate(tokens.logprobs_T, tokens.reference_logprobs_T, "k3"))
    if tokens.engine_logprobs_T is not None:
        gap_T = tokens.old_logprobs_T - tokens.engine_logprobs_T
        sums["mismatch_kl"] = tokens.total(gap_T.expm1() - gap_T)
        maxima["mismatch"] = gap_T.abs().where(tokens.mask_T, 0.0).max()
    if mismatch_T is not None:
        sums["mismatch_dropped"] = tokens.total((mismatch_T == 0).double())
    return LossFacts(sums, maxima)


TOKEN_MEANS = {
    "loss": "policy/loss",
    "objective": "policy/objective",
    "entropy": "policy/entropy_nats",
    "kl_old": "policy/kl_old_nats",
    "kl_reference": "policy/kl_reference_nats",
    "low_tokens": "policy/clip_ratio_low",
    "high_tokens": "policy/clip_ratio_high",
    "mismatch_kl": "rollout/mismatch_kl_nats",
    "mismatch_dropped": "rollout/importance_sampling_masked_fraction",
}


def loss_metrics(sums: Mapping[str, float], maxima: Mapping[str, float]) -> Iterator[Metric]:
    """Metrics from a step's sums and maxima over the world and all microbatches."""
    count, sequences = sums["count"], sums["sequences"]
    for name, metric in TOKEN_MEANS.items():
        if name in sums:
            yield Metric(metric, sums[name], count)
    for side in ("low", "high"):
        yield Metric(f"policy/clip_ratio_{side}_sequences", sums[f"{side}_sequences"], sequences)
    mean = sums["drift"] / count
    yield Metric("policy/ratio_mean", count + sums["drift"], count)
    # About 1, so that the small variance of numbers near 1 is not lost in rounding.
    yield Metric("policy/ratio_variance", sums["drift_squared"] - count * mean**2, count)
    yield Metric("policy/log_ratio_max", maxima["log_ratio"])
    yield Metric("policy/log_ratio_min", -maxima["minus_log_ratio"])
    if "mismatch" in maxima:
        yield Metric("rollout/mismatch_max", maxima["mismatch"])
