"""Inputs and outputs of a policy loss, token by token."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""Nats beyond which e^x is not computed: such a ratio, 5e8, is of numbers that have broken down. In float32 e^88.8
overflows, and its gradient, which a clip multiplies by 0, would be NaN."""


def log_difference(logprobs_T: Tensor, other_T: Tensor) -> Tensor:
    """Return `logprobs - other`, finite: LOG_RATIO_LIMIT with its sign, and no gradient, where one of the two is -inf,
    and 0 where both are. NaN stays NaN.
    """
    both_T = (logprobs_T == -torch.inf) & (other_T == -torch.inf)
    difference_T = (logprobs_T - other_T).masked_fill(both_T, 0.0)
    difference_T = difference_T.masked_fill(difference_T == torch.inf, LOG_RATIO_LIMIT)
    return difference_T.masked_fill(difference_T == -torch.inf, -LOG_RATIO_LIMIT)


def bounded_exp(log_ratio_T: Tensor) -> Tensor:
    """Return e^x, at most e^LOG_RATIO_LIMIT, where it has no gradient."""
    return log_ratio_T.clamp(max=LOG_RATIO_LIMIT).exp()


def is_beyond_limit(logprobs_T: Tensor, other_T: Tensor) -> Tensor:
    """Return bool `[T]`: where `log_difference` or `bounded_exp` changes `logprobs - other`."""
    difference_T = logprobs_T - other_T
    return (difference_T > LOG_RATIO_LIMIT) | (logprobs_T == -torch.inf) | (other_T == -torch.inf)


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyTokens:
    """This rank's positions `T` of one microbatch, flat, in parts of `N` sequences.

    Under context parallelism a sequence lies on all ranks of `cp`, each of which has the same `lengths_N`. Values at
    positions that are not trained on are finite and take no part.
    """

    logprobs_T: Tensor
    """Logprobs under the policy, with gradient."""
    entropy_T: Tensor
    """Entropy of the policy's next token in nats, with gradient where there is an entropy bonus."""
    old_logprobs_T: Tensor
    """Logprobs under the old policy, which the completions are taken to come from."""
    reference_logprobs_T: Tensor | None
    """Logprobs under the reference policy; None: there is none."""
    rollout_logprobs_T: Tensor | None
    """Logprobs as the rollout engine reported them; None: they are not compared."""
    advantages_T: Tensor
    mask_T: Tensor
    """bool: positions that are trained on."""
    loss_weights_T: Tensor
    """Weight of each position in the sum, from `loss_weights` over the whole minibatch."""
    sequence_T: Tensor
    """int64: sequence (0 ... N - 1) of each position; any where the mask is false."""
    lengths_N: Tensor
    """int64: trained tokens of each whole sequence."""
    router_shift_T: Tensor | None = None
    """Router-shift ratio of each token, in 0 ... 1, without gradient (rl/objectives/router_shift.py); None: it is 1."""
    teacher_logprobs_T: Tensor | None = None
    """Logprobs under the teacher; None: there is none."""
    teacher_kl_T: Tensor | None = None
    """KL to the teacher over the whole vocabulary, with gradient; None: it is estimated by the sampled token."""
    is_stale_T: Tensor | None = None
    """bool: positions whose token older weights sampled than the old policy's; None: there are none."""

    @property
    def log_ratio_T(self) -> Tensor:
        """log(policy / old policy) of each token, as `log_difference`; 0 where nothing is trained."""
        return log_difference(self.logprobs_T, self.old_logprobs_T).where(self.mask_T, 0.0)

    def total(self, values_T: Tensor) -> Tensor:
        """Return the sum over trained positions."""
        return values_T.where(self.mask_T, 0.0).sum()


class TokenLoss(NamedTuple):
    """Loss of each token `[T]`, and the tokens whose gradient a clip took away (for cispo: whose weight it changed)."""

    loss_T: Tensor
    """To be minimised, with gradient; values of untrained positions are not used, but have to be finite."""
    clipped_low_T: Tensor
    """bool: tokens whose ratio lies below the lower bound."""
    clipped_high_T: Tensor
    """bool: tokens whose ratio lies above the upper bound."""
