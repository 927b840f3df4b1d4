"""Inputs and outputs of a policy loss, token by token."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

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
    """This rank's `T` positions of one microbatch, flat, from `N` sequences.

    With context parallelism a sequence is spread over all ranks of `cp`, which have the same `lengths_N`. Values at
    untrained positions are finite and unused.
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
    """Router-shift ratio of each token, 0 ... 1, without gradient (rl/objectives/router_shift.py); None means 1."""
    teacher_logprobs_T: Tensor | None = None
    """Logprobs under the teacher; None without a teacher."""
    teacher_kl_T: Tensor | None = None
    """KL to the teacher over the whole vocabulary, with gradient; None: estimate it from the sampled token."""
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
