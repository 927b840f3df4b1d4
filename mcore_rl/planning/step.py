"""Seconds of an optimizer step: layers, pipeline, exchange of gradients, optimizer; and its limit."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mcore_rl.config.model import LayerKind
from mcore_rl.planning.adapters import with_adapters
from mcore_rl.planning.flops import train_flops_per_token
from mcore_rl.planning.parts import LayerTimes, Roofline, Workload, all_layer_times, output_times
from mcore_rl.planning.rates import SENSITIVITIES
from mcore_rl.planning.weights import Weights, layer_kinds_by_stage, weights_by_stage

LEAST_EXPOSED = 0.1
"""Smallest part of the exchange of gradients that computation does not hide."""
MAIN_MOVED_BYTES = 2 * 4 + 2
"""Bytes that Adam moves for a weight of its share apart from gradient and moments: the fp32 copy, read and written,
and the new weight.
"""

TRAVELLING_BYTES = 4 + 2
"""Bytes of an offloaded weight that travel: the fp32 gradient to main memory, the 16-bit weight back."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageTimes:
    """Seconds of all layers of one stage for one microbatch."""

    forward: float
    backward: float
    parts: dict[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """Seconds of a step on the fullest rank, by activity."""

    parts: dict[str, float]

    @property
    def seconds(self) -> float:
        """Seconds of the whole step."""
        return sum(self.parts.values())


def stage_times(work: Workload, layers: dict[LayerKind, LayerTimes]) -> list[StageTimes]:
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
        stages.append(StageTimes(forward=forward, backward=backward, parts=parts))
    return stages


def message_seconds(work: Workload) -> float:
    """Return the seconds of a message between two pipeline stages."""
    roof = Roofline(work)
    inside = 2 * work.world_size // work.mesh.pp <= roof.links.domain
    speed, latency = (roof.link if inside else roof.nic), work.rates.nic_latency_s
    return roof.slice * work.model.hidden_size * roof.element / speed + latency


def step(work: Workload, layers: dict[LayerKind, LayerTimes] | None = None) -> Step:
    """Return the seconds of a step, with the bubble of the schedule in closed form (arXiv 2104.04473).

    Args:
        work: The step.
        layers: Seconds of the layers, if they are known already: a search has many steps of the same layers.
    """
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
    """Return the seconds of gradients, parameters and optimizer, without the part hidden by computation."""
    roof, mesh = Roofline(work), work.mesh
    weights = max(_trained_by_stage(work), key=lambda stage: stage.dense + stage.expert)
    expert_dp = max(1, work.world_size // (mesh.etp * mesh.ep * mesh.pp))
    dense_dp = work.dp * mesh.cp

    def exchange(element: int) -> float:
        dense = roof.ring(weights.dense * element, dense_dp, mesh.tp)
        return dense + roof.ring(weights.expert * element, expert_dp, mesh.ep * mesh.etp)

    reduce, gather = exchange(work.gradient_bytes), exchange(roof.element)
    if work.overlap_dp:
        hidden = slowest / mesh.vpp
        reduce = max(reduce - hidden, LEAST_EXPOSED * reduce)
        gather = max(gather - hidden / 3, LEAST_EXPOSED * gather)
    share = weights.dense / dense_dp + weights.expert / expert_dp
    on_device = share * (1 - work.offload_fraction)
    parts = {
        "gradients": reduce,
        "parameters": gather,
        "optimizer": roof.moved(on_device * _state_moved_bytes(work))
        + roof.moved(float(work.gradient_bytes) * weights.trainable),
        "start and end": work.rates.fixed_s,
    }
    if work.offload_fraction:
        parts["optimizer in main memory"] = _offloaded(work, share - on_device)
    return parts


def _state_moved_bytes(work: Workload) -> int:
    """Return the bytes that Adam moves for a weight of its share; moments are read and written."""
    return MAIN_MOVED_BYTES + work.gradient_bytes + 2 * work.moment_bytes


def _offloaded(work: Workload, weights: float) -> float:
    """Return the seconds in which the CPU updates a rank's offloaded weights."""
    rates = work.rates
    update = weights * _state_moved_bytes(work) / (rates.host_memory_gbytes_per_s * 1e9)
    travel = weights * TRAVELLING_BYTES / (rates.host_link_gbytes_per_s * 1e9)
    return max(update, travel) if work.offload_overlap else update + travel


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


def _trained_by_stage(work: Workload) -> list[Weights]:
    """Return the trained weights of one rank of each pipeline stage: all weights, or the adapters."""
    stages = with_adapters(weights_by_stage(work.model, work.mesh), work.lora, work.model, work.mesh)
    if not work.lora.is_on:
        return stages
    return [Weights(dense=stage.dense_adapters, expert=stage.expert_adapters) for stage in stages]
