"""From rewards to advantages: what a completion is worth beside the others of its prompt."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mcore_rl.config.extension import choose
from mcore_rl.config.rl import AdvantageConfig
from mcore_rl.errors import ConfigError


class Advantages(NamedTuple):
    """Advantages `[P, G]`, and which groups carry no signal `[P]`: those have zeros."""

    advantages_PG: Tensor
    constant_P: Tensor


def group_advantages(rewards_PG: Tensor, config: AdvantageConfig) -> Advantages:
    """Of finite rewards, the advantages that `config` names."""
    assert rewards_PG.isfinite().all(), "a reward is not finite; scoring counts such as errors"
    constant_P = constant_groups(rewards_PG)
    advantages_PG = choose("rl.advantage.kind", config.kind, ADVANTAGES)(rewards_PG, config)
    if advantages_PG.shape != rewards_PG.shape:
        raise ConfigError(
            f'rl.advantage.kind="{config.kind}" returned shape {tuple(advantages_PG.shape)} for rewards of shape '
            f"{tuple(rewards_PG.shape)}. Make the function return one advantage for each reward."
        )
    # Exact zeros: a mean of equal numbers may differ from them in the last bit, which eps would magnify.
    advantages_PG = advantages_PG.masked_fill(constant_P[:, None], 0.0)
    if not advantages_PG.isfinite().all():
        raise ConfigError(
            f'rl.advantage.kind="{config.kind}" returned numbers that are not finite for the rewards '
            f"{rewards_PG.tolist()}. Correct the function."
        )
    return Advantages(advantages_PG, constant_P)


def constant_groups(rewards_PG: Tensor) -> Tensor:
    """Groups `[P]` whose rewards are all the same number: nothing can be learned from them."""
    return (rewards_PG == rewards_PG[:, :1]).all(dim=1)


def groups_to_train_on(rewards_PG: Tensor, wanted: int) -> list[int]:
    """The first `wanted` groups with a signal, in order; fewer when there are not so many (dynamic sampling)."""
    indices: list[int] = (~constant_groups(rewards_PG)).nonzero().flatten().tolist()
    return indices[:wanted]


def group_centered(rewards_PG: Tensor) -> Tensor:
    """Each reward minus its prompt's mean, so that every row sums to zero."""
    return rewards_PG - rewards_PG.mean(dim=1, keepdim=True)


def group_zscore(rewards_PG: Tensor, *, ddof: int, eps: float) -> Tensor:
    """`group_centered` over (the row's standard deviation + eps)."""
    return group_centered(rewards_PG) / (rewards_PG.std(dim=1, correction=ddof, keepdim=True) + eps)


def leave_one_out(rewards_PG: Tensor) -> Tensor:
    """Each reward minus the mean of the others of its prompt: `group_centered` times G / (G - 1)."""
    group_size = rewards_PG.shape[1]
    return group_centered(rewards_PG) * (group_size / (group_size - 1))


def leave_one_out_zscore(rewards_PG: Tensor, *, ddof: int, eps: float) -> Tensor:
    """`leave_one_out` over (the others' standard deviation + eps); where the others are all equal, undivided."""
    group_size = rewards_PG.shape[1]
    off_diagonal = ~torch.eye(group_size, dtype=torch.bool, device=rewards_PG.device)
    others_PGO = rewards_PG[:, None, :].expand(-1, group_size, -1)[:, off_diagonal]
    others_PGO = others_PGO.reshape(-1, group_size, group_size - 1)
    spread_PG = others_PGO.std(dim=2, correction=ddof) + eps
    equal_PG = (others_PGO == others_PGO[..., :1]).all(dim=2)
    return leave_one_out(rewards_PG) / spread_PG.masked_fill(equal_PG, 1.0)


ADVANTAGES: dict[str, Callable[[Tensor, AdvantageConfig], Tensor]] = {
    "zscore": lambda rewards_PG, config: group_zscore(rewards_PG, ddof=config.ddof, eps=config.eps),
    "mean": lambda rewards_PG, config: group_centered(rewards_PG),
    "leave_one_out": lambda rewards_PG, config: leave_one_out(rewards_PG),
    "leave_one_out_zscore": lambda rewards_PG, config: leave_one_out_zscore(
        rewards_PG, ddof=config.ddof, eps=config.eps
    ),
}
"""Advantages `[P, G]` of rewards `[P, G]`, for each `rl.advantage.kind` that compares whole completions."""


class StepReward(NamedTuple):
    """The reward of a step of a completion, whose last token is the `end`-th (from 0)."""

    end: int
    value: float


def step_advantages(
    steps_GI: Sequence[Sequence[StepReward]], lengths_G: Sequence[int], *, ddof: int, eps: float
) -> list[Tensor]:
    """Advantages `[T]` of each completion of one prompt: at a token, the sum of the z-scores of the steps that end
    there or later (arXiv 2402.03300, process supervision). Mean and deviation are those of all the group's steps.
    """
    values_I = torch.tensor([step.value for steps in steps_GI for step in steps], dtype=torch.float64)
    assert values_I.isfinite().all(), "a step's reward is not finite"
    constant = len(values_I) == 0 or bool((values_I == values_I[0]).all())
    advantages = []
    for steps, length in zip(steps_GI, lengths_G, strict=True):
        at_end_T = torch.zeros(length, dtype=torch.float64)
        for step in steps:
            assert 0 <= step.end < length, (step, length)
            at_end_T[step.end] += 0.0 if constant else step.value - values_I.mean()
        if not constant:
            at_end_T /= values_I.std(correction=ddof) + eps
        advantages.append(at_end_T.flip(0).cumsum(0).flip(0).float())
    return advantages


def overlong_penalty(lengths_N: Tensor, *, max_tokens: int, buffer_tokens: int, penalty: float) -> Tensor:
    """What is added to the rewards: 0 up to max - buffer tokens, falling linearly to -penalty at max (DAPO)."""
    excess_N = lengths_N - (max_tokens - buffer_tokens)
    return -penalty * (excess_N / buffer_tokens).clamp(0.0, 1.0)


def kl_penalised(rewards_PG: Tensor, kl_sums_PG: Tensor, *, coeff: float) -> Tensor:
    """Rewards less `coeff` times the completion's summed KL to the reference."""
    return rewards_PG - coeff * kl_sums_PG
