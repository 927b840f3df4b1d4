"""Difference between a server's and the trainer's logprobs of the probe, and its limits."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

FP32_LIMIT = 2e-4
"""Limit of the largest difference, in nats, if both compute in fp32; vLLM 0.32 was measured at 5e-6."""
ROUNDING_FACTOR = 3.0
"""Limit of the mean difference in lower precision, as a multiple of the mean difference that rounding causes within
the trainer."""
MOST_MEAN = 0.1
"""Upper bound of the limit of the mean difference, in nats, however large the effect of rounding."""
EXPERT_RATIO, EXPERT_ERRORS = 1.35, 7.0
"""An expert counts as different from the trainer's if the difference of its tokens is more than this multiple of the
other tokens' difference, by more than this number of standard errors."""
FEWEST_TOKENS = 32
"""Minimum number of tokens of an expert for its difference to be significant in lower precision."""
QUANTILES = (0.25, 0.95)
"""Differences are clamped to these quantiles before their logarithms are averaged: differences near 0 carry no
information, and the largest come from tokens that rounding sent to different experts, not from weights."""


@dataclass(frozen=True, slots=True)
class ExpertDifference:
    """The expert with the most significant difference between its tokens and all other tokens."""

    layer: int
    expert: int
    ratio: float
    """Geometric mean of the differences of the expert's tokens, divided by the other tokens' geometric mean."""
    errors: float
    """Logarithm of `ratio` in standard errors."""

    @property
    def is_apart(self) -> bool:
        """Whether the server's expert differs from the trainer's."""
        return self.ratio > EXPERT_RATIO and self.errors > EXPERT_ERRORS


@dataclass(frozen=True, slots=True)
class ProbeDifference:
    """Difference between the logprobs of a server and the trainer, in nats."""

    largest: float
    mean: float
    """Mean of the absolute differences."""
    expert: ExpertDifference | None = None
    """The expert that differs most; None if experts are not compared, or none has enough tokens."""


@dataclass(frozen=True, slots=True)
class ProbeLimit:
    """Limit of a difference above which the server does not have the trainer's weights."""

    statistic: Literal["largest", "mean"]
    limit: float

    def holds(self, difference: ProbeDifference) -> bool:
        """Whether a difference is within the limits; a NaN is not."""
        return self.excess(difference) is None

    def of(self, difference: ProbeDifference) -> float:
        """Return the statistic of a difference that the limit applies to."""
        return difference.largest if self.statistic == "largest" else difference.mean

    def excess(self, difference: ProbeDifference) -> str | None:
        """Describe how a difference exceeds the limits; None if it does not."""
        reasons = []
        if not self.of(difference) < self.limit:
            reasons.append(
                f"logprobs of the probe differ by {difference.largest:.3g} at most and {difference.mean:.3g} in the "
                f"mean, of which the {self.statistic} may be {self.limit:.3g}"
            )
        expert = difference.expert
        if expert is not None and expert.is_apart:
            reasons.append(
                f"logprobs of the tokens of expert {expert.expert} in layer {expert.layer} differ by "
                f"{expert.ratio:.3g} times as much as the others, {expert.errors:.3g} standard errors; rounding makes "
                f"{EXPERT_RATIO:g} times and {EXPERT_ERRORS:g} at most"
            )
        return "; ".join(reasons) or None


def probe_limit(rounding_nats: float | None, tolerance: float | None = None) -> ProbeLimit:
    """Return the limit of the difference between a server and a trainer.

    Args:
        rounding_nats: Mean difference that rounding causes within the trainer; None: both compute in fp32.
        tolerance: Replaces the computed limit.
    """
    if rounding_nats is None:
        return ProbeLimit("largest", FP32_LIMIT if tolerance is None else tolerance)
    return ProbeLimit(
        "mean", min(MOST_MEAN, ROUNDING_FACTOR * rounding_nats) if tolerance is None else tolerance
    )


def difference_of(
    ours_NT: Tensor, theirs: Tensor | Sequence[Sequence[float]], experts_NTLK: Tensor | None = None
) -> ProbeDifference:
    """Return the difference between two lists of logprobs `[N, T]` of the same sequences.

    Args:
        ours_NT: The trainer's logprobs, in nats.
        theirs: The server's logprobs, in nats.
        experts_NTLK: Experts that the trainer chose at the position that predicts each token, -1 in layers without
            experts; None: experts are not compared.
    """
    apart_NT = (torch.as_tensor(theirs, dtype=torch.float64) - ours_NT).abs()
    largest = math.nan if apart_NT.isnan().any() else float(apart_NT.max())
    expert = None if experts_NTLK is None else _most_apart(apart_NT.flatten(), experts_NTLK.flatten(0, 1))
    return ProbeDifference(largest, float(apart_NT.mean()), expert)


def tokens_of_experts(experts_MLK: Tensor, num_experts: int) -> Tensor:
    """Return how many of M tokens have chosen each expert, int64 `[L, E]`; -1 means no choice."""
    chosen_LM = experts_MLK.transpose(0, 1).flatten(1)
    counts_LE = torch.zeros(len(chosen_LM), num_experts + 1, dtype=torch.int64)
    return counts_LE.scatter_add_(1, (chosen_LM + 1).long(), torch.ones_like(chosen_LM, dtype=torch.int64))[
        :, 1:
    ]


def _most_apart(apart_M: Tensor, experts_MLK: Tensor) -> ExpertDifference | None:
    """Return the expert that differs most from all other tokens, in standard errors; None if none has enough tokens."""
    low, high = torch.quantile(apart_M, apart_M.new_tensor(QUANTILES))
    logs_M = apart_M.clamp(max(float(low), torch.finfo(apart_M.dtype).tiny), float(high)).log()
    num_experts = int(experts_MLK.max()) + 1
    counts_LE = tokens_of_experts(experts_MLK, num_experts)
    chosen_LM = experts_MLK.transpose(0, 1).flatten(1)
    logs_LM = logs_M.repeat_interleave(experts_MLK.shape[2]).expand(len(chosen_LM), -1)
    sums_LE = torch.zeros(counts_LE.shape[0], num_experts + 1, dtype=logs_M.dtype)
    sums_LE = sums_LE.scatter_add_(1, (chosen_LM + 1).long(), logs_LM)[:, 1:]
    others_LE = len(logs_M) - counts_LE
    has_enough_LE = (counts_LE >= FEWEST_TOKENS) & (others_LE >= FEWEST_TOKENS)
    if not has_enough_LE.any() or not logs_M.std() > 0:
        return None
    logs_LE = sums_LE / counts_LE - (logs_M.sum() - sums_LE) / others_LE
    errors_LE = logs_LE / (logs_M.std() * (1 / counts_LE + 1 / others_LE).sqrt())
    best = int(errors_LE.where(has_enough_LE, -math.inf).argmax())
    layer, expert = divmod(best, num_experts)
    return ExpertDifference(
        layer, expert, math.exp(float(logs_LE[layer, expert])), float(errors_LE[layer, expert])
    )
