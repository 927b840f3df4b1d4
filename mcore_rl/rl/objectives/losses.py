"""Objectives of the policy, to be minimised: a sum over tokens with weights, and a count.

Each is the closed form of the paper that config/rl.py names. A ratio is that of the probabilities of a token under
the policy and under the old policy, which the completions come from.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_rl.config.extension import choose
from mcore_rl.config.rl import Clip, LossConfig
from mcore_rl.parallel.mesh import Axis
from mcore_rl.rl.objectives.aggregation import anchored_means
from mcore_rl.rl.objectives.diagnostics import kl_estimate, loss_facts
from mcore_rl.rl.objectives.policy_tokens import PolicyTokens, TokenLoss


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyLoss:
    """Loss and count of a microbatch on this rank; what to add up over the world; what to take the maximum of."""

    loss: Tensor
    count: Tensor
    sums: dict[str, Tensor]
    maxima: dict[str, Tensor]


def policy_loss(tokens: PolicyTokens, config: LossConfig, cp: Axis) -> PolicyLoss:
    """Collective over `cp` (forward only): the objective that `config` names, with KL, entropy and corrections."""
    token_loss = choose("rl.loss.kind", config.kind, LOSSES)(tokens, config, cp)
    mismatch_T = mismatch_weights(tokens, config, cp)
    loss_T = token_loss.loss_T if mismatch_T is None else token_loss.loss_T * mismatch_T
    objective = tokens.total(loss_T * tokens.weights_T)
    if config.kl_coeff and config.kl_in == "loss":
        assert tokens.reference_logprobs_T is not None, "rl.loss.kl_coeff needs the reference's logprobs"
        kl_T = kl_penalty(
            tokens.logprobs_T, tokens.reference_logprobs_T, config.kl_estimator, config.kl_gradient
        )
        loss_T = loss_T + config.kl_coeff * kl_T
    if config.entropy_coeff:
        loss_T = loss_T - config.entropy_coeff * tokens.entropy_T
    loss = tokens.total(loss_T * tokens.weights_T)
    facts = loss_facts(tokens, token_loss, mismatch_T, cp)
    sums = facts.sums | {"loss": loss.detach(), "objective": objective.detach()}
    return PolicyLoss(loss=loss, count=sums["count"].to(torch.int), sums=sums, maxima=facts.maxima)


def clipped(log_ratio_T: Tensor, advantages_T: Tensor, clip: Clip, *, dual_clip: float | None) -> TokenLoss:
    """-min(r A, clip(r) A); with `dual_clip`, where A < 0, at most -dual_clip A."""
    ratio_T = log_ratio_T.exp()
    objective_T = torch.minimum(
        ratio_T * advantages_T, ratio_T.clamp(1 - clip.low, 1 + clip.high) * advantages_T
    )
    high_T = (ratio_T > 1 + clip.high) & (advantages_T > 0)
    if dual_clip:
        bounded_T = torch.maximum(objective_T, dual_clip * advantages_T)
        objective_T = bounded_T.where(advantages_T < 0, objective_T)
        high_T = high_T | ((ratio_T > dual_clip) & (advantages_T < 0))
    return TokenLoss(-objective_T, (ratio_T < 1 - clip.low) & (advantages_T < 0), high_T)


def weighted_logprob(log_ratio_T: Tensor, logprobs_T: Tensor, advantages_T: Tensor, clip: Clip) -> TokenLoss:
    """-sg[clip(r)] A log p: a token outside the clip weighs less but keeps its gradient."""
    ratio_T = log_ratio_T.detach().exp()
    loss_T = -ratio_T.clamp(1 - clip.low, 1 + clip.high) * advantages_T * logprobs_T
    counts_T = advantages_T != 0
    return TokenLoss(loss_T, (ratio_T < 1 - clip.low) & counts_T, (ratio_T > 1 + clip.high) & counts_T)


def squared_error(log_ratio_of_sequence_T: Tensor, advantages_T: Tensor, *, tau: float) -> TokenLoss:
    """(A - tau R)^2 with the log-ratio R of the whole sequence; nothing is clipped."""
    never_T = torch.zeros_like(advantages_T, dtype=torch.bool)
    return TokenLoss((advantages_T - tau * log_ratio_of_sequence_T).square(), never_T, never_T)


def _grpo(tokens: PolicyTokens, config: LossConfig, cp: Axis) -> TokenLoss:
    return clipped(tokens.log_ratio_T, tokens.advantages_T, config.clip, dual_clip=config.dual_clip)


def _gspo_token(tokens: PolicyTokens, config: LossConfig, cp: Axis) -> TokenLoss:
    """s_t = sg[s] p_t / sg[p_t]: the sequence's ratio, with each token's own gradient and advantage.

    With one advantage a sequence, this is GSPO in value and gradient.
    """
    log_ratio_T = anchored_means(tokens.log_ratio_T, tokens.sequence_T, tokens.lengths_N, cp)
    return clipped(log_ratio_T, tokens.advantages_T, config.clip, dual_clip=config.dual_clip)


def _kimi_k2(tokens: PolicyTokens, config: LossConfig, cp: Axis) -> TokenLoss:
    """The mean over the sequences of (A - tau R)^2, in shares of 1 / length a token."""
    means_T = anchored_means(tokens.log_ratio_T, tokens.sequence_T, tokens.lengths_N, cp)
    return squared_error(
        means_T * tokens.lengths_N[tokens.sequence_T], tokens.advantages_T, tau=config.tau_in_use
    )


def _cispo(tokens: PolicyTokens, config: LossConfig, cp: Axis) -> TokenLoss:
    return weighted_logprob(tokens.log_ratio_T, tokens.logprobs_T, tokens.advantages_T, config.clip)


Loss = Callable[[PolicyTokens, LossConfig, Axis], TokenLoss]
"""A policy loss: from the tokens of a microbatch and `rl.loss` to the loss of each token. Collective over the axis, the
context-parallel ranks, in the forward only."""
LOSSES: dict[str, Loss] = {
    "grpo": _grpo,
    "gspo": _gspo_token,
    "gspo_token": _gspo_token,
    "kimi_k2": _kimi_k2,
    "cispo": _cispo,
}


def kl_penalty(logprobs_T: Tensor, reference_T: Tensor, estimator: str, gradient: str) -> Tensor:
    """KL(policy || reference) at sampled tokens: `estimator`'s value, with its own or k2's gradient."""
    value_T = kl_estimate(logprobs_T, reference_T, estimator)
    if gradient == "estimator":
        return value_T
    k2_T = kl_estimate(logprobs_T, reference_T, "k2")
    return value_T.detach() + (k2_T - k2_T.detach())


@torch.no_grad()
def mismatch_weights(tokens: PolicyTokens, config: LossConfig, cp: Axis) -> Tensor | None:
    """Collective over `cp`: weights that make up for an engine whose logprobs are not the old policy's."""
    if config.importance_sampling == "none":
        return None
    assert tokens.engine_logprobs_T is not None, (
        f'rl.loss.importance_sampling="{config.importance_sampling}" needs engine logprobs'
    )
    log_weight_T = (tokens.old_logprobs_T - tokens.engine_logprobs_T).where(tokens.mask_T, 0.0)
    if config.importance_sampling.startswith("sequence"):
        log_weight_T = anchored_means(log_weight_T, tokens.sequence_T, tokens.lengths_N, cp)
    weight_T = log_weight_T.exp()
    if config.importance_sampling.endswith("truncate"):
        return weight_T.clamp(max=config.importance_sampling_high)
    return weight_T.where(
        (weight_T >= config.importance_sampling_low) & (weight_T <= config.importance_sampling_high), 0.0
    )
