"""Contributions of routing and staleness to two mismatches: rollout engine vs. trainer, and old vs. new policy.

Two passes over the same completions with the same weights differ only in their routes: live routes, or the given routes
of the engine or the old policy. The KL with the given routes comes from gates, other weights and rounding. The KL with
live routes minus this KL is the contribution of routing. The variance of the ratio of probabilities is split the same
way.

By layer (`replay.split_layers`): further passes have live routes up to some layer and the given routes after it. The
increase from a pass to the next is the contribution of the layers in between; all increases add up to the contribution
of routing.

By age (`rl.rollout.max_staleness`): current tokens, sampled by the weights in training, are counted apart from stale
tokens, sampled by older weights. The KL of stale tokens also includes the updates in between: KL over all tokens =
given routes + routing (both for current tokens) + staleness.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_rl.config.replay import ReplayConfig
from mcore_rl.megatron.mesh import Mesh
from mcore_rl.metrics.metrics import Metric
from mcore_rl.rl.batch import Minibatch
from mcore_rl.rl.step.losses import LOG_RATIO_LIMIT, kl_estimate, log_difference
from mcore_rl.rl.step.policy_routes import PolicyLogprobs, PolicyRoutes
from mcore_rl.train.state import TrainState

Age = Literal["all", "current", "stale"]


@dataclass(frozen=True, slots=True)
class RatioSums:
    """World-wide sums over the tokens of a minibatch that compare logprobs before and after."""

    kl: float
    """Sum of KL(before || after), estimator k3, in nats."""
    ratio_minus_1: float
    ratio_minus_1_squared: float
    count: float

    @property
    def mean_kl(self) -> float:
        """KL in nats per token."""
        return self.kl / self.count

    @property
    def variance(self) -> float:
        """Variance over tokens of the probability ratio after / before."""
        return self.ratio_minus_1_squared / self.count - (self.ratio_minus_1 / self.count) ** 2


@dataclass(frozen=True, slots=True)
class RoutingSplit:
    """Sums for each pass over a minibatch, by the age of tokens."""

    same: dict[Age, RatioSums]
    """Sums with the given routes imposed in all layers."""
    live: dict[Age, RatioSums]
    """Sums with live routes in all layers."""
    between: list[tuple[tuple[int, ...], dict[Age, RatioSums]]]
    """For each group of layers in order: its layers, and the sums with live routes up to its last layer and the given
    routes after it."""

    def by_layer(self, age: Age, value: Callable[[RatioSums], float]) -> Iterator[tuple[int, float]]:
        """Yield each layer with its contribution to the difference of `value` between live and given routes; the
        contribution of a group is divided evenly among its layers.
        """
        before = value(self.same[age])
        for layers, sums in self.between:
            now = value(sums[age])
            for layer in layers:
                yield layer, (now - before) / len(layers)
            before = now


class RoutingSplits:
    """Splits both mismatches of every `replay.split_interval`-th rollout batch."""

    def __init__(
        self,
        logprobs: PolicyLogprobs,
        routes: PolicyRoutes,
        replay: ReplayConfig,
        state: TrainState,
        *,
        updates_per_rollout: int,
        is_ahead: bool,
    ) -> None:
        """Prepare this rank. `is_ahead` says that older weights may have sampled (rl.rollout.max_staleness)."""
        self._logprobs, self._routes, self._replay, self._state = logprobs, routes, replay, state
        self._updates_per_rollout, self._is_ahead = updates_per_rollout, is_ahead
        self._is_due = False

    def before_updates(self, minibatches: Sequence[Minibatch]) -> list[Metric]:
        """Split KL(rollout policy || trainer) of the first minibatch. Returns no metrics without the engine's routes or
        without tokens to train on.
        """
        rollouts = self._state.progress.step // self._updates_per_rollout
        self._is_due = rollouts % (self._replay.split_interval or 1) == 0
        minibatch = minibatches[0]
        if not self._is_due or not self._routes.has_engine_routes or not minibatch.totals.num_tokens:
            return []
        rollout = [each.rollout_logprobs_T for each in minibatch.microbatches]
        with self._state.timers.phase("split"):
            split = self._split(minibatch, rollout, of_rollout=True)
        return rollout_split_metrics(split, is_ahead=self._is_ahead)

    def after_updates(self, minibatches: Sequence[Minibatch]) -> list[Metric]:
        """Split KL(old policy || policy) of the last minibatch. Returns no metrics if no pass recorded the old policy's
        logprobs and routes, as for an on-policy update.
        """
        minibatch = minibatches[-1]
        is_recorded = self._routes.has_old_routes and not minibatch.is_on_policy
        if not self._is_due or not is_recorded or not minibatch.totals.num_tokens:
            return []
        # Stages before the last have no old logprobs, and do not use these numbers.
        old = [
            each.rollout_logprobs_T if each.old_logprobs_T is None else each.old_logprobs_T
            for each in minibatch.microbatches
        ]
        with self._state.timers.phase("split"):
            return policy_split_metrics(self._split(minibatch, old, of_rollout=False))

    def _split(self, minibatch: Minibatch, before: list[Tensor], *, of_rollout: bool) -> RoutingSplit:
        """Collective over the world: run the passes over the minibatch and compare their logprobs with `before`."""
        routes, mesh, replay = self._routes, self._state.mesh, self._replay
        given = routes.of_rollout if of_rollout else routes.of_old_policy
        groups = []
        if replay.split_layers is not None:
            moe = [layer for layer, is_routed in enumerate(self._state.config.model.moe_layers) if is_routed]
            groups = layer_groups(moe, replay.split_layers)
        same = _sums(mesh, minibatch, before, self._logprobs.of(minibatch, given, is_imposed=True))
        chosen = routes.recorded_live if groups else routes.live
        live = _sums(mesh, minibatch, before, self._logprobs.of(minibatch, chosen, is_imposed=False))
        between = []
        for group, following in pairwise(groups):
            routed = partial(routes.live_before, layer=following[0], of_rollout=of_rollout)
            logprobs = self._logprobs.of(minibatch, routed, is_imposed=True)
            between.append((group, _sums(mesh, minibatch, before, logprobs)))
        between += [(group, live) for group in groups[-1:]]
        return RoutingSplit(same, live, between)


def rollout_split_metrics(split: RoutingSplit, *, is_ahead: bool) -> list[Metric]:
    """Return the metrics of the split of KL(rollout policy || trainer); `is_ahead`: tokens may be stale."""
    metrics = []
    current, stale = split.live["current"].count, split.live["stale"].count
    passes = (("same", split.same), ("live", split.live))
    for routes, sums in passes if current else ():
        of = sums["current"]
        metrics.append(Metric(f"rollout/mismatch_kl_{routes}_routes_nats", of.kl, of.count))
        metrics.append(Metric(f"rollout/ratio_variance_{routes}_routes", of.variance))
    for routes, sums in passes if stale else ():
        of = sums["stale"]
        metrics.append(Metric(f"rollout/mismatch_kl_{routes}_routes_stale_nats", of.kl, of.count))
    if is_ahead and current:
        staleness = split.live["all"].mean_kl - split.live["current"].mean_kl
        metrics.append(Metric("rollout/mismatch_kl_staleness_nats", staleness))
    if current:
        for layer, part in split.by_layer("current", lambda sums: sums.mean_kl):
            metrics.append(Metric(f"rollout/layer_{layer:02d}/mismatch_kl_routing_nats", part))
    return metrics


def policy_split_metrics(split: RoutingSplit) -> list[Metric]:
    """Return the metrics of the split of KL(old policy || policy)."""
    metrics = []
    for routes, sums in (("same", split.same["all"]), ("live", split.live["all"])):
        metrics.append(Metric(f"policy/kl_old_{routes}_routes_nats", sums.kl, sums.count))
        metrics.append(Metric(f"policy/ratio_variance_{routes}_routes", sums.variance))
    for layer, part in split.by_layer("all", lambda sums: sums.mean_kl):
        metrics.append(Metric(f"policy/layer_{layer:02d}/kl_old_routing_nats", part))
    for layer, part in split.by_layer("all", lambda sums: sums.variance):
        metrics.append(Metric(f"policy/layer_{layer:02d}/ratio_variance_routing", part))
    return metrics


def layer_groups(layers: Sequence[int], most: int) -> list[tuple[int, ...]]:
    """Divide the layers, in order, into at most `most` groups of neighbours with sizes that differ by at most 1."""
    count = min(most, len(layers))
    edges = [index * len(layers) // count for index in range(count + 1)]
    return [tuple(layers[edges[index] : edges[index + 1]]) for index in range(count)]


@torch.no_grad()
def _sums(mesh: Mesh, minibatch: Minibatch, before: list[Tensor], after: list[Tensor]) -> dict[Age, RatioSums]:
    """Collective over the world: compare logprobs of trained tokens, by the tokens' age."""
    device = minibatch.microbatches[0].mask_T.device
    sums_24 = torch.zeros(2, 4, dtype=torch.float64, device=device)
    # Tensor-parallel ranks have the same logprobs, and stages before the last have none.
    if mesh.is_last_stage and mesh.tp.rank == 0:
        for microbatch, before_T, after_T in zip(minibatch.microbatches, before, after, strict=True):
            masks = (microbatch.mask_T & ~microbatch.is_stale_T, microbatch.mask_T & microbatch.is_stale_T)
            sums_24 += torch.stack([ratio_sums(before_T, after_T, mask_T) for mask_T in masks])
    dist.all_reduce(sums_24, group=mesh.world.group)
    current_4, stale_4 = sums_24
    return {
        "all": RatioSums(*(current_4 + stale_4).tolist()),
        "current": RatioSums(*current_4.tolist()),
        "stale": RatioSums(*stale_4.tolist()),
    }


def ratio_sums(before_T: Tensor, after_T: Tensor, mask_T: Tensor) -> Tensor:
    """Return sums over the tokens of a mask, float64 `[4]`: KL (k3), ratio - 1, its square, and the token count."""
    ratio_minus_1_T = log_difference(after_T, before_T).double().clamp(max=LOG_RATIO_LIMIT).expm1()
    values_3T = [kl_estimate(before_T, after_T, "k3"), ratio_minus_1_T, ratio_minus_1_T.square()]
    of_mask_3 = [values_T.double().where(mask_T, 0.0).sum() for values_T in values_3T]
    return torch.stack([*of_mask_3, mask_T.sum().double()])
