"""An estimate of a run on a cluster: memory by stage, seconds of a step as a range, and rates from a finished run.

A calibration fits the host's time to launch a layer if the predicted device waits for the host; else only the device's
speed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf, isinf
from pathlib import Path
from statistics import fmean, median
from typing import cast

from mcore_rl.checks.cluster import placement
from mcore_rl.checks.programs import PROGRAMS
from mcore_rl.config.cluster import ClusterConfig, RatesConfig
from mcore_rl.config.load import load_config
from mcore_rl.errors import ConfigError, DataError
from mcore_rl.planning import step as timing
from mcore_rl.planning.device import Device, Rates, Span, device_of, known_device, rates_of, span_of_step
from mcore_rl.planning.layer_times import Workload, workload_of
from mcore_rl.planning.memory import GIB, Memory, main_memory_of_fullest_node, memory_by_stage
from mcore_rl.planning.rollout import KnownParts, RlStep, engine_of, rl_step, with_lengths
from mcore_rl.planning.training import Training, training_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """The ranks of a plan, but for their number."""

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
    completion_tokens: float | None = None
    """Mean length of a completion; None: half of the longest."""

    def workload(self, training: Training) -> Workload | None:
        """Return the optimizer step of a training; None if the device's bandwidths are not known."""
        if self.device is None or self.device.links is None:
            return None
        return workload_of(training, self.device, self.rates)

    def rl_step(self, training: Training, work: Workload, known: KnownParts | None = None) -> RlStep | None:
        """Return the rollout batch with its updates; None without RL, or if the number of servers is not known. Parts
        of other steps of the same run and place are read from `known` and added to it.
        """
        if training.rollouts is None:
            return None
        engine = engine_of(training, self.server_gpus, self.rates)
        if engine is None:
            return None
        return rl_step(training, work, engine, self.completion_tokens, known or KnownParts())


def place_of(
    cluster: ClusterConfig,
    *,
    server_nodes: int = 0,
    completion_tokens: int | None = None,
    imbalance: float | None = None,
) -> Place:
    """Return the ranks of a cluster, in addition to `server_nodes` of inference servers. `completion_tokens` is a mean
    (None: half of the longest), `imbalance` a multiple of the mean load. Raises ConfigError for an unknown device.
    """
    node, rates = cluster.node, rates_of(cluster.rates)
    if imbalance is not None:
        rates = replace(rates, imbalance=imbalance, imbalance_source="--imbalance")
    return Place(
        ranks_per_node=node.ranks_per_node,
        room_bytes=(node.gpu_memory_gib - node.reserved_gib) * GIB if node.gpus else inf,
        device=device_of(cluster),
        host_bytes=inf if node.memory_gib == "all" else node.memory_gib * GIB,
        rates=rates,
        server_gpus=server_nodes * node.gpus,
        completion_tokens=completion_tokens,
    )


LOADS = (1.1, 1.3, 2.0)
"""Loads of the fullest rank's experts, as multiples of the mean, for which the cost is reported."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepEstimate:
    """Seconds of an optimizer step."""

    span: Span
    tokens_per_s: float
    """Likely tokens per second on each device."""
    model_tflops: float
    """Likely model TFLOP/s of each device."""
    shares: dict[str, float]
    """Fractions of the step by activity, the largest first."""
    limits: list[timing.Sensitivity]
    imbalance: dict[float, float]
    """Load of the fullest rank's experts (multiple of the mean) -> fraction of the speed that is lost; may be empty."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """Memory and time of one training on one place."""

    training: Training
    place: Place
    num_microbatches: int
    stages: list[Memory]
    chunks_alive: int
    """Model chunks of the fullest stage that wait for their backward pass."""
    step: StepEstimate | None
    """Seconds of a step; None if nothing is known of the device's bandwidths."""
    bubble: float | None
    """Simulated fraction in which the busiest stage is idle; None without a pipeline or for too long a schedule."""
    warnings: list[str]
    fullest_by_load: dict[float, int]
    """Load of the fullest rank's experts (multiple of the mean) -> bytes of the fullest stage; may be empty."""
    rl: RlStep | None = None
    """Rollout batch with its updates; None without reinforcement learning, a known device, or known servers."""

    @property
    def fullest(self) -> Memory:
        """The stage that needs most memory."""
        return max(self.stages, key=lambda stage: stage.total)

    @property
    def fits(self) -> bool:
        """Whether every stage fits into the device's memory for tensors, and its waiting tensors into main memory."""
        return self.fullest.total <= self.place.room_bytes and self.fits_main_memory

    @property
    def fits_main_memory(self) -> bool:
        """Whether the tensors that wait in main memory fit."""
        return self.fullest_node_bytes <= self.place.host_bytes

    @property
    def fullest_node_bytes(self) -> int:
        """Bytes of main memory of the node with the ranks that need most."""
        return main_memory_of_fullest_node(self.stages, self.training.world_size, self.place.ranks_per_node)


def estimate(training: Training, place: Place) -> Estimate:
    """Return the memory and time of a training."""
    model, mesh, world = training.model, training.mesh, training.world_size
    imbalance = place.rates.imbalance
    stages = memory_by_stage(training, imbalance or 1.0)
    by_load: dict[float, int] = {}
    if imbalance is None and model.is_moe and mesh.ep > 1:
        by_load = {load: max(stage.total for stage in memory_by_stage(training, load)) for load in LOADS}
    microbatches = max(1, training.global_batch * mesh.model_parallel // world)
    microbatches = max(1, microbatches // training.micro_batch)
    warnings = list(placement(model, mesh, place.ranks_per_node, world).warnings)
    work = place.workload(training)
    if work is not None:
        microbatches = work.num_microbatches
    simulation = None
    if mesh.pp > 1 and 2 * microbatches * mesh.vpp * mesh.pp <= timing.MAX_PASSES:
        # Without the device's bandwidths, in layers instead of seconds.
        times = timing.unit_times(model, mesh) if work is None else timing.step_times(work)
        simulation = timing.simulate_mesh(times, mesh, microbatches)
    if training.layers == "te" and training.platform.layers == "auto" and not isinf(place.room_bytes):
        warnings.append(
            'activations are those of TransformerEngine\'s layers, which platform.layers="auto" takes where it is '
            "installed; ours keep more"
        )
    fullest = max(stages, key=lambda stage: stage.total).stage
    return Estimate(
        training=training,
        place=place,
        num_microbatches=microbatches,
        stages=stages,
        chunks_alive=timing.chunks_in_flight(mesh, fullest, microbatches),
        step=None if work is None else step_estimate(work, simulation),
        bubble=None if simulation is None else simulation.bubble,
        warnings=warnings,
        fullest_by_load=by_load,
        rl=None if work is None else place.rl_step(training, work),
    )


def step_estimate(work: Workload, simulation: timing.Simulation | None) -> StepEstimate:
    """Return the seconds of a step with its limits, with the simulation's bubble if there was a simulation."""
    parts = dict(timing.step(work).parts)
    if simulation is not None:
        # The closed form is right for equal stages and free messages.
        parts["bubble"] = simulation.seconds - max(simulation.busy_s)
        del parts["pipeline messages"]
    seconds = sum(parts.values())
    shares = {name: part / seconds for name, part in parts.items()}
    is_open = work.model.is_moe and work.mesh.ep > 1 and work.rates.imbalance is None
    costs = timing.imbalance_costs(work, LOADS) if is_open else []
    return StepEstimate(
        span=span_of_step(seconds, str(work.model.family), work.device.name, work.rates, has_adapters=work.lora.is_on),
        tokens_per_s=timing.tokens_per_s(work, seconds),
        model_tflops=timing.model_tflops(work, seconds),
        shares=dict(sorted(shares.items(), key=lambda share: -share[1])),
        limits=timing.sensitivities(work),
        imbalance=dict(zip(LOADS, costs, strict=False)),
    )


NODE_GPUS = 8
"""GPUs of a node; the record of a run does not say how its ranks were distributed over nodes."""


@dataclass(frozen=True, slots=True)
class Planned:
    """The plan of a run on the device that it had."""

    step: Span
    """Seconds of an optimizer step; of RL, with completions as long as they may be."""
    memory_bytes: int
    """Device memory of the fullest rank."""


def plan_of_run(path: Path, stage: str, device_name: str, world_size: int) -> Planned | None:
    """Return the plan of the run of `stage` in `path`; None for a device that is not in the table, or an old config."""
    device = known_device(device_name)
    if stage not in PROGRAMS or device is None or device.links is None:
        return None
    program = PROGRAMS[stage]
    place = Place(ranks_per_node=min(NODE_GPUS, world_size), room_bytes=inf, device=device)
    try:
        config = load_config(program.config, path / "config.toml")
        program.check(config, world_size)
        plan = estimate(training_of(config, world_size), place)
    except ConfigError:
        return None
    assert plan.step is not None
    return Planned(plan.step.span, plan.fullest.total)


LARGEST_HOST_S = 20e-3
"""Largest host time per layer that a calibration accepts; the rest is attributed to the device."""
LEAST_WAITS = 0.02
"""Minimum share of a step spent waiting for the host; below it the step does not determine the host's time."""
WARMING_UP = 2
"""Number of first records of a run that are ignored: they compile, allocate and read for the first time."""
LOGPROBS = ("time/old_logprobs_s", "time/reference_s", "time/values_s")
EXPERT_LOADS = "moe/expert_load"
UPDATES = ("time/forward_backward_s", "time/optimizer_s")


def calibrated(training: Training, place: Place, records: Sequence[Mapping[str, object]], name: str) -> RatesConfig:
    """Return the rates with which the run's own step is predicted as metrics.jsonl (`records`) has it. Raises DataError
    if the run has too few steps, or the device's bandwidths are not known.
    """
    work = place.workload(training)
    if work is None:
        raise DataError("a calibration needs the device that the run was on. Set node.device in the cluster's file.")
    timed = [record for record in records if UPDATES[0] in record]
    if len(timed) <= WARMING_UP:
        raise DataError(
            f"{name} has {len(timed)} records of steps, and the first {WARMING_UP} are left out. Train longer."
        )

    def measured(*names: str) -> float:
        values = [sum(float(str(record.get(name, 0.0))) for name in names) for record in timed[WARMING_UP:]]
        return median(values)

    imbalance = place.rates.imbalance or imbalance_of_run(training.mesh.ep, timed[WARMING_UP:])
    work = replace(work, rates=replace(Rates(), imbalance=imbalance), imbalance=imbalance or 1.0)
    rollouts, seconds, mean = training.rollouts, measured(*UPDATES), None
    if rollouts is not None:
        mean = measured("rollout/completion_tokens")
        work = with_lengths(work, training.global_batch, measured("rollout/prompt_tokens") + mean)
        seconds /= rollouts.updates
    fitted = RatesConfig(source=name, imbalance=imbalance)
    fitted = fitted.model_copy(update=fitted_speed(work, seconds))
    place = replace(place, rates=rates_of(fitted), completion_tokens=mean)
    whole = place.workload(training)
    assert whole is not None
    planned = place.rl_step(training, whole)
    if planned is None:
        return fitted
    found = {
        "rollout": (planned.parts["rollout"], measured("time/rollout_s")),
        "logprobs": (planned.parts["logprobs and values"], measured(*LOGPROBS)),
        "updates": (planned.parts["updates"], measured(*UPDATES)),
    }
    return fitted.model_copy(update={part: seen / bound for part, (bound, seen) in found.items() if bound and seen})


def imbalance_of_run(ep: int, records: Sequence[Mapping[str, object]]) -> float | None:
    """Return the tokens of the fullest rank's experts as a multiple of the mean, averaged over MoE layers, the median
    of the records; None if every rank has all experts, or the run did not count.
    """
    if ep == 1:
        return None
    found = []
    for loads in filter(None, (record.get(EXPERT_LOADS) for record in records)):
        of_layers = []
        for layer in cast(Sequence[Sequence[float]], loads):
            if sum(layer):  # dense layers have zeros
                local = len(layer) // ep
                ranks = [sum(layer[first : first + local]) for first in range(0, len(layer), local)]
                of_layers.append(max(ranks) * ep / sum(layer))
        found.append(fmean(of_layers) if of_layers else 1.0)
    return median(found) if found else None


def fitted_speed(work: Workload, seconds: float) -> dict[str, float]:
    """Return the fields of RatesConfig (`host_layer_s`, `speed`) with which a step takes this many seconds."""

    def with_host(host_s: float) -> float:
        return timing.step(replace(work, rates=replace(work.rates, host_layer_s=host_s))).seconds

    planned = timing.step(work)
    fields: dict[str, float] = {}
    if planned.parts.get("host waits", 0.0) >= LEAST_WAITS * planned.seconds:
        host_s = _where(with_host, seconds, 0.0, LARGEST_HOST_S)
        fields["host_layer_s"] = host_s
        if with_host(host_s) == seconds or 0.0 < host_s < LARGEST_HOST_S:
            return fields

    def with_speed(slowness: float) -> float:
        config = RatesConfig(speed=1 / slowness, host_layer_s=fields.get("host_layer_s"))
        return timing.step(replace(work, rates=rates_of(config))).seconds

    fields["speed"] = 1 / _where(with_speed, seconds, 0.05, 20.0)
    return fields


def _where(rising: Callable[[float], float], wanted: float, low: float, high: float) -> float:
    """Return where a rising function has a value; an end of the interval if the value is beyond it."""
    if rising(low) >= wanted:
        return low
    if rising(high) <= wanted:
        return high
    for _ in range(60):  # halvings, after which the interval is below a float's resolution
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < wanted else (low, middle)
    return (low + high) / 2
