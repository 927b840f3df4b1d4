"""The share of routing in two mismatches: of rollout engine and trainer, and of old and new policy.

Two passes over the same completions and with the same weights differ in their routes only: in one the routers choose,
in the other they get the routes that the completions have from the engine or from the old policy. The KL with the same
routes is what gates, other weights and rounding do; the KL with live routes less that one is what routing does.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_rl.obs.metrics import Metric
from mcore_rl.parallel.mesh import Mesh
from mcore_rl.rl.batch import Minibatch
from mcore_rl.rl.learner import Learner
from mcore_rl.rl.objectives.diagnostics import kl_estimate
from mcore_rl.rl.objectives.policy_tokens import LOG_RATIO_LIMIT, log_difference


def rollout_split(learner: Learner, minibatch: Minibatch) -> list[Metric]:
    """Collective over the world, before the updates of a rollout batch: KL(rollout policy || trainer) by its routes.

    No metric where the engine's routes are not here, or where there is no token to train on.
    """
    if not learner.routes.has_engine_routes or not minibatch.totals.num_tokens:
        return []
    rollout = [each.rollout_logprobs_T for each in minibatch.microbatches]
    metrics = []
    for routes, routed in (("same", learner.routes.of_rollout), ("live", learner.routes.live)):
        logprobs = learner.logprobs(minibatch, routed, is_imposed=routes == "same")
        kl, _, _, count = _sums(learner.state.mesh, minibatch, rollout, logprobs)
        metrics.append(Metric(f"rollout/mismatch_kl_{routes}_routes_nats", kl, count))
    return metrics


def policy_split(learner: Learner, minibatch: Minibatch) -> list[Metric]:
    """Collective over the world, after the updates of a rollout batch: KL(old policy || policy) by its routes.

    No metric where no pass has recorded the old policy's logprobs and routes, as before an on-policy update.
    """
    if minibatch.is_on_policy or not learner.routes.has_old_routes or not minibatch.totals.num_tokens:
        return []
    old = [_given(each.old_logprobs_T, each.rollout_logprobs_T) for each in minibatch.microbatches]
    metrics = []
    for routes, routed in (("same", learner.routes.of_old_policy), ("live", learner.routes.live)):
        logprobs = learner.logprobs(minibatch, routed, is_imposed=routes == "same")
        kl, ratio, ratio_squared, count = _sums(learner.state.mesh, minibatch, old, logprobs)
        variance = ratio_squared / count - (ratio / count) ** 2
        metrics.append(Metric(f"policy/kl_old_{routes}_routes_nats", kl, count))
        metrics.append(Metric(f"policy/ratio_variance_{routes}_routes", variance))
    return metrics


def _given(logprobs_T: Tensor | None, otherwise_T: Tensor) -> Tensor:
    """Return logprobs that only the last stage has; the others' are not looked at."""
    return otherwise_T if logprobs_T is None else logprobs_T


@torch.no_grad()
def _sums(mesh: Mesh, minibatch: Minibatch, before: list[Tensor], after: list[Tensor]) -> list[float]:
    """Collective over the world: sums of the KL (k3), of ratio - 1 and of its square, and the number of tokens."""
    sums_4 = torch.zeros(4, dtype=torch.float64, device=minibatch.microbatches[0].mask_T.device)
    # Tensor-parallel ranks have the same logprobs, and stages before the last have none.
    if mesh.is_last_stage and mesh.tp.rank == 0:
        for one, before_T, after_T in zip(minibatch.microbatches, before, after, strict=True):
            ratio_minus_1_T = log_difference(after_T, before_T).double().clamp(max=LOG_RATIO_LIMIT).expm1()
            values_3T = [kl_estimate(before_T, after_T, "k3"), ratio_minus_1_T, ratio_minus_1_T.square()]
            of_mask_3 = [values_T.double().where(one.mask_T, 0.0).sum() for values_T in values_3T]
            sums_4 += torch.stack([*of_mask_3, one.mask_T.sum().double()])
    dist.all_reduce(sums_4, group=mesh.world.group)
    sums: list[float] = sums_4.tolist()
    return sums
