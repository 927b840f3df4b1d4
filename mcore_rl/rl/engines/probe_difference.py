"""How far a server's logprobs of the probe are from the trainer's, and how far they may be."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

FP32_LIMIT = 2e-4
"""Largest difference in nats where both compute in fp32; 5e-6 were seen on vLLM 0.32."""
ROUNDING_FACTOR = 3.0
"""Limit of the mean difference in a lower precision, over that which rounding makes within the trainer."""
MOST_MEAN = 0.1
"""Limit of the mean difference in nats, however much rounding makes."""
EXPERT_RATIO, EXPERT_ERRORS = 1.35, 7.0
"""An expert is not the trainer's where its tokens differ by more than this multiple of the other tokens' difference,
and by more than this number of standard errors."""
FEWEST_TOKENS = 32
"""Tokens of an expert below which its difference shows nothing in a lower precision."""
QUANTILES = (0.25, 0.95)
"""Differences are cut off at these quantiles of all before their logarithms are averaged: those near 0 say nothing, and
those of tokens that took other experts by rounding say nothing of weights."""


@dataclass(frozen=True, slots=True)
class ExpertDifference:
    """The expert whose tokens differ most from all other tokens."""

    layer: int
    expert: int
    ratio: float
    """Geometric mean of the differences of the expert's tokens, over that of the others."""
    errors: float
    """Logarithm of `ratio` in standard errors."""

    @property
    def is_apart(self) -> bool:
        """Whether the expert is another one on the server."""
        return self.ratio > EXPERT_RATIO and self.errors > EXPERT_ERRORS


@dataclass(frozen=True, slots=True)
class ProbeDifference:
    """Difference of the logprobs of a server and of the trainer, in nats."""

    largest: float
    mean: float
    """Mean of the absolute differences."""
    expert: ExpertDifference | None = None
    """The expert that stands out most; None where the largest difference decides."""


@dataclass(frozen=True, slots=True)
class ProbeLimit:
    """Limit of a difference above which the server does not have the trainer's weights."""

    statistic: Literal["largest", "mean"]
    limit: float

    def holds(self, difference: ProbeDifference) -> bool:
        """Whether a difference is of the same weights; a NaN is not."""
        return self.excess(difference) is None

    def of(self, difference: ProbeDifference) -> float:
        """Return the number of a difference that the limit is for."""
        return difference.largest if self.statistic == "largest" else difference.mean

    def excess(self, difference: ProbeDifference) -> str | None:
        """Return how a difference shows other weights; None: it does not."""
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
        rounding_nats: Mean difference that rounding makes within the trainer; None: both compute in fp32.
        tolerance: Replaces the limit's number.
    """
    if rounding_nats is None:
        return ProbeLimit("largest", FP32_LIMIT if tolerance is None else tolerance)
    return ProbeLimit(
        "mean", min(MOST_MEAN, ROUNDING_FACTOR * rounding_nats) if tolerance is None else tolerance
    )


def difference_of(
    ours_NT: Tensor, theirs: Tensor | Sequence[Sequence[float]], experts_NTLK: Tensor | None = None
) -> ProbeDifference:
    """Return the difference of two lists of logprobs `[N, T]` of the same sequences.

    Args:
        ours_NT: The trainer's, in nats.
        theirs: The server's.
        experts_NTLK: Experts that the trainer has chosen where each token is predicted; None: the tokens of each expert
            are not compared with the others. Layers without experts have -1.
    """
    apart_NT = (torch.as_tensor(theirs, dtype=torch.float64) - ours_NT).abs()
    largest = math.nan if apart_NT.isnan().any() else float(apart_NT.max())
    expert = None if experts_NTLK is None else _most_apart(apart_NT.flatten(), experts_NTLK.flatten(0, 1))
    return ProbeDifference(largest, float(apart_NT.mean()), expert)


def tokens_of_experts(experts_MLK: Tensor, num_experts: int) -> Tensor:
    """Return how many of M tokens have chosen each expert, int64 `[L, E]`; -1 stands for no choice."""
    chosen_LM = experts_MLK.transpose(0, 1).flatten(1)
    counts_LE = torch.zeros(len(chosen_LM), num_experts + 1, dtype=torch.int64)
    return counts_LE.scatter_add_(1, (chosen_LM + 1).long(), torch.ones_like(chosen_LM, dtype=torch.int64))[
        :, 1:
    ]


def _most_apart(apart_M: Tensor, experts_MLK: Tensor) -> ExpertDifference | None:
    """Return the expert whose tokens differ most, in standard errors, from the others; None: none has enough tokens."""
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
