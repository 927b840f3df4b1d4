"""A policy loss of your own: rl.loss.kind = "examples.loss:vespo", VESPO of arXiv 2602.10693.

It returns a loss for every token; weights, sums and the division by the world's count are the trainer's.
"""

import torch

from mcore_rl.config.rl.loss import OwnLoss
from mcore_rl.megatron.mesh import Axis
from mcore_rl.rl.step.losses import PolicyTokens, TokenLoss, bounded_exp, sequence_sums


def vespo(tokens: PolicyTokens, config: OwnLoss, cp: Axis) -> TokenLoss:
    """Return -sg[W^k e^(l (1 - W))] A log p with the ratio W of the whole sequence: 1 at W = 1, and 0 far from it. The
    paper's (k, l) is (2, 3) where A >= 0, and (3, 2) elsewhere; set rl.loss.aggregation="token_mean", as it does.

    Args:
        tokens: Logprobs, advantages and masks `[T]` of one microbatch on this rank.
        config: The fields of `rl.loss`.
        cp: The context-parallel ranks, over which a sequence may be spread.
    """
    log_ratio_T = tokens.log_ratio_T
    sums_N = sequence_sums(log_ratio_T, tokens.sequence_T, len(tokens.lengths_N), cp)
    log_weight_T = sums_N[tokens.sequence_T].to(log_ratio_T.dtype)
    power_T = torch.full_like(log_ratio_T, 3.0).masked_fill(tokens.advantages_T >= 0, 2.0)
    gate_T = (power_T * log_weight_T + (5 - power_T) * (1 - bounded_exp(log_weight_T))).exp()
    never_T = torch.zeros_like(tokens.mask_T)  # no token's gradient is clipped away: both clip ratios are 0
    return TokenLoss(-gate_T * tokens.advantages_T * tokens.logprobs_T, never_T, never_T)
