"""Routing of the passes over a rollout batch: which of them record, impose or observe routes, and in which cache."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mcore_rl.config.replay import ReplayConfig
from mcore_rl.config.rl.loss import GaeAdvantage
from mcore_rl.config.rl_run import RlConfig
from mcore_rl.errors import RoutingError
from mcore_rl.megatron.agree import MAX_PROBLEMS, world_union
from mcore_rl.megatron.routers import unfuse_routers
from mcore_rl.megatron.schedule import Routing, free_routing, run_pass
from mcore_rl.metrics.metrics import Metric
from mcore_rl.model.inputs import LocalMicrobatch
from mcore_rl.replay.accounts import RouteTotals
from mcore_rl.replay.cache import RoutingCache
from mcore_rl.replay.disagreement import DisagreementLimit, StaleRoutes
from mcore_rl.replay.tape import RoutingTape
from mcore_rl.replay.witness import proving
from mcore_rl.rl.batch import LogprobHead, Minibatch, PolicyMicrobatch, evaluating, layout_of
from mcore_rl.rl.types import Completion, Prompt, Rollout, SampleShape
from mcore_rl.train.state import TrainState

if TYPE_CHECKING:
    from mcore_rl.replay.from_rollouts import RolloutRoutes
    from mcore_rl.rl.step.router_shift import RouterShift
    from mcore_rl.rl.step.trace import TokenTrace


class RefusedCompletionsError(Exception):
    """Raised on all ranks before any model has learned from a rollout batch: some of its completions have unusable
    routes, and its passes must be repeated without them.
    """

    def __init__(self, reasons: Mapping[int, str]) -> None:
        """Take a sentence for each refused sample, by sample index."""
        super().__init__("; ".join(reasons.values()))
        self.reasons = reasons


class PolicyRoutes:
    """Routing of the passes over rollout batches. Passes of a dense model route freely.

    | replay.kind | pass for old logprobs             | updates                           | reference pass           |
    |-------------|-----------------------------------|-----------------------------------|--------------------------|
    | none        | records, where there is a pass    | compared with the recorded routes | free                     |
    | r2          | records                           | recorded routes imposed           | free, or as the updates  |
    | r3          | the rollout engine's imposed      | the rollout engine's imposed      | free, or as the updates  |

    The first update of a rollout batch may skip the old-logprob pass (`is_old_policy`): its weights are the old
    policy's, and so are its free routes, by definition. With R3 its routes are imposed as well.

    If ratios are multiplied by the router-shift ratio (`rl.loss.router_shift`), passes for old logprobs also record the
    routers' scores, and updates compare their own scores with them.

    A recording pass is compared with the rollout engine's routes if the engine returns them (`replay.observe_rollout`).

    Every method is collective over the world.
    """

    def __init__(self, state: TrainState, rl: RlConfig, replay: ReplayConfig) -> None:
        self._state, self._replay = state, replay
        model = state.config.model
        # With rollout logprobs there is no pass for old logprobs, and no record to compare updates with.
        self._is_recorded = rl.update.old_logprobs == "trainer"
        self._metrics: list[Metric] = []
        # The limit fills this list, and each checkpoint saves it.
        self._limit = DisagreementLimit(replay, model.moe.top_k, state.progress.disagreement_limits)
        self.stale = StaleRoutes(model.moe.top_k)
        """Agreement of the engine's routes with live routes, for stale tokens and for current tokens."""
        self.trace: TokenTrace | None = None
        """Takes changed routes and ratios of single tokens; None: this rollout batch is not traced."""
        self._version = 0
        # A critic learns before the policy's first update, which is then too late to leave completions out.
        is_late = isinstance(rl.advantage, GaeAdvantage) and not self._is_recorded
        self._max_faulty_fraction = 0.0 if is_late else replay.max_refused_fraction
        self._num_completions = self._num_refused = 0
        self._compared: list[RouteTotals] = []
        """Totals of passes since the last `settle` that compared the engine's routes with the live choice."""
        self._faulty: dict[int, str] = {}
        """A sentence for each sample with wrong routes in these passes, on the ranks that train on it."""
        self._recorded: RoutingCache | None = None
        self._from_rollout: RoutingCache | None = None
        self._shift: RouterShift | None = None
        # For passes with live routes in some layers: routes of a fully live pass, and the mixture to impose.
        self._live: RoutingCache | None = None
        self._mixed: RoutingCache | None = None
        self._filled: set[RoutingCache] = set()
        """Caches with routes of the rollout batch."""
        if model.is_moe:
            unfuse_routers(state.chunks)
            self._recorded = RoutingCache(state.chunks, model, replay)
            if replay.wants_engine_routes:
                self._from_rollout = RoutingCache(state.chunks, model, replay)
            if replay.split_layers is not None:
                self._live, self._mixed = (RoutingCache(state.chunks, model, replay) for _ in range(2))
            if rl.loss.uses_router_shift:
                from mcore_rl.rl.step import router_shift  # only a loss with router-shift ratios

                self._shift = router_shift.RouterShift(state.chunks, state.mesh, model, replay)

    def begin(self, rollout: Rollout, microbatches: Sequence[PolicyMicrobatch]) -> None:
        """Forget the previous rollout batch and fetch the engine's routes for `rollout`, for all of this rank's
        microbatches. Raises RefusedCompletionsError on all ranks, if tokens lack routes and replay.missing="refuse".
        """
        self._metrics, self._compared, self._faulty = [], [], {}
        self._num_completions, self._num_refused = rollout.rewards_PG.numel(), len(rollout.refused)
        for cache in self._filled:
            cache.drop(self._version)
        self._filled.clear()
        if self._shift is not None:
            self._shift.forget()
        self._version = self._state.progress.step
        if self._from_rollout is None:
            return
        from mcore_rl.replay.from_rollouts import cache_rollout_routes  # only where engines return routes

        group_size = rollout.rewards_PG.shape[1]
        routes = {
            group_index * group_size + index: self._given(group.prompt, completion, group_index)
            for group_index, group in rollout.groups.items()
            for index, completion in enumerate(group.completions)
            if group_index * group_size + index not in rollout.refused
        }
        if self._replay.missing == "refuse":
            incomplete = world_union(dict(self._incomplete(routes)))
            self._refuse(incomplete, self._replay.max_refused_fraction)
        self._metrics.append(Metric("rollout_routes/refused_completions", self._num_refused))
        generated = {sample: found for sample, found in routes.items() if found is not None}
        layouts = [layout_of(microbatch) for microbatch in microbatches]
        self._filled.add(self._from_rollout)
        with self._state.timers.phase("routes"):
            self._metrics += cache_rollout_routes(
                self._from_rollout, self._version, generated, layouts, self._state.mesh
            )

    def _given(self, prompt: Prompt, completion: Completion, group: int) -> "RolloutRoutes | None":
        """Return a completion's routes; if the engine gave none and replay.missing="live", rows of -1."""
        if completion.experts_TLK is not None or self._replay.missing != "live":
            return routes_of(prompt, completion, group)
        assert self._from_rollout is not None
        num_rows = len(prompt.tokens_T) + len(completion.tokens_T) - 1 - len(completion.segments)
        shape = (num_rows, len(self._from_rollout.layers))
        without_TLK = torch.full((*shape, self._from_rollout.top_k), -1, dtype=torch.int16)
        return routes_of(prompt, replace(completion, experts_TLK=without_TLK), group)

    def _incomplete(self, routes: "Mapping[int, RolloutRoutes | None]") -> Iterator[tuple[int, str]]:
        assert self._from_rollout is not None
        # On a pipeline stage without experts, rows cover no layer and nothing can be missing.
        for sample, found in routes.items() if self._from_rollout.layers else ():
            if found is None:
                yield sample, f"sample {sample}: the engine returned no routes"
            elif num_missing := int((~found.has_routes_T).sum()):
                yield (
                    sample,
                    f"sample {sample}: the engine returned no routes of {num_missing} of its {len(found.tokens_T)} "
                    "tokens",
                )

    @property
    def judges_updates(self) -> bool:
        """Whether a rollout batch's first update may be the pass that compares engine routes with the live choice."""
        return self._replay.kind == "r3" and self._replay.max_disagreement is not None

    def settle(self) -> None:
        """Collective over the world, before any model learns: check the engine's routes by the passes since the last
        call that compared them with the live choice under the same weights. Raises RefusedCompletionsError on all ranks
        if the routes of single completions are wrong, RoutingError if those of too many, or of a layer, are.
        """
        if not self._compared:
            return
        self._refuse(world_union(self._faulty), self._max_faulty_fraction)
        for totals in self._compared:
            # The sums are equal on all ranks, so that all of them raise.
            if problem := self._limit.problem(totals):
                raise RoutingError(f"Rollout batch at step {self._version}: {problem}")
            self.stale.add_routes(totals)
        self._compared = []

    def _refuse(self, faulty: Mapping[int, str], max_fraction: float) -> None:
        """Raise an error if any sample is `faulty`, with a sentence each, the same on all ranks; at most `max_fraction`
        of the rollout batch may be left out.
        """
        if not faulty:
            return
        num_refused = self._num_refused + len(faulty)
        # As a float 0.29 * 100 is less than 29.
        most_refused = int(max_fraction * self._num_completions + 1e-9)
        if num_refused <= most_refused:
            raise RefusedCompletionsError(faulty)
        of_layers = (self._limit.problem(totals) for totals in self._compared)
        reasons = next(filter(None, of_layers), "; ".join(list(faulty.values())[:MAX_PROBLEMS]))
        raise RoutingError(
            f"Rollout batch at step {self._version}: {reasons}. The routes of {num_refused} of its "
            f"{self._num_completions} completions are refused, and {most_refused} may be left out "
            "(replay.max_refused_fraction)."
        )

    @contextmanager
    def old_policy(self, microbatches: Sequence[PolicyMicrobatch]) -> Iterator[Routing]:
        """Context for a pass for old logprobs. Yields its routing."""
        if self._replay.kind == "r3":
            taped = self._taped(microbatches, RoutingTape.impose, self._from_rollout, "rollout_routes")
        else:
            name = None if self._from_rollout is None else "rollout_routes"
            taped = self._taped(microbatches, RoutingTape.record, self._recorded, name, against=self._from_rollout)
        with ExitStack() as stack:
            routing = stack.enter_context(taped)
            if self._shift is not None:
                layouts = [layout_of(microbatch) for microbatch in microbatches]
                routing = stack.enter_context(self._shift.recording(layouts, routing))
            yield routing

    @contextmanager
    def update(
        self, microbatches: Sequence[PolicyMicrobatch | LocalMicrobatch], *, is_old_policy: bool
    ) -> Iterator[Routing]:
        """Context for an optimizer step; yields its routing. `microbatches` include texts that are mixed in.
        `is_old_policy` says that the weights are the old policy's and the update skips the old-logprob pass.
        """
        with ExitStack() as stack:
            routing = stack.enter_context(self._update(microbatches, is_old_policy=is_old_policy))
            if self._shift is not None and not is_old_policy:
                # Texts come after the completions and have no old scores.
                layouts = [
                    layout_of(microbatch) for microbatch in microbatches if isinstance(microbatch, PolicyMicrobatch)
                ]
                compared, plain = stack.enter_context(self._shift.comparing(layouts, routing)), routing

                def mixed(chunk: nn.Module, index: int) -> AbstractContextManager[None]:
                    return (compared if index < len(layouts) else plain)(chunk, index)

                yield mixed
            else:
                yield routing

    @property
    def next_router_shift(self) -> Callable[[], Tensor] | None:
        """Function that returns the router-shift ratio `[T]` of an update's next microbatch at each call, on the last
        stage. None if the ratio is not used.
        """
        return None if self._shift is None else self._shift.take

    def _update(
        self, microbatches: Sequence[PolicyMicrobatch | LocalMicrobatch], *, is_old_policy: bool
    ) -> AbstractContextManager[Routing]:
        if self._replay.kind == "r3":
            # With rollout logprobs there was no earlier pass, and the first update has the old policy's weights.
            is_first = not self._is_recorded and self._state.progress.step == self._version
            name = "rollout_routes" if is_old_policy or is_first else "routes"
            return self._taped(microbatches, RoutingTape.impose, self._from_rollout, name)
        if is_old_policy or not self._is_recorded:
            return nullcontext(free_routing)
        start = RoutingTape.observe if self._replay.kind == "none" else RoutingTape.impose
        return self._taped(microbatches, start, self._recorded, "routes")

    def reference(self, microbatches: Sequence[PolicyMicrobatch]) -> AbstractContextManager[Routing]:
        """Context for a pass of the reference policy. Yields its routing."""
        if self._replay.reference == "live":
            return nullcontext(free_routing)
        return self.of_old_policy(microbatches)

    @property
    def has_engine_routes(self) -> bool:
        """Whether the rollout engine's routes of the rollout batch are cached."""
        return self._from_rollout is not None

    @property
    def has_old_routes(self) -> bool:
        """Whether the old policy's routes are cached: recorded by the pass for old logprobs, or imposed by R3."""
        return self._recorded is not None and (self._is_recorded or self._replay.kind == "r3")

    def live(self, microbatches: Sequence[PolicyMicrobatch]) -> AbstractContextManager[Routing]:
        """Context for a pass with live routes in all layers. Yields its routing."""
        return nullcontext(free_routing)

    def of_rollout(self, microbatches: Sequence[PolicyMicrobatch]) -> AbstractContextManager[Routing]:
        """Context for a pass that imposes the rollout engine's routes. Yields its routing."""
        return self._taped(microbatches, RoutingTape.impose, self._from_rollout, None)

    def of_old_policy(self, microbatches: Sequence[PolicyMicrobatch]) -> AbstractContextManager[Routing]:
        """Context for a pass that imposes the routes of the pass for old logprobs. Yields its routing."""
        cache = self._from_rollout if self._replay.kind == "r3" else self._recorded
        return self._taped(microbatches, RoutingTape.impose, cache, None)

    def recorded_live(self, microbatches: Sequence[PolicyMicrobatch]) -> AbstractContextManager[Routing]:
        """Context for a pass like `live` that records its routes for `live_before`, until the next such pass."""
        assert self._live is not None, "replay.split_layers is not set"
        self._live.drop(self._version)
        return self._taped(microbatches, RoutingTape.record, self._live, None)

    @contextmanager
    def live_before(
        self, microbatches: Sequence[PolicyMicrobatch], layer: int, *, of_rollout: bool
    ) -> Iterator[Routing]:
        """Context for a pass with live routes before `layer`, as recorded by `recorded_live`, and from `layer` on the
        routes of `of_rollout` or `of_old_policy`. Yields its routing.
        """
        given = self._from_rollout if of_rollout or self._replay.kind == "r3" else self._recorded
        assert given is not None and self._live is not None and self._mixed is not None
        known = set(given.samples(self._version))
        for sample in self._live.samples(self._version):
            if sample in known:
                self._mixed.add_mixed(self._version, sample, self._live, given, layer)
        with self._taped(microbatches, RoutingTape.impose, self._mixed, None) as routing:
            yield routing
        self._mixed.drop(self._version)

    def take_metrics(self) -> list[Metric]:
        """Return metrics of the passes since the last call."""
        metrics, self._metrics = self._metrics, []
        return metrics

    @contextmanager
    def _taped(
        self,
        microbatches: Sequence[PolicyMicrobatch | LocalMicrobatch],
        start: Callable[[RoutingTape], Routing],
        cache: RoutingCache | None,
        name: str | None,
        against: RoutingCache | None = None,
    ) -> Iterator[Routing]:
        """Start a tape on entry with `start` (`RoutingTape.record`, `impose` or `observe`) and check its accounts on
        exit. Yields the routing, which is free without a `cache`. Without a `name` there are no metrics.
        """
        if cache is None:
            yield free_routing
            return
        if start is RoutingTape.record:
            self._filled.add(cache)
        state, phase = self._state, self._state.timers.phase
        with phase("routes"):
            of_engine = self.has_engine_routes and self._from_rollout in (cache, against)
            layouts = [layout_of(microbatch, of_engine=of_engine) for microbatch in microbatches]
            tape = RoutingTape(state.chunks, state.mesh, layouts, cache, self._version, against)
        with tape:
            with phase("routes"):
                routing = start(tape)
            yield routing
            with phase("routes"):
                metrics = tape.finish(name or "routes")
        if name == "rollout_routes":
            assert tape.totals is not None
            self._compared.append(tape.totals)
            self._faulty |= self._limit.problems_of_samples(tape.disjoint_by_sample)
        self._metrics += metrics if name else []
        if self.trace is not None and name:
            self.trace.add_changed(name, tape.changed_tokens())


def routes_of(prompt: Prompt, completion: Completion, group: int | None = None) -> "RolloutRoutes | None":
    """Return the engine's routes of a completion, without segments' last tokens, which enter no layer; or None."""
    if completion.experts_TLK is None:
        return None
    from mcore_rl.replay.from_rollouts import RolloutRoutes  # only where engines return routes

    shape = SampleShape(
        replica_rank=0,
        num_prompt_tokens=len(prompt.tokens_T),
        num_completion_tokens=len(completion.tokens_T),
        is_trained=False,
        segments=completion.segments,
    )
    tokens_T = torch.tensor((*prompt.tokens_T, *completion.tokens_T))[shape.input_P]
    return RolloutRoutes(tokens_T, completion.experts_TLK, group)


RoutedPass = Callable[[Sequence[PolicyMicrobatch]], AbstractContextManager[Routing]]
"""Context manager for the routing of one pass over these microbatches: a method of `PolicyRoutes`."""


class PolicyLogprobs:
    """Computes logprobs under the current weights of the policy's modules."""

    def __init__(self, chunks: Sequence[nn.Module], head: LogprobHead, *, is_moe: bool) -> None:
        self.head = head
        self._chunks, self._is_moe = chunks, is_moe

    @torch.no_grad()
    def of(self, minibatch: Minibatch, routed: RoutedPass, *, is_imposed: bool) -> list[Tensor]:
        """Collective over the world: return logprobs `[T]` of each microbatch, on the last stage only. `routed` opens
        the pass's routing context, and the pass proves that this imposes routes, or imposes none (`is_imposed`).
        """
        chunks, microbatches = self._chunks, minibatch.microbatches
        with evaluating(chunks), routed(microbatches) as routing, self.proving(is_imposed=is_imposed):
            outputs = run_pass(chunks, microbatches, self.head, backward=False, routing=routing)
        return [output["logprobs"] for output in outputs]

    def added(self, minibatch: Minibatch, field: str, routed: RoutedPass, *, is_imposed: bool) -> Minibatch:
        """Collective over the world: return the minibatch with the logprobs in `field`."""
        if not minibatch.num_samples:
            return minibatch
        return minibatch.with_numbers(field, self.of(minibatch, routed, is_imposed=is_imposed))

    def proving(self, *, is_imposed: bool) -> AbstractContextManager[None]:
        """Context that proves that the pass inside imposes routes, or imposes none; a dense model needs no proof."""
        return proving(self._chunks, is_imposed=is_imposed) if self._is_moe else nullcontext()
