"""Seconds of an optimizer step by its parts, and its limit.

The order of passes is that of Megatron's schedules (1F1B, and interleaved, arXiv 2104.04473). A single plan simulates
it with the times of each chunk; a search takes the bubble in closed form.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.model import LayerKind, ModelConfig
from mcore_rl.planning.device import SENSITIVITIES
from mcore_rl.planning.flops import train_flops_per_token
from mcore_rl.planning.layer_times import LayerTimes, Roofline, Workload, all_layer_times, output_times
from mcore_rl.planning.weights import Weights, layer_kinds_by_stage, layers_by_chunk, weights_by_stage, with_adapters

Kind = Literal["F", "B"]
"""A forward or a backward pass."""
Pass = tuple[Kind, int, int]
"""Kind, model chunk on its stage, and microbatch."""


def schedule(pp: int, vpp: int, num_microbatches: int, stage: int) -> list[Pass]:
    """Return a stage's passes in Megatron's order; with several chunks microbatches go round in groups of `pp`."""
    total = num_microbatches * vpp
    if vpp == 1:
        warmup = pp - stage - 1
    else:
        warmup = 2 * (pp - stage - 1) + (vpp - 1) * pp
    warmup = min(warmup, total)
    groups = [range(first, min(first + pp, num_microbatches)) for first in range(0, num_microbatches, pp)]
    forward = [(chunk, microbatch) for group in groups for chunk in range(vpp) for microbatch in group]
    # Backward passes go through the chunks in reverse order.
    backward = [(vpp - 1 - chunk, microbatch) for chunk, microbatch in forward]
    passes: list[Pass] = [("F", *forward[index]) for index in range(warmup)]
    for index in range(total - warmup):
        passes += [("F", *forward[warmup + index]), ("B", *backward[index])]
    return passes + [("B", *backward[index]) for index in range(total - warmup, total)]


def chunks_in_flight(mesh: MeshConfig, stage: int, num_microbatches: int) -> int:
    """Return the largest number of a stage's model chunks that wait for their backward pass (1F1B)."""
    if mesh.vpp == 1:
        return min(mesh.pp - stage, num_microbatches)
    # Megatron's warm-up of the interleaved schedule (arXiv 2104.04473), and the microbatch in its forward pass.
    warmup = 2 * (mesh.pp - stage - 1) + (mesh.vpp - 1) * mesh.pp
    return min(warmup + 1, num_microbatches * mesh.vpp)


def most_kept(mesh: MeshConfig, stage: int, num_microbatches: int, kept: Sequence[int]) -> int:
    """Return the most bytes that a stage keeps at a time, if a microbatch keeps `kept[chunk]` of them in a chunk."""
    # After the warm-up each group of pp microbatches is as the one before it.
    num_microbatches = min(num_microbatches, 4 * mesh.pp)
    now = most = 0
    for kind, chunk, _ in schedule(mesh.pp, mesh.vpp, num_microbatches, stage):
        now += kept[chunk] if kind == "F" else -kept[chunk]
        most = max(most, now)
    return most


MAX_PASSES = 300_000
"""Maximum number of passes of a schedule that is simulated; longer schedules take seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulation:
    """Result of a simulation."""

    seconds: float
    busy_s: list[float]
    """Seconds of computation of each stage."""
    alive: list[int]
    """Largest number of chunks, on each stage, that wait for their backward pass."""

    @property
    def bubble(self) -> float:
        """Fraction of the time in which the busiest stage computes nothing."""
        return 1 - max(self.busy_s) / self.seconds


def simulate(
    passes: Sequence[Sequence[Pass]],
    seconds_of: Callable[[Kind, int, int], float],
    message_s: float = 0.0,
    *,
    overlap: bool = False,
) -> Simulation:
    """Return when each pass of each stage happens; messages take `message_s`, and stages wait without `overlap`."""
    pp = len(passes)
    vpp = 1 + max(chunk for stage in passes for _, chunk, _ in stage)
    last = pp * vpp - 1
    ends: dict[tuple[Kind, int, int], float] = {}
    clocks, busy, alive, most = [0.0] * pp, [0.0] * pp, [0] * pp, [0] * pp
    position = [0] * pp
    while any(position[stage] < len(passes[stage]) for stage in range(pp)):
        for stage in range(pp):
            for kind, chunk, microbatch in passes[stage][position[stage] :]:
                place = chunk * pp + stage
                before = _before(kind, place, last)
                ready = 0.0
                if before is not None:
                    source = ends.get((*before, microbatch))
                    if source is None:
                        break
                    # A backward pass of the last chunk begins from its own output, without a message.
                    travels = message_s if before[1] != place and pp > 1 else 0.0
                    ready = source + travels
                start = max(clocks[stage], ready)
                end = start + seconds_of(kind, stage, chunk)
                sends = not overlap and pp > 1 and (place < last if kind == "F" else place > 0)
                ends[kind, place, microbatch] = end
                busy[stage] += end - start
                clocks[stage] = end + (message_s if sends else 0.0)
                alive[stage] += 1 if kind == "F" else -1
                most[stage] = max(most[stage], alive[stage])
                position[stage] += 1
    return Simulation(seconds=max(ends.values()), busy_s=busy, alive=most)


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkTimes:
    """Seconds of the passes of every model chunk, and of a message between two stages."""

    seconds: dict[tuple[int, int], tuple[float, float]]
    """Forward and backward pass of a microbatch, by stage and chunk."""
    message_s: float

    def of_pass(self, kind: Kind, stage: int, chunk: int) -> float:
        """Return the seconds of a pass."""
        return self.seconds[stage, chunk][kind == "B"]


def step_times(work: Workload) -> ChunkTimes:
    """Return the seconds of every chunk."""
    layers = {kind: (layer.forward, layer.backward) for kind, layer in all_layer_times(work).items()}
    return _chunk_times(work.model, work.mesh, layers, output_times(work), message_seconds(work))


def unit_times(model: ModelConfig, mesh: MeshConfig) -> ChunkTimes:
    """Return times for an unknown device: a layer takes 1 second forwards and 2 backwards."""
    return _chunk_times(model, mesh, dict.fromkeys(model.all_kinds, (1.0, 2.0)), (0.0, 0.0), 0.0)


def simulate_mesh(times: ChunkTimes, mesh: MeshConfig, num_microbatches: int) -> Simulation:
    """Return the schedule of this many microbatches on a mesh."""
    passes = [schedule(mesh.pp, mesh.vpp, num_microbatches, stage) for stage in range(mesh.pp)]
    return simulate(passes, times.of_pass, times.message_s, overlap=mesh.vpp > 1 and mesh.overlap_p2p)


def _chunk_times(
    model: ModelConfig,
    mesh: MeshConfig,
    layers: Mapping[LayerKind, tuple[float, float]],
    output: tuple[float, float],
    message_s: float,
) -> ChunkTimes:
    kinds, last = model.layer_kinds, (mesh.pp - 1, mesh.vpp - 1)
    seconds: dict[tuple[int, int], tuple[float, float]] = {}
    for stage, chunks in enumerate(layers_by_chunk(model, mesh)):
        for chunk, indices in enumerate(chunks):
            times = [layers[kinds[index]] for index in indices]
            if (stage, chunk) == last:
                times += [output] * (1 + model.mtp_layers) + [layers[model.mtp_kind]] * model.mtp_layers
            seconds[stage, chunk] = (sum(time[0] for time in times), sum(time[1] for time in times))
    return ChunkTimes(seconds=seconds, message_s=message_s if mesh.pp > 1 else 0.0)


def _before(kind: Kind, place: int, last: int) -> tuple[Kind, int] | None:
    """Return the pass that makes a pass's input, by kind and position in the model; None for the first."""
    if kind == "F":
        return ("F", place - 1) if place else None
    return ("B", place + 1) if place < last else ("F", place)


LEAST_EXPOSED = 0.1
"""Smallest part of the exchange of gradients that computation does not hide."""
MAIN_MOVED_BYTES = 2 * 4 + 2
"""Bytes that Adam moves for a weight besides gradient and moments: fp32 copy, read and written, and new weight."""
HOST_LINK_BYTES = 4 + 2
"""Bytes of an offloaded weight that travel: the fp32 gradient to main memory, the 16-bit weight back."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """Seconds of a step on the fullest rank, by activity."""

    parts: dict[str, float]

    @property
    def seconds(self) -> float:
        """Seconds of the whole step."""
        return sum(self.parts.values())


def stage_times(work: Workload, layers: dict[LayerKind, LayerTimes]) -> list[LayerTimes]:
    """Return the seconds of each stage for a microbatch; the last stage has the output and the MTP layers."""
    stages = []
    for stage, kind in enumerate(layer_kinds_by_stage(work.model, work.mesh)):
        counts = dict(kind)
        is_last = stage == work.mesh.pp - 1
        if is_last and work.model.mtp_layers:
            last = work.model.mtp_kind
            counts[last] = counts.get(last, 0) + work.model.mtp_layers
        parts: dict[str, float] = {}
        for layer, count in counts.items():
            for name, seconds in layers[layer].parts.items():
                parts[name] = parts.get(name, 0.0) + count * seconds
        forward = sum(layers[layer].forward * count for layer, count in counts.items())
        backward = sum(layers[layer].backward * count for layer, count in counts.items())
        if is_last:
            heads = 1 + work.model.mtp_layers
            output = output_times(work)
            forward, backward = forward + heads * output[0], backward + heads * output[1]
            parts["output"] = heads * sum(output)
        stages.append(LayerTimes(forward, backward, parts))
    return stages


def message_seconds(work: Workload) -> float:
    """Return the seconds of a message between two pipeline stages."""
    roof = Roofline(work)
    inside = 2 * work.world_size // work.mesh.pp <= roof.links.domain
    speed, latency = (roof.link if inside else roof.nic), work.rates.nic_latency_s
    return roof.slice * work.model.hidden_size * roof.element / speed + latency


def step(work: Workload, layers: dict[LayerKind, LayerTimes] | None = None) -> Step:
    """Return the seconds of a step, the bubble in closed form (arXiv 2104.04473); `layers` may be known already."""
    stages = stage_times(work, layers or all_layer_times(work))
    totals = [stage.forward + stage.backward for stage in stages]
    slowest, count, vpp, pp = max(totals), work.num_microbatches, work.mesh.vpp, work.mesh.pp
    message = message_seconds(work) if pp > 1 else 0.0
    # 1F1B without interleaving sends between computations; half of it is hidden.
    parts = {name: count * seconds for name, seconds in stages[totals.index(slowest)].parts.items()}
    parts["bubble"] = (sum(totals) - slowest) / vpp + 2 * message * (pp - 1)
    parts["pipeline messages"] = count * message if vpp == 1 else 0.0
    return Step(parts=parts | _finish(work, slowest))


def _finish(work: Workload, slowest: float) -> dict[str, float]:
    roof, mesh = Roofline(work), work.mesh
    stages = with_adapters(weights_by_stage(work.model, work.mesh), work.lora, work.model, work.mesh)
    if work.lora.is_on:
        stages = [Weights(dense=stage.dense_adapters, expert=stage.expert_adapters) for stage in stages]
    weights = max(stages, key=lambda stage: stage.dense + stage.expert)
    expert_dp = max(1, work.world_size // (mesh.etp * mesh.ep * mesh.pp))
    dense_dp = work.dp * mesh.cp

    def exchange(element: int) -> float:
        dense = roof.ring(weights.dense * element, dense_dp, mesh.tp)
        return dense + roof.ring(weights.expert * element, expert_dp, mesh.ep * mesh.etp)

    reduce, gather = exchange(work.gradient_bytes), exchange(roof.element)
    if not work.is_sharded:
        reduce, gather = 2 * reduce, 0.0  # reduced gradients are gathered, and no weights
    if work.overlap_dp:
        hidden = slowest / mesh.vpp
        reduce = max(reduce - hidden, LEAST_EXPOSED * reduce)
        gather = max(gather - hidden / 3, LEAST_EXPOSED * gather)
    share = weights.dense / dense_dp + weights.expert / expert_dp
    if not work.is_sharded:
        share = float(weights.dense + weights.expert)
    on_device, rates = share * (1 - work.offload_fraction), work.rates
    state_bytes = MAIN_MOVED_BYTES + work.gradient_bytes + 2 * work.moment_bytes  # moments are read and written
    parts = {
        "gradients": reduce,
        "parameters": gather,
        "optimizer": roof.moved(on_device * state_bytes) + roof.moved(float(work.gradient_bytes) * weights.trainable),
        "start and end": rates.fixed_s,
    }
    if work.offload_fraction:
        offloaded = share - on_device
        update = offloaded * state_bytes / (rates.host_memory_gbytes_per_s * 1e9)
        travel = offloaded * HOST_LINK_BYTES / (rates.host_link_gbytes_per_s * 1e9)
        parts["optimizer in main memory"] = max(update, travel) if work.offload_overlap else update + travel
    return parts


def tokens_per_s(work: Workload, seconds: float) -> float:
    """Return the tokens per second on each device."""
    return work.global_batch * work.seq_length / seconds / work.world_size


def model_tflops(work: Workload, seconds: float) -> float:
    """Return the model TFLOP/s of each device (planning/flops.py)."""
    return tokens_per_s(work, seconds) * train_flops_per_token(work.model, work.seq_length, work.lora) / 1e12


@dataclass(frozen=True, kw_only=True, slots=True)
class Sensitivity:
    """Gain of a step from a term without cost."""

    term: str
    gain: float
    """Additional tokens per second, as a fraction."""


def sensitivities(work: Workload) -> list[Sensitivity]:
    """Return the gain from each of SENSITIVITIES, the largest first."""
    seconds = step(work).seconds
    found = []
    for term, changes in SENSITIVITIES.items():
        freed = step(replace(work, rates=replace(work.rates, **changes))).seconds
        found.append(Sensitivity(term=term, gain=seconds / freed - 1))
    return sorted(found, key=lambda sensitivity: -sensitivity.gain)


def imbalance_costs(work: Workload, loads: Sequence[float]) -> list[float]:
    """Return how much of its speed a step loses if the fullest rank's experts get these multiples of the mean."""
    seconds = step(work).seconds
    return [1 - seconds / step(replace(work, imbalance=load)).seconds for load in loads]
