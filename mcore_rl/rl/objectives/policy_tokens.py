"""What a policy objective is computed from, and what it is token by token."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyTokens:
    """This rank's positions `T` of one microbatch, flat, in parts of `N` sequences.

    Under context parallelism a sequence lies on all ranks of `cp`; each has the same `lengths_N`. What stands at
    positions that are not trained on is finite and takes no part.
    """

    logprobs_T: Tensor
    """Of the policy, with gradient."""
    entropy_T: Tensor
    """Of the policy's next token, with gradient where there is an entropy bonus."""
    old_logprobs_T: Tensor
    reference_logprobs_T: Tensor | None
    engine_logprobs_T: Tensor | None
    """As sampled; None: not compared."""
    advantages_T: Tensor
    mask_T: Tensor
    """Which positions are trained on."""
    weights_T: Tensor
    """From `sequence_weights`, of the whole step's batch."""
    sequence_T: Tensor
    """To which of the N sequences a position belongs; any where the mask is false."""
    lengths_N: Tensor
    """Trained tokens of each whole sequence."""

    @property
    def log_ratio_T(self) -> Tensor:
        """log of policy / old policy; 0 where nothing is trained."""
        return (self.logprobs_T - self.old_logprobs_T).where(self.mask_T, 0.0)

    def total(self, values_T: Tensor) -> Tensor:
        """The sum over trained positions."""
        return values_T.where(self.mask_T, 0.0).sum()


class TokenLoss(NamedTuple):
    """Loss of each token `[T]`, and the tokens whose gradient a clip took away (for cispo: whose weight it changed)."""

    loss_T: Tensor
    """To be minimised, with gradient; values of untrained positions are not used, but have to be finite."""
    clipped_low_T: Tensor
    """bool: tokens whose ratio lies below the lower bound."""
    clipped_high_T: Tensor
    """bool: tokens whose ratio lies above the upper bound."""
