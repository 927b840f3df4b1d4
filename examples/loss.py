"""A policy loss of your own: rl.loss.kind = "examples.loss:soft_clipped".

It returns a loss for every token; weights, sums and the division by the world's count are the trainer's.
"""

import torch

from mcore_rl.config.rl.loss import OwnLoss
from mcore_rl.megatron.mesh import Axis
from mcore_rl.rl.step.losses import PolicyTokens, TokenLoss


def soft_clipped(tokens: PolicyTokens, config: OwnLoss, cp: Axis) -> TokenLoss:
    """Return -g(r) A with g(r) = 4 sigmoid(r - 1): the gradient fades as the ratio r leaves 1, and no clip cuts it off.

    Args:
        tokens: Logprobs, advantages and masks `[T]` of one microbatch on this rank.
        config: The fields of `rl.loss`.
        cp: The context-parallel ranks, for losses that add up over a sequence.
    """
    ratio_T = tokens.log_ratio_T.exp()
    # The sigmoid has slope 1/4 in the middle: with the factor, the gradient at r = 1 is that of GRPO.
    gate_T = 4 * torch.sigmoid(ratio_T - 1)
    never_T = torch.zeros_like(tokens.mask_T)  # no token's gradient is clipped away: both clip ratios are 0
    return TokenLoss(-gate_T * tokens.advantages_T, never_T, never_T)
