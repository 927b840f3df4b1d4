"""Every mesh of a run on a number of ranks that passes the checks and fits, by predicted speed."""

from dataclasses import dataclass, field
from math import inf, isinf, log2
from typing import Any

from mcore_rl.checks.cluster import placement
from mcore_rl.checks.programs import Program
from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.model import LayerKind
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.config.run import RunConfig
from mcore_rl.errors import ConfigError
from mcore_rl.plan.device import Device
from mcore_rl.plan.memory import Memory, StageMemory, layout_of
from mcore_rl.planner.meshes import changed_fields, meshes, relaxed, ways_to_keep, with_choice
from mcore_rl.planner.parts import LayerTimes, Workload, workload_of
from mcore_rl.planner.rates import Rates
from mcore_rl.planner.rollout import KnownParts, RlStep, engine_of, known_layers, rl_step
from mcore_rl.planner.step import step

WITHIN = 1.3
"""Relative difference below which predicted steps count as equal (bench/plan.py)."""
SHOWN = 8
SPARE = 0.04
"""Share of the device's memory for tensors that a mesh should leave free: an estimate is not exact to the last GiB."""
RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """A mesh that fits."""

    config: RunConfig
    memory: Memory
    seconds: float | None
    """Predicted seconds of a step, or of the whole step `rl` of reinforcement learning if it is known; None if nothing
    is known of the device."""
    rl: RlStep | None = None
    """Rollout batch with its updates; None without reinforcement learning, a known device, or known servers."""

    @property
    def mesh(self) -> MeshConfig:
        """The mesh."""
        return self.config.mesh


@dataclass(slots=True)
class Search:
    """Result of a search."""

    tried: int = 0
    """Combinations of a mesh, a micro-batch and a kind of recomputation."""
    refused: int = 0
    """Combinations that the checks refuse."""
    too_large: int = 0
    """Combinations that do not fit into the device's memory."""
    choices: list[Choice] = field(default_factory=list)
    """Combinations that fit, the fastest first; without a device, those with most room first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """The ranks that a search is for."""

    world_size: int
    ranks_per_node: int
    room_bytes: float
    """Memory of a device for tensors."""
    device: Device | None
    """Device; None or one without bandwidths: nothing is predicted of time."""
    host_bytes: float = inf
    """Main memory of a node; inf: not known."""
    rates: Rates = field(default_factory=Rates)
    """Parts of the device's peaks that are reached, and the host's cost."""
    server_gpus: int = 0
    """GPUs of inference servers in addition to these ranks."""
    completion_tokens: int | None = None
    """Mean length of a completion; None: half of the longest."""


def search(config: RunConfig, program: Program, place: Place) -> Search:
    """Return all combinations that the program's checks accept and that fit, in a fixed order.

    If none leaves SPARE of the device's memory, meshes with routes of replay and optimizer state in main memory are
    included.
    """
    result = _search(config, program, place)
    enough = (1 - SPARE) * place.room_bytes
    for other in relaxed(config):
        if any(choice.memory.total <= enough for choice in result.choices) or not result.too_large:
            break
        more = _search(other, program, place)
        result = Search(
            tried=result.tried + more.tried,
            refused=result.refused + more.refused,
            too_large=result.too_large + more.too_large,
            choices=sorted([*result.choices, *more.choices], key=_order),
        )
    return result


def _search(config: RunConfig, program: Program, place: Place) -> Search:
    result, ways = Search(), ways_to_keep(config)
    seq_length = program.seq_length(config)
    layers: dict[tuple[Any, ...], dict[LayerKind, LayerTimes]] = {}
    known = KnownParts()
    for mesh in meshes(config.mesh, config.model, place.world_size, place.ranks_per_node, seq_length):
        result.tried += len(ways)
        accepted: dict[int, bool] = {}
        layout = None
        for way in ways:
            chosen = with_choice(config, mesh, way)
            if way.micro_batch not in accepted:
                # Recomputed modules are present in the model by construction; the rest does not depend on
                # recomputation.
                accepted[way.micro_batch] = is_accepted(chosen, program, place)
            if not accepted[way.micro_batch]:
                result.refused += 1
                continue
            layout = layout or layout_of(chosen)
            imbalance = place.rates.imbalance or 1.0
            stages = StageMemory(chosen, place.world_size, seq_length, layout, imbalance)
            memory = stages.fullest(place.room_bytes)
            is_too_large = memory.total > place.room_bytes
            if not is_too_large and memory.main_memory and not isinf(place.host_bytes):
                is_too_large = stages.on_node(place.ranks_per_node) > place.host_bytes
            if is_too_large:
                result.too_large += 1
                continue
            seconds, whole = None, None
            if place.device is not None and place.device.links is not None:
                work = workload_of(chosen, place.device, place.world_size, seq_length, place.rates)
                whole = _whole_step(chosen, work, place, known)
                seconds = step(work, known_layers(work, layers)).seconds if whole is None else whole.seconds
            result.choices.append(Choice(config=chosen, memory=memory, seconds=seconds, rl=whole))
    result.choices.sort(key=_order)
    return result


def is_accepted(config: RunConfig, program: Program, place: Place) -> bool:
    """Return whether the program's checks accept a config on these ranks, and its groups fit well on nodes."""
    try:
        program.check(config, place.world_size)
    except ConfigError:
        return False
    return not placement(config.model, config.mesh, place.ranks_per_node, place.world_size).refused


def shortlist(found: Search, program: Program, place: Place) -> list[Choice]:
    """Return the fastest choice of each layout among the choices that a prediction cannot tell apart from the fastest.

    Choices that leave less than SPARE of the device's memory are left out if any mesh leaves it.
    """
    shown: dict[tuple[int, ...], Choice] = {}
    choices = with_spare(found, place)
    for choice in choices:
        fastest = choices[0].seconds
        if fastest and choice.seconds and choice.seconds > WITHIN * fastest:
            break
        if _layout(choice) not in shown and is_accepted(choice.config, program, place):
            shown[_layout(choice)] = choice
        if len(shown) == SHOWN:
            break
    return list(shown.values())


def with_spare(found: Search, place: Place) -> list[Choice]:
    """Return the choices that leave SPARE of the device's memory, the fastest first; all if none does."""
    enough = (1 - SPARE) * place.room_bytes
    return [choice for choice in found.choices if choice.memory.total <= enough] or found.choices


def nearest(found: Search, config: RunConfig, program: Program, place: Place, count: int = 3) -> list[Choice]:
    """Return the choices that change the fewest fields of the config, ordered by speed among equals."""
    by_distance = sorted(
        found.choices, key=lambda choice: (_distance(config, choice.config), *_order(choice))
    )
    shown: dict[tuple[int, ...], Choice] = {}
    for choice in by_distance:
        if len(shown) == count:
            break
        if _layout(choice) not in shown and is_accepted(choice.config, program, place):
            shown[_layout(choice)] = choice
    return list(shown.values())


def changes(config: RunConfig, choice: Choice) -> dict[str, Any]:
    """Return the fields of the config that a choice sets."""
    return changed_fields(config, choice.config)


def _layout(choice: Choice) -> tuple[int, ...]:
    """Return the fields that make two choices different for people, which chunks and recomputation do not."""
    mesh = choice.mesh
    return (mesh.tp, mesh.pp, mesh.ep, mesh.cp, *_waiting(choice.config))


def _waiting(config: RunConfig) -> tuple[bool, bool]:
    """Return whether routes of replay and state of the optimizer wait in main memory."""
    routes = isinstance(config, RlRunConfig) and config.replay.store != "device"
    return routes, config.optim.offload_fraction > 0


def _order(choice: Choice) -> tuple[float, ...]:
    """Fastest first; without times, the choice that exchanges and recomputes least."""
    mesh, kind = choice.mesh, RECOMPUTE.index(choice.config.platform.recompute)
    if choice.seconds is not None:
        return (choice.seconds, choice.memory.total)
    return (mesh.model_parallel, kind, mesh.vpp, -choice.config.train.micro_batch, choice.memory.total)


def _whole_step(config: RunConfig, work: Workload, place: Place, known: KnownParts) -> RlStep | None:
    """Return the rollout batch of a run with its updates; None if it has none, or its servers are not known."""
    if not isinstance(config, RlRunConfig):
        return None
    engine = engine_of(config.mesh, config.rl.engine, place.world_size, place.server_gpus, place.rates)
    return None if engine is None else rl_step(config, work, engine, place.completion_tokens, known)


def _distance(old: RunConfig, new: RunConfig) -> float:
    """Return how far two choices are from each other, in doublings, steps of recomputation, and layouts."""
    sizes = [(getattr(old.mesh, axis), getattr(new.mesh, axis)) for axis in ("tp", "pp", "vpp", "ep", "cp")]
    sizes.append((old.train.micro_batch, new.train.micro_batch))
    kinds = [RECOMPUTE.index(config.platform.recompute) for config in (old, new)]
    same = old.platform.recompute_modules == new.platform.recompute_modules
    modules = 0.5 if kinds[0] == kinds[1] == 1 and not same else 0.0
    layout = 0.5 if old.mesh.pp_layout != new.mesh.pp_layout else 0.0
    doublings = sum(abs(log2(after / before)) for before, after in sizes)
    waiting = sum(after != before for before, after in zip(_waiting(old), _waiting(new), strict=True)) / 2
    return doublings + abs(kinds[1] - kinds[0]) / 2 + modules + layout + waiting
