"""The shares of routing and staleness in two mismatches: of rollout engine and trainer, and of old and new policy.

Two passes over the same completions and with the same weights differ in their routes only: in one the routers choose,
in the other they get the routes that the completions have from the engine or from the old policy. The KL with the same
routes is what gates, other weights and rounding do; the KL with live routes less that one is what routing does. The
variance of the ratio of the logprobs is divided likewise.

By layer (`replay.split_layers`): further passes have live routes in the layers before some layer and the given ones
from it on. What a pass has more than the one before is the part of the layers between; these parts add up to all that
routing does.

By age (`rl.rollout.max_staleness`): tokens that the weights in training sampled are told apart from those of older
weights, whose KL also has what the updates in between did. KL over all tokens = same routes + routing (both of the
tokens of present weights) + staleness.
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
from mcore_rl.obs.metrics import Metric
from mcore_rl.parallel.mesh import Mesh
from mcore_rl.rl.objectives.diagnostics import kl_estimate
from mcore_rl.rl.objectives.policy_tokens import LOG_RATIO_LIMIT, log_difference
from mcore_rl.rl.passes.batch import Advantages, Minibatch
from mcore_rl.rl.passes.optional import Pass
from mcore_rl.rl.passes.policy_logprobs import PolicyLogprobs
from mcore_rl.rl.passes.policy_routes import PolicyRoutes
from mcore_rl.train.state import TrainState

Age = Literal["all", "current", "stale"]


@dataclass(frozen=True, slots=True)
class RatioSums:
    """Sums over tokens of the world of which logprobs before and after are compared."""

    kl: float
    """KL(before || after), estimator k3, in nats."""
    ratio_minus_1: float
    ratio_minus_1_squared: float
    count: float

    @property
    def mean_kl(self) -> float:
        """KL in nats a token."""
        return self.kl / self.count

    @property
    def variance(self) -> float:
        """Variance of the ratio after / before over the tokens."""
        return self.ratio_minus_1_squared / self.count - (self.ratio_minus_1 / self.count) ** 2


@dataclass(frozen=True, slots=True)
class RoutingSplit:
    """Sums of the passes over one minibatch, by the age of the tokens."""

    same: dict[Age, RatioSums]
    """With the given routes imposed in all layers."""
    live: dict[Age, RatioSums]
    """With routes that the routers choose."""
    between: list[tuple[tuple[int, ...], dict[Age, RatioSums]]]
    """For each group of layers, from the first one: its layers, and the sums with live routes up to its last layer and
    the given ones behind it."""

    def by_layer(self, age: Age, value: Callable[[RatioSums], float]) -> Iterator[tuple[int, float]]:
        """Yield each layer with its part of the value of live routes less that of the given ones.

        The part of a group of layers is divided evenly among them.
        """
        before = value(self.same[age])
        for layers, sums in self.between:
            now = value(sums[age])
            for layer in layers:
                yield layer, (now - before) / len(layers)
            before = now


class RoutingSplits(Pass):
    """Divides both mismatches of every `replay.split_interval`-th rollout batch."""

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
        """Prepare this rank.

        Args:
            logprobs: the pass over the policy's modules.
            routes: routing of the policy's passes.
            replay: `replay`.
            state: the policy in training.
            updates_per_rollout: optimizer steps of a rollout batch.
            is_ahead: whether older weights may have sampled (rl.rollout.max_staleness).
        """
        self._logprobs, self._routes, self._replay, self._state = logprobs, routes, replay, state
        self._updates_per_rollout, self._is_ahead = updates_per_rollout, is_ahead
        self._is_due = False

    def before_updates(self, minibatches: Sequence[Minibatch], advantages: Advantages) -> list[Metric]:
        """Divide KL(rollout policy || trainer) of the first minibatch.

        No metric where the engine's routes are not here, or where there is no token to train on.
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

    def after_updates(self, minibatches: Sequence[Minibatch], *, policy_has_learned: bool) -> list[Metric]:
        """Divide KL(old policy || policy) of the last minibatch.

        No metric where no pass has recorded the old policy's logprobs and routes, as before an on-policy update.
        """
        minibatch = minibatches[-1]
        is_recorded = self._routes.has_old_routes and not minibatch.is_on_policy
        if not self._is_due or not is_recorded or not minibatch.totals.num_tokens:
            return []
        old = [_given(each.old_logprobs_T, each.rollout_logprobs_T) for each in minibatch.microbatches]
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
    """Return the metrics of the split of KL(rollout policy || trainer); `is_ahead`: older weights may have sampled."""
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
    """Return the layers in order in at most `most` groups of neighbours, whose sizes differ by at most 1."""
    count = min(most, len(layers))
    edges = [index * len(layers) // count for index in range(count + 1)]
    return [tuple(layers[edges[index] : edges[index + 1]]) for index in range(count)]


def _given(logprobs_T: Tensor | None, otherwise_T: Tensor) -> Tensor:
    """Return logprobs that only the last stage has; the others' are not looked at."""
    return otherwise_T if logprobs_T is None else logprobs_T


@torch.no_grad()
def _sums(
    mesh: Mesh, minibatch: Minibatch, before: list[Tensor], after: list[Tensor]
) -> dict[Age, RatioSums]:
    """Collective over the world: compare logprobs over the trained tokens, by their age."""
    device = minibatch.microbatches[0].mask_T.device
    sums_24 = torch.zeros(2, 4, dtype=torch.float64, device=device)
    # Tensor-parallel ranks have the same logprobs, and stages before the last have none.
    if mesh.is_last_stage and mesh.tp.rank == 0:
        for one, before_T, after_T in zip(minibatch.microbatches, before, after, strict=True):
            masks = (one.mask_T & ~one.is_stale_T, one.mask_T & one.is_stale_T)
            sums_24 += torch.stack([ratio_sums(before_T, after_T, mask_T) for mask_T in masks])
    dist.all_reduce(sums_24, group=mesh.world.group)
    current_4, stale_4 = sums_24
    return {
        "all": RatioSums(*(current_4 + stale_4).tolist()),
        "current": RatioSums(*current_4.tolist()),
        "stale": RatioSums(*stale_4.tolist()),
    }


def ratio_sums(before_T: Tensor, after_T: Tensor, mask_T: Tensor) -> Tensor:
    """Return, float64 `[4]`, sums over the tokens of a mask: KL (k3), ratio - 1 and its square, and their number."""
    ratio_minus_1_T = log_difference(after_T, before_T).double().clamp(max=LOG_RATIO_LIMIT).expm1()
    values_3T = [kl_estimate(before_T, after_T, "k3"), ratio_minus_1_T, ratio_minus_1_T.square()]
    of_mask_3 = [values_T.double().where(mask_T, 0.0).sum() for values_T in values_3T]
    return torch.stack([*of_mask_3, mask_T.sum().double()])
