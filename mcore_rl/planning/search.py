"""Every mesh of a run that passes the checks and fits, by predicted speed, with micro-batches and recomputation."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from math import isinf, log2
from typing import Any, Literal

from mcore_rl.checks.cluster import placement
from mcore_rl.checks.programs import program_of
from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.model import LayerKind, ModelConfig
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.config.run import RunConfig
from mcore_rl.config.toml import toml_value
from mcore_rl.errors import ConfigError
from mcore_rl.families import family_of
from mcore_rl.planning.estimate import Place
from mcore_rl.planning.layer_times import LayerTimes
from mcore_rl.planning.memory import Memory, StageMemory, layout_of
from mcore_rl.planning.rollout import KnownParts, RlStep, known_layers
from mcore_rl.planning.step import step
from mcore_rl.planning.training import Training, training_of

MAX_STAGES, MAX_CHUNKS, MAX_CP = 64, 12, 16
MICRO_BATCHES = (1, 2, 4)
LONG_SEQUENCE = 8192
"""Tokens of a sequence from which context parallelism is tried."""
MESH_FIELDS = ("tp", "pp", "vpp", "ep", "cp", "first_stage_layers", "last_stage_layers", "pp_layout", "dp")
"""Fields of `mesh` that a search changes."""


def meshes(training: Training, ranks_per_node: int) -> Iterator[MeshConfig]:
    """Yield every mesh on which sizes divide, with tp inside a node; fields beyond the sizes are the training's."""
    base, model, world_size = training.mesh, training.model, training.world_size
    stages = [pp for pp in _divisors(world_size) if pp <= min(model.num_layers, MAX_STAGES)]
    for pp in stages:
        for tp in _divisors(ranks_per_node):
            if (world_size // pp) % tp or model.num_heads % tp:
                continue
            for cp in _context_parallel(world_size // (pp * tp), tp, training.seq_length, base.cp):
                for ep in _expert_parallel(model, world_size // pp, base.etp):
                    for vpp in range(1, MAX_CHUNKS + 1) if pp > 1 else (1,):
                        for first, last, layout in _stages(model, pp, vpp):
                            sizes: dict[str, Any] = {"tp": tp, "pp": pp, "vpp": vpp, "ep": ep, "cp": cp, "dp": "auto"}
                            ends = {"first_stage_layers": first, "last_stage_layers": last, "pp_layout": layout}
                            yield base.model_copy(update=sizes | ends)


def with_kept_activations(training: Training) -> list[Training]:
    """Return the training with each micro-batch and kind of recomputation to try, the most kept activations first."""
    model, has_fp8 = training.model, training.platform.fp8 != "none"
    selective: list[tuple[str, ...]] = []
    # In 8 bits, norms and activations of experts can be recomputed only with some recipes and from TransformerEngine
    # 2.6 on, which a plan does not know.
    light: tuple[str, ...] = () if has_fp8 else ("layernorm",)
    if family_of(model).is_latent:
        light = ("mla_up_proj", *light)
        selective.append(light)
    if model.is_moe:
        selective += [("moe", *light)] if has_fp8 else [("moe_act", *light), ("moe", *light)]
    elif light:
        selective.append(("mlp", *light))
    kinds: list[dict[str, Any]] = [
        {"recompute": "none"},
        *({"recompute": "selective", "recompute_modules": modules} for modules in selective),
        {"recompute": "full"},
    ]
    return [
        replace(training, micro_batch=size, platform=training.platform.model_copy(update=kind))
        for size in (MICRO_BATCHES if training.rollouts is None else (1,))
        for kind in kinds
    ]


def relaxed(training: Training) -> Iterator[Training]:
    """Yield the training with routes of replay in main memory (cheap), then with optimizer state, then both."""
    routes, rollouts = None, training.rollouts
    if rollouts is not None and training.model.is_moe and rollouts.route_store == "device":
        routes = replace(training, rollouts=replace(rollouts, route_store="pinned"))
        yield routes
    if training.optim.offload_fraction or training.platform.precision != "bf16":
        return
    models = [
        replace(model, optim=model.optim.model_copy(update={"offload_fraction": 1.0})) if model.optim else model
        for model in training.models
    ]
    for choice in (training, routes):
        if choice is not None:
            yield replace(choice, models=tuple(models))


def configured(config: RunConfig, training: Training) -> RunConfig:
    """Return the config with all fields that a search changes as the training has them."""
    update: dict[str, Any] = {
        "mesh": training.mesh,
        "platform": training.platform,
        "train": config.train.model_copy(update={"micro_batch": training.micro_batch}),
        "optim": training.optim,
    }
    if isinstance(config, RlRunConfig) and training.rollouts is not None:
        update["replay"] = config.replay.model_copy(update={"store": training.rollouts.route_store})
        if config.critic is not None and training.critic is not None:
            critic = config.critic.model_copy(update={"optim": training.critic.optim})
            advantage = config.rl.advantage.model_copy(update={"critic": critic})
            update["rl"] = config.rl.model_copy(update={"advantage": advantage})
    return config.model_copy(update=update)


def _fields(training: Training) -> dict[str, Any]:
    fields = {f"mesh.{name}": getattr(training.mesh, name) for name in MESH_FIELDS}
    fields |= {
        "platform.recompute": training.platform.recompute,
        "platform.recompute_modules": training.platform.recompute_modules,
        "train.micro_batch": training.micro_batch,
        "optim.offload_fraction": training.optim.offload_fraction,
    }
    if training.critic is not None and training.critic.optim is not None:
        fields["rl.advantage.critic.optim.offload_fraction"] = training.critic.optim.offload_fraction
    if training.rollouts is not None:
        fields["replay.store"] = training.rollouts.route_store
    return fields


def toml_lines(fields: dict[str, Any]) -> list[str]:
    """Return fields as lines of TOML without blanks, which a command line takes too."""
    return [f"{key}={toml_value(value).replace(', ', ',')}" for key, value in fields.items()]


def _context_parallel(ranks: int, tp: int, seq_length: int, configured: int) -> Iterator[int]:
    for cp in _divisors(ranks):
        wanted = cp == 1 or cp == configured or (seq_length >= LONG_SEQUENCE and cp <= MAX_CP)
        if wanted and (cp == 1 or seq_length % (2 * cp * tp) == 0):
            yield cp


def _expert_parallel(model: ModelConfig, ranks: int, etp: int) -> Iterator[int]:
    if not model.is_moe:
        yield 1
        return
    for ep in _divisors(model.moe.num_experts):
        if ranks % (ep * etp) == 0:
            yield ep


def _stages(
    model: ModelConfig, pp: int, vpp: int
) -> Iterator[tuple[int | None, int | None, Literal["balanced"] | None]]:
    """Yield layers of first and last stage, which have fewer if layers do not divide, and the chunks' layout."""
    layers = model.num_layers
    if layers % (pp * vpp) == 0:
        yield None, None, None
    if pp == 1:
        return
    if (layers + 2 + model.mtp_layers) % (pp * vpp) == 0:
        chunks = MeshConfig(pp=pp, vpp=vpp, pp_layout="balanced").chunk_layers(layers, model.mtp_layers)
        if min(chunks[:-1]) > 0 and chunks[-1] >= 0:
            yield None, None, "balanced"
    if layers % (pp * vpp) == 0:
        return
    each = -(-layers // pp)
    each += -each % vpp
    lacking = each * pp - layers
    # Embedding and output are work of the ends: the last stage, which has the loss, has as few layers as the first or
    # fewer.
    for less in sorted({lacking // 2, 0}):
        first, last = each - less, each - (lacking - less)
        if first > 0 and last > 0 and first % vpp == 0 and last % vpp == 0 and pp > 2:
            yield (None if first == each else first), last, None


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


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
    """Predicted seconds of a step, in RL of the whole step `rl`; None if the device is unknown."""
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
        return (self.mesh.model_parallel, kind, self.mesh.vpp, -self.training.micro_batch, self.memory.total)

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
        """Return the fastest choice of each layout among those that a prediction cannot tell apart from the fastest,
        those first whose tensor, context and expert groups lie within a node, without those that leave less than SPARE
        of the device's memory if any mesh leaves it.
        """
        choices = self.with_spare()
        fastest = choices[0].seconds if choices else None
        alike = [choice for choice in choices if not (fastest and choice.seconds and choice.seconds > WITHIN * fastest)]
        ranks = self.place.ranks_per_node
        alike.sort(key=lambda choice: max(choice.mesh.tp * choice.mesh.cp, choice.mesh.ep * choice.mesh.etp) > ranks)
        return self._of_each_layout(alike, SHOWN)

    def nearest(self) -> list[Choice]:
        """Return the choices that change the fewest fields of the config, ordered by speed among equals."""
        by_distance = sorted(
            self.choices, key=lambda choice: (_distance(self.training, choice.training), *choice.order)
        )
        return self._of_each_layout(by_distance, NEAREST_SHOWN)

    def changes(self, choice: Choice) -> dict[str, Any]:
        """Return the fields of the config that a choice sets."""
        before, after = _fields(self.training), _fields(choice.training)
        if choice.training.platform.recompute != "selective":
            del after["platform.recompute_modules"]
        return {key: value for key, value in after.items() if value != before[key]}

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
        choices = with_kept_activations(training)
        layers: dict[tuple[Any, ...], dict[LayerKind, LayerTimes]] = {}
        known = KnownParts()
        for mesh in meshes(training, self.place.ranks_per_node):
            self.tried += len(choices)
            accepted: dict[int, bool] = {}
            layout = None
            for kept in choices:
                chosen = replace(kept, mesh=mesh)
                if kept.micro_batch not in accepted:
                    # Recomputed modules are present in the model by construction; the rest does not depend on
                    # recomputation.
                    accepted[kept.micro_batch] = self.accepts(chosen)
                if not accepted[kept.micro_batch]:
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
                    seconds = step(work, known_layers(work, layers)).seconds if whole is None else whole.seconds
                self.choices.append(Choice(training=chosen, memory=memory, seconds=seconds, rl=whole))
        self.choices.sort(key=lambda choice: choice.order)

    def _memory(self, stages: StageMemory) -> Memory | None:
        memory = stages.fullest(self.place.room_bytes)
        if memory.total > self.place.room_bytes:
            return None
        is_limited = bool(memory.main_memory) and not isinf(self.place.host_bytes)
        if is_limited and stages.on_node(self.place.ranks_per_node) > self.place.host_bytes:
            return None
        return memory


def search(config: RunConfig, world_size: int, place: Place) -> Search:
    """Return all combinations that the checks accept and that fit, in a fixed order. Meshes with routes and optimizer
    state in main memory are added if no other leaves SPARE of the device's memory.
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
    routes = training.rollouts is not None and training.rollouts.route_store != "device"
    return routes, training.optim.offload_fraction > 0


def _distance(old: Training, new: Training) -> float:
    """Return the distance in doublings, steps of recomputation, and layouts."""
    sizes = [(getattr(old.mesh, axis), getattr(new.mesh, axis)) for axis in ("tp", "pp", "vpp", "ep", "cp")]
    sizes.append((old.micro_batch, new.micro_batch))
    kinds = [RECOMPUTE.index(training.platform.recompute) for training in (old, new)]
    same = old.platform.recompute_modules == new.platform.recompute_modules
    modules = 0.5 if kinds[0] == kinds[1] == 1 and not same else 0.0
    layout = 0.5 if old.mesh.pp_layout != new.mesh.pp_layout else 0.0
    doublings = sum(abs(log2(after / before)) for before, after in sizes)
    waiting = sum(after != before for before, after in zip(_waiting(old), _waiting(new), strict=True)) / 2
    return doublings + abs(kinds[1] - kinds[0]) / 2 + modules + layout + waiting
