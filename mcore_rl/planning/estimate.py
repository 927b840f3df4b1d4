"""An estimate of a run on a cluster: memory by stage, and seconds of a step as a range with its reasons."""

from dataclasses import dataclass
from math import isinf

from mcore_rl.checks.cluster import placement
from mcore_rl.planning.memory import Memory, main_memory_of_fullest_node, memory_by_stage
from mcore_rl.planning.parts import Workload
from mcore_rl.planning.place import Place
from mcore_rl.planning.rates import Span, span_of_step
from mcore_rl.planning.rollout import RlStep
from mcore_rl.planning.schedule import chunks_in_flight
from mcore_rl.planning.simulate import (
    MAX_PASSES,
    ChunkTimes,
    Simulation,
    simulate_mesh,
    step_times,
    unit_times,
)
from mcore_rl.planning.step import (
    Sensitivity,
    imbalance_costs,
    model_tflops,
    sensitivities,
    step,
    tokens_per_s,
)
from mcore_rl.planning.training import Training

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
    if mesh.pp > 1 and 2 * microbatches * mesh.vpp * mesh.pp <= MAX_PASSES:
        simulation = simulate_mesh(times_of(training, place), mesh, microbatches)
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
        chunks_alive=chunks_in_flight(mesh, fullest, microbatches),
        step=None if work is None else step_estimate(work, simulation),
        bubble=None if simulation is None else simulation.bubble,
        warnings=warnings,
        fullest_by_load=by_load,
        rl=None if work is None else place.rl_step(training, work),
    )


def times_of(training: Training, place: Place) -> ChunkTimes:
    """Return the times of all passes, in seconds if the device is known, else in layers."""
    work = place.workload(training)
    return unit_times(training.model, training.mesh) if work is None else step_times(work)


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
    costs = imbalance_costs(work, LOADS) if is_open else []
    return StepEstimate(
        span=span_of_step(
            seconds, str(work.model.family), work.device.name, work.rates, has_adapters=work.lora.is_on
        ),
        tokens_per_s=tokens_per_s(work, seconds),
        model_tflops=model_tflops(work, seconds),
        shares=dict(sorted(shares.items(), key=lambda share: -share[1])),
        limits=sensitivities(work),
        imbalance=dict(zip(LOADS, costs, strict=False)),
    )
