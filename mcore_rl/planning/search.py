"""Every mesh of a run on a number of ranks that passes the checks and fits, by predicted speed."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import isinf, log2
from typing import Any

from mcore_rl.checks.cluster import placement
from mcore_rl.checks.programs import program_of
from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.model import LayerKind
from mcore_rl.config.run import RunConfig
from mcore_rl.errors import ConfigError
from mcore_rl.planning.memory import Memory, StageMemory, layout_of
from mcore_rl.planning.meshes import changed_fields, configured, meshes, relaxed, ways_to_keep
from mcore_rl.planning.parts import LayerTimes
from mcore_rl.planning.place import Place
from mcore_rl.planning.rollout import KnownParts, RlStep, known_layers
from mcore_rl.planning.step import step
from mcore_rl.planning.training import Training, training_of

WITHIN = 1.3
"""Relative difference below which predicted steps count as equal (bench/plan.py)."""
SHOWN = 8
NEAREST_SHOWN = 3
SPARE = 0.04
"""Share of the device's memory for tensors that a mesh should leave free: an estimate is not exact to the last GiB."""
RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """A mesh that fits."""

    training: Training
    """The training on this mesh."""
    memory: Memory
    seconds: float | None
    """Predicted seconds of a step, or of the whole step `rl` of reinforcement learning if it is known; None if nothing
    is known of the device."""
    rl: RlStep | None
    """Rollout batch with its updates; None without reinforcement learning, a known device, or known servers."""

    @property
    def mesh(self) -> MeshConfig:
        """The mesh."""
        return self.training.mesh

    @property
    def order(self) -> tuple[float, ...]:
        """Order among choices: the fastest first; without times, the choice that exchanges and recomputes least."""
        if self.seconds is not None:
            return (self.seconds, self.memory.total)
        kind = RECOMPUTE.index(self.training.platform.recompute)
        return (
            self.mesh.model_parallel,
            kind,
            self.mesh.vpp,
            -self.training.micro_batch,
            self.memory.total,
        )

    @property
    def layout(self) -> tuple[int, ...]:
        """The fields that make two choices different for people, which chunks and recomputation do not."""
        return (self.mesh.tp, self.mesh.pp, self.mesh.ep, self.mesh.cp, *_waiting(self.training))


@dataclass(kw_only=True, slots=True)
class Search:
    """The meshes of a training that the checks of its program accept and that fit."""

    training: Training
    """The training as it is configured."""
    place: Place
    accepts: Callable[[Training], bool]
    """Whether the checks accept a training."""
    tried: int = 0
    """Combinations of a mesh, a micro-batch and a kind of recomputation."""
    refused: int = 0
    """Combinations that the checks refuse."""
    too_large: int = 0
    """Combinations that do not fit into the device's memory."""
    choices: list[Choice] = field(default_factory=list)
    """Combinations that fit, the fastest first; without a device, those with most room first."""

    def with_spare(self) -> list[Choice]:
        """Return the choices that leave SPARE of the device's memory, the fastest first; all if none does."""
        enough = (1 - SPARE) * self.place.room_bytes
        return [choice for choice in self.choices if choice.memory.total <= enough] or self.choices

    def shortlist(self) -> list[Choice]:
        """Return the fastest choice of each layout among the choices that a prediction cannot tell apart from the
        fastest.

        Choices that leave less than SPARE of the device's memory are left out if any mesh leaves it.
        """
        choices = self.with_spare()
        fastest = choices[0].seconds if choices else None
        alike = [
            choice
            for choice in choices
            if not (fastest and choice.seconds and choice.seconds > WITHIN * fastest)
        ]
        return self._of_each_layout(alike, SHOWN)

    def nearest(self) -> list[Choice]:
        """Return the choices that change the fewest fields of the config, ordered by speed among equals."""
        by_distance = sorted(
            self.choices, key=lambda choice: (_distance(self.training, choice.training), *choice.order)
        )
        return self._of_each_layout(by_distance, NEAREST_SHOWN)

    def changes(self, choice: Choice) -> dict[str, Any]:
        """Return the fields of the config that a choice sets."""
        return changed_fields(self.training, choice.training)

    def _of_each_layout(self, choices: Iterable[Choice], count: int) -> list[Choice]:
        """Return the first `count` choices of different layouts that all checks accept."""
        shown: dict[tuple[int, ...], Choice] = {}
        for choice in choices:
            if len(shown) == count:
                break
            if choice.layout not in shown and self.accepts(choice.training):
                shown[choice.layout] = choice
        return list(shown.values())

    def try_all(self, training: Training) -> None:
        """Try all combinations for a training."""
        ways = ways_to_keep(training)
        layers: dict[tuple[Any, ...], dict[LayerKind, LayerTimes]] = {}
        known = KnownParts()
        for mesh in meshes(training, self.place.ranks_per_node):
            self.tried += len(ways)
            accepted: dict[int, bool] = {}
            layout = None
            for way in ways:
                chosen = way.of(training, mesh)
                if way.micro_batch not in accepted:
                    # Recomputed modules are present in the model by construction; the rest does not depend on
                    # recomputation.
                    accepted[way.micro_batch] = self.accepts(chosen)
                if not accepted[way.micro_batch]:
                    self.refused += 1
                    continue
                layout = layout or layout_of(chosen.models, mesh)
                memory = self._memory(StageMemory(chosen, layout, self.place.rates.imbalance or 1.0))
                if memory is None:
                    self.too_large += 1
                    continue
                seconds, whole = None, None
                work = self.place.workload(chosen)
                if work is not None:
                    whole = self.place.rl_step(chosen, work, known)
                    seconds = (
                        step(work, known_layers(work, layers)).seconds if whole is None else whole.seconds
                    )
                self.choices.append(Choice(training=chosen, memory=memory, seconds=seconds, rl=whole))
        self.choices.sort(key=lambda choice: choice.order)

    def _memory(self, stages: StageMemory) -> Memory | None:
        """Return the memory of the fullest stage; None if it does not fit, or what waits in main memory does not."""
        memory = stages.fullest(self.place.room_bytes)
        if memory.total > self.place.room_bytes:
            return None
        is_limited = bool(memory.main_memory) and not isinf(self.place.host_bytes)
        if is_limited and stages.on_node(self.place.ranks_per_node) > self.place.host_bytes:
            return None
        return memory


def search(config: RunConfig, world_size: int, place: Place) -> Search:
    """Return all combinations that the program's checks accept and that fit, in a fixed order.

    If none leaves SPARE of the device's memory, meshes with routes of replay and optimizer state in main memory are
    included.
    """
    program = program_of(config)

    def accepts(training: Training) -> bool:
        """Return whether the checks accept a training, and its groups fit well on nodes."""
        try:
            program.check(configured(config, training), world_size)
        except ConfigError:
            return False
        return not placement(training.model, training.mesh, place.ranks_per_node, world_size).refused

    found = Search(training=training_of(config, world_size), place=place, accepts=accepts)
    found.try_all(found.training)
    enough = (1 - SPARE) * place.room_bytes
    for training in relaxed(found.training):
        if any(choice.memory.total <= enough for choice in found.choices) or not found.too_large:
            break
        found.try_all(training)
    return found


def _waiting(training: Training) -> tuple[bool, bool]:
    """Return whether routes of replay and state of the optimizer wait in main memory."""
    routes = training.rollouts is not None and training.rollouts.route_store != "device"
    return routes, training.optim.offload_fraction > 0


def _distance(old: Training, new: Training) -> float:
    """Return how far two choices are from each other, in doublings, steps of recomputation, and layouts."""
    sizes = [(getattr(old.mesh, axis), getattr(new.mesh, axis)) for axis in ("tp", "pp", "vpp", "ep", "cp")]
    sizes.append((old.micro_batch, new.micro_batch))
    kinds = [RECOMPUTE.index(training.platform.recompute) for training in (old, new)]
    same = old.platform.recompute_modules == new.platform.recompute_modules
    modules = 0.5 if kinds[0] == kinds[1] == 1 and not same else 0.0
    layout = 0.5 if old.mesh.pp_layout != new.mesh.pp_layout else 0.0
    doublings = sum(abs(log2(after / before)) for before, after in sizes)
    waiting = sum(after != before for before, after in zip(_waiting(old), _waiting(new), strict=True)) / 2
    return doublings + abs(kinds[1] - kinds[0]) / 2 + modules + layout + waiting
