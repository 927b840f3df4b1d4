"""Whose choice of experts each pass over a rollout batch takes: the six lines of routing replay in one place."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch

from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.obs.metrics import Metric
from mcore_rl.parallel.routers import unfuse_routers
from mcore_rl.parallel.schedule import Routing, free_routing
from mcore_rl.replay.cache import RoutingCache
from mcore_rl.replay.from_rollouts import RolloutRoutes, fill
from mcore_rl.replay.layouts import Layout, Span
from mcore_rl.replay.tape import RoutingTape
from mcore_rl.rl.batch import PolicyMicrobatch
from mcore_rl.rl.rollout import Rollout
from mcore_rl.rl.types import Completion, Prompt
from mcore_rl.train.state import TrainState


class PolicyRoutes:
    """Routing of the passes over one rollout batch after the other; of a dense model every pass is free.

    | replay.kind | old logprobs         | updates                              | told of the updates         |
    |-------------|----------------------|--------------------------------------|-----------------------------|
    | none        | record               | free, compared with the recorded     | how many routes changed     |
    | r2          | record               | the recorded imposed                 | how many would have changed |
    | r3          | the engine's imposed | the engine's imposed                 | the same                    |

    The first update of a rollout may have no pass for old logprobs before it: it is made by the very weights that the
    old policy has, so that its free routes are the old policy's.

    Every method is collective over the world.
    """

    def __init__(self, state: TrainState, config: RlRunConfig, folder: Path) -> None:
        """`folder` is this rank's own, for routes that wait in files."""
        self._state, self._replay = state, config.replay
        self._is_routed = config.model.is_moe
        self._metrics: list[Metric] = []
        self._version = 0
        self._has_engine_routes = self._is_routed and config.wants_engine_routes
        self._trained = self._engine = None
        if self._is_routed:
            unfuse_routers(state.chunks)
            self._trained = RoutingCache(state.chunks, config.model, config.replay, folder / "trained")
        if self._has_engine_routes:
            self._engine = RoutingCache(state.chunks, config.model, config.replay, folder / "engine")

    def begin(self, rollout: Rollout, microbatches: Sequence[PolicyMicrobatch]) -> None:
        """A new rollout batch, in the microbatches in which this rank trains on it; the one before is forgotten."""
        for cache in (self._trained, self._engine):
            if cache is not None:
                cache.drop(self._version)
        self._version = self._state.progress.step
        if self._engine is None:
            return
        size = rollout.rewards_PG.shape[1]
        told = {
            number * size + place: routes_of(group.prompt, completion)
            for number, group in rollout.groups.items()
            for place, completion in enumerate(group.completions)
        }
        generated = {number: routes for number, routes in told.items() if routes is not None}
        fill(
            self._engine, self._version, generated, [layout_of(one) for one in microbatches], self._state.mesh
        )

    def old_policy(self, microbatches: Sequence[PolicyMicrobatch]) -> AbstractContextManager[Routing]:
        """Routing of a pass for old logprobs."""
        if self._replay.kind == "r3":
            return self._taped(microbatches, RoutingTape.impose, self._engine, "rollout_routes")
        name = "rollout_routes" if self._has_engine_routes else None
        return self._taped(microbatches, RoutingTape.record, self._trained, name, against=self._engine)

    def update(
        self, microbatches: Sequence[PolicyMicrobatch], *, is_old_policy: bool
    ) -> AbstractContextManager[Routing]:
        """Routing of an optimizer step; `is_old_policy`: the weights are the old policy's, and no pass was before."""
        if self._replay.kind == "r3":
            return self._taped(microbatches, RoutingTape.impose, self._engine, "routes")
        if is_old_policy:
            return nullcontext(free_routing)
        start = RoutingTape.observe if self._replay.kind == "none" else RoutingTape.impose
        return self._taped(microbatches, start, self._trained, "routes")

    def reference(self, microbatches: Sequence[PolicyMicrobatch]) -> AbstractContextManager[Routing]:
        """Routing of a pass of the reference policy."""
        if self._replay.reference == "live":
            return nullcontext(free_routing)
        cache = self._engine if self._replay.kind == "r3" else self._trained
        return self._taped(microbatches, RoutingTape.impose, cache, None)

    def take_metrics(self) -> list[Metric]:
        """Of the passes since the last call."""
        metrics, self._metrics = self._metrics, []
        return metrics

    def close(self) -> None:
        """Forget everything, files too."""
        for cache in (self._trained, self._engine):
            if cache is not None:
                cache.close()

    @contextmanager
    def _taped(
        self,
        microbatches: Sequence[PolicyMicrobatch],
        start: Callable[[RoutingTape], Routing],
        cache: RoutingCache | None,
        name: str | None,
        against: RoutingCache | None = None,
    ) -> Iterator[Routing]:
        """Routing of one pass: `start` arms a tape on entry, and its accounts are checked on exit.

        `name` begins the names of the pass's metrics; None: they are not reported.
        """
        if cache is None:
            yield free_routing
            return
        state, phase = self._state, self._state.timers.phase
        with phase("routes"):
            layouts = [layout_of(one) for one in microbatches]
            tape = RoutingTape(state.chunks, state.mesh, layouts, cache, self._version, against)
        with tape:
            with phase("routes"):
                routing = start(tape)
            yield routing
            with phase("routes"):
                metrics = tape.finish(name or "routes")
        self._metrics += metrics if name else []


def layout_of(microbatch: PolicyMicrobatch) -> Layout:
    """Of a row of samples as the trainer makes it."""
    length = microbatch.shape[1]
    spans = [Span(sample, *sizes) for sample, sizes in zip(microbatch.samples, microbatch.spans, strict=True)]
    filled = sum(span.padded for span in spans)
    if filled < length:
        spans.append(Span(-1, 0, length - filled))
    return Layout(rows=(tuple(spans),), row_length=length, packed=True)


def routes_of(prompt: Prompt, completion: Completion) -> RolloutRoutes | None:
    """What an engine told; None: nothing. The last token enters no layer, in generation as in training."""
    if completion.experts_TLK is None:
        return None
    tokens_T = torch.tensor((*prompt.tokens_T, *completion.tokens_T)[:-1])
    return RolloutRoutes(tokens_T, completion.experts_TLK)
