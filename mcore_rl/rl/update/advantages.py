"""Advantages of a rollout batch, by `rl.advantage.kind`."""

from collections.abc import Callable, Sequence
from functools import partial

import torch

from mcore_rl.config.rl.advantage import AnyAdvantage, DiscountedAdvantage, DividedAdvantage
from mcore_rl.megatron.mesh import Mesh
from mcore_rl.rl.objectives.advantages import (
    Estimate,
    above_baseline,
    group_advantages,
    kl_penalised_advantages,
    step_advantages,
)
from mcore_rl.rl.passes.batch import Advantages, Minibatch, at_positions, samples_of
from mcore_rl.rl.passes.optional import RewardKl
from mcore_rl.rl.rollouts.rollout import Rollout
from mcore_rl.rl.update.objective import group_estimate
from mcore_rl.rl.update.token_advantages import token_advantages

Estimator = Callable[[Rollout, Sequence[Minibatch]], Advantages]
"""Function from a rollout batch and this rank's minibatches of it to the samples' advantages. Collective over the
world."""


def estimator_of(advantage: AnyAdvantage, kl: RewardKl | None, mesh: Mesh, device: torch.device) -> Estimator:
    """Return the estimator for `rl.advantage`; `kl` is the KL penalty on rewards, None without a penalty."""
    if isinstance(advantage, DiscountedAdvantage):
        return partial(token_advantages, advantage, kl, mesh=mesh, device=device)
    if isinstance(advantage, DividedAdvantage) and advantage.kind == "steps":
        return partial(_of_steps, advantage)
    spares = advantage.kind == "leave_one_out_zscore"
    return partial(_of_completions, group_estimate(advantage), kl, spares_equal_others=spares)


def _of_steps(advantage: DividedAdvantage, rollout: Rollout, minibatches: Sequence[Minibatch]) -> Advantages:
    group_size = rollout.rewards_PG.shape[1]
    by_sample = {}
    for p in sorted({index // group_size for index in samples_of(minibatches)}):
        shapes = [rollout.shapes[p * group_size + g] for g in range(group_size)]
        lengths = [shape.num_sampled for shape in shapes]
        tokens_GC = step_advantages(rollout.steps_PGI[p], lengths, ddof=advantage.ddof, eps=advantage.eps)
        for g, (shape, tokens_C) in enumerate(zip(shapes, tokens_GC, strict=True)):
            by_sample[p * group_size + g] = at_positions(tokens_C, shape)
    return Advantages(of_samples=by_sample)


def _of_completions(
    estimate: Estimate,
    kl: RewardKl | None,
    rollout: Rollout,
    minibatches: Sequence[Minibatch],
    *,
    spares_equal_others: bool,
) -> Advantages:
    """Return advantages that are equal for all tokens of a completion."""
    rewards_PG = rollout.rewards_PG
    kl_PG = None if kl is None else kl.sums(rewards_PG.numel(), minibatches).view_as(rewards_PG)
    coeff = 0.0 if kl is None else kl.coeff
    if rollout.baseline_P is not None:
        penalised_PG = rewards_PG if kl_PG is None else rewards_PG - coeff * kl_PG
        advantages_PG = above_baseline(penalised_PG, rollout.baseline_P)
    elif kl_PG is not None:
        advantages_PG = kl_penalised_advantages(
            rewards_PG,
            kl_PG,
            estimate,
            coeff=coeff,
            spares_equal_others=spares_equal_others,
        )
    else:
        advantages_PG = group_advantages(rewards_PG, estimate)
    advantages_N = advantages_PG.flatten()
    return Advantages(
        of_samples={
            index: advantages_N[index].expand(rollout.shapes[index].num_positions)
            for index in samples_of(minibatches)
        }
    )
