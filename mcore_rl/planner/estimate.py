"""An estimate of a run on a cluster: memory by stage, and seconds of a step as a range with its reasons."""

from dataclasses import dataclass, replace
from math import inf, isinf

from mcore_rl.checks.cluster import placement
from mcore_rl.checks.programs import Program
from mcore_rl.config.cluster import ClusterConfig
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.config.run import RunConfig
from mcore_rl.plan.activations import layers_of
from mcore_rl.plan.device import device_of
from mcore_rl.plan.memory import GIB, Memory, main_memory_of_fullest_node, memory_by_stage
from mcore_rl.plan.schedule import chunks_in_flight
from mcore_rl.planner.parts import Workload, workload_of
from mcore_rl.planner.rates import Span, rates_of, span_of_step
from mcore_rl.planner.rollout import RlStep, engine_of, rl_step
from mcore_rl.planner.search import Place
from mcore_rl.planner.simulate import (
    MAX_PASSES,
    ChunkTimes,
    Simulation,
    simulate_mesh,
    step_times,
    unit_times,
)
from mcore_rl.planner.step import (
    Sensitivity,
    closed_form,
    imbalance_costs,
    model_tflops,
    sensitivities,
    step,
    tokens_per_s,
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
    limits: list[Sensitivity]
    imbalance: dict[float, float]
    """Load of the fullest rank's experts, as a multiple of the mean -> fraction of the speed that is lost; empty if the
    load is an input, or every rank has all experts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """Memory and time of one config on one place."""

    config: RunConfig
    place: Place
    seq_length: int
    num_microbatches: int
    stages: list[Memory]
    chunks_alive: int
    """Model chunks of the fullest stage that wait for their backward pass."""
    step: StepEstimate | None
    """Seconds of a step; None if nothing is known of the device's bandwidths."""
    bubble: float | None
    """Fraction of the schedule, simulated, in which the busiest stage is idle; None without a pipeline, and for a
    schedule that is too long to simulate."""
    warnings: list[str]
    fullest_by_load: dict[float, int]
    """Load of the fullest rank's experts, as a multiple of the mean -> bytes of the fullest stage; empty if the load is
    an input, or every rank has all experts."""
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
        return main_memory_of_fullest_node(self.stages, self.place.world_size, self.place.ranks_per_node)


def place_of(
    cluster: ClusterConfig,
    world_size: int,
    *,
    server_nodes: int = 0,
    completion_tokens: int | None = None,
    imbalance: float | None = None,
) -> Place:
    """Return this many ranks of a cluster, in addition to nodes of servers.

    Args:
        cluster: The cluster.
        world_size: Number of ranks.
        server_nodes: Nodes of inference servers in addition.
        completion_tokens: Mean length of a completion; None: half of the longest.
        imbalance: Tokens sent to the experts of the fullest rank, as a multiple of the mean; None: from the cluster's
            rates, if they have it.

    Raises:
        ConfigError: The cluster's device is not known by the name given.
    """
    node, rates = cluster.node, rates_of(cluster.rates)
    if imbalance is not None:
        rates = replace(rates, imbalance=imbalance, imbalance_source="--imbalance")
    return Place(
        world_size=world_size,
        ranks_per_node=node.ranks_per_node,
        room_bytes=(node.gpu_memory_gib - node.reserved_gib) * GIB if node.gpus else inf,
        device=device_of(cluster),
        host_bytes=inf if node.memory_gib == "all" else node.memory_gib * GIB,
        rates=rates,
        server_gpus=server_nodes * node.gpus,
        completion_tokens=completion_tokens,
    )


def estimate(config: RunConfig, program: Program, place: Place) -> Estimate:
    """Return a run's memory and time; its config has passed the program's checks for `place`."""
    seq_length, world = program.seq_length(config), place.world_size
    imbalance = place.rates.imbalance
    stages = memory_by_stage(config, world, seq_length, imbalance or 1.0)
    by_load: dict[float, int] = {}
    if imbalance is None and config.model.is_moe and config.mesh.ep > 1:
        by_load = {
            load: max(stage.total for stage in memory_by_stage(config, world, seq_length, load))
            for load in LOADS
        }
    microbatches = max(1, config.train.global_batch * config.mesh.model_parallel // world)
    microbatches = max(1, microbatches // config.train.micro_batch)
    warnings = list(placement(config.model, config.mesh, place.ranks_per_node, world).warnings)
    timed, work = None, _workload(config, place, seq_length)
    if work is not None:
        microbatches = work.num_microbatches
    simulation = None
    if config.mesh.pp > 1 and 2 * microbatches * config.mesh.vpp * config.mesh.pp <= MAX_PASSES:
        simulation = timeline_of(config, place, seq_length, microbatches)
    if work is not None:
        timed = step_estimate(work, simulation)
    if (
        layers_of(config.platform, allows_te=config.allows_te) == "te"
        and config.platform.layers == "auto"
        and not isinf(place.room_bytes)
    ):
        warnings.append(
            'activations are those of TransformerEngine\'s layers, which platform.layers="auto" takes where it is '
            "installed; ours keep more"
        )
    fullest = max(stages, key=lambda stage: stage.total).stage
    whole = None
    if work is not None and isinstance(config, RlRunConfig):
        engine = engine_of(config.mesh, config.rl.engine, world, place.server_gpus, place.rates)
        whole = None if engine is None else rl_step(config, work, engine, place.completion_tokens)
    return Estimate(
        config=config,
        place=place,
        seq_length=seq_length,
        num_microbatches=microbatches,
        stages=stages,
        chunks_alive=chunks_in_flight(config.mesh, fullest, microbatches),
        step=timed,
        bubble=None if simulation is None else simulation.bubble,
        warnings=warnings,
        fullest_by_load=by_load,
        rl=whole,
    )


def timeline_of(config: RunConfig, place: Place, seq_length: int, num_microbatches: int) -> Simulation:
    """Return the schedule of this many microbatches, in seconds if the device is known, else in layers."""
    return simulate_mesh(times_of(config, place, seq_length), config.mesh, num_microbatches)


def times_of(config: RunConfig, place: Place, seq_length: int) -> ChunkTimes:
    """Return the times of all passes, in seconds if the device is known, else in layers."""
    work = _workload(config, place, seq_length)
    return unit_times(config.model, config.mesh) if work is None else step_times(work)


def _workload(config: RunConfig, place: Place, seq_length: int) -> Workload | None:
    """Return the step of a run; None if the device's bandwidths are not known."""
    if place.device is None or place.device.links is None:
        return None
    return workload_of(config, place.device, place.world_size, seq_length, place.rates)


def step_estimate(work: Workload, simulation: Simulation | None) -> StepEstimate:
    """Return the seconds of a step with its limits, with the simulation's bubble if there was a simulation."""
    parts = dict(step(work).parts)
    if simulation is not None:
        # The closed form is right for equal stages and free messages.
        parts["bubble"] = simulation.seconds - max(simulation.busy_s)
        del parts["pipeline messages"]
    seconds = sum(parts.values())
    shares = {name: part / seconds for name, part in parts.items()}
    is_open = work.model.is_moe and work.mesh.ep > 1 and work.rates.imbalance is None
    costs = imbalance_costs(work, closed_form, LOADS) if is_open else []
    return StepEstimate(
        span=span_of_step(
            seconds, str(work.model.family), work.device.name, work.rates, has_adapters=work.lora.is_on
        ),
        tokens_per_s=tokens_per_s(work, seconds),
        model_tflops=model_tflops(work, seconds),
        shares=dict(sorted(shares.items(), key=lambda share: -share[1])),
        limits=sensitivities(work, closed_form),
        imbalance=dict(zip(LOADS, costs, strict=False)),
    )


def step_name(config: RunConfig) -> str:
    """Return the name of a step, which in reinforcement learning is only a part of a step."""
    return "update" if isinstance(config, RlRunConfig) else "step"
