"""Rates of a cluster from a run on it: the host's time first, then the speed of the device, then the parts of RL.

The largest error in predictions of small models is the host's time to launch a layer's kernels. It is fitted if the
predicted device waits for the host; otherwise no step depends on it, and only the speed of the device is fitted.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean, median
from typing import Any

from mcore_rl.config.cluster import RatesConfig
from mcore_rl.errors import DataError
from mcore_rl.planning.parts import Workload
from mcore_rl.planning.place import Place
from mcore_rl.planning.rates import Rates, rates_of
from mcore_rl.planning.rollout import with_lengths
from mcore_rl.planning.step import step
from mcore_rl.planning.training import Training

LARGEST_HOST_S = 20e-3
"""Largest host time per layer that a calibration accepts; the rest is attributed to the device."""
LEAST_WAITS = 0.02
"""Minimum share of a step spent waiting for the host; below it the step does not determine the host's time."""
WARMING_UP = 2
"""Number of first records of a run that are ignored: they compile, allocate and read for the first time."""
LOGPROBS = ("time/old_logprobs_s", "time/reference_s", "time/values_s")
LOADS = "moe/expert_load"
UPDATES = ("time/forward_backward_s", "time/optimizer_s")


def calibrated(
    training: Training, place: Place, records: Sequence[Mapping[str, object]], name: str
) -> RatesConfig:
    """Return the rates with which the run's own step is predicted as it was measured.

    Args:
        training: The run's training.
        place: Its place, with the device; an imbalance of its rates replaces the run's.
        records: Its metrics, of metrics.jsonl.
        name: Its folder, for the text.

    Raises:
        DataError: If the run has too few steps, or the device's bandwidths are not known.
    """
    work = place.workload(training)
    if work is None:
        raise DataError(
            "a calibration needs the device that the run was on. Set node.device in the cluster's file."
        )
    timed = [record for record in records if UPDATES[0] in record]
    if len(timed) <= WARMING_UP:
        raise DataError(
            f"{name} has {len(timed)} records of steps, and the first {WARMING_UP} are left out. Train longer."
        )

    def measured(*names: str) -> float:
        values = [sum(float(str(step.get(name, 0.0))) for name in names) for step in timed[WARMING_UP:]]
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
    return fitted.model_copy(
        update={part: seen / bound for part, (bound, seen) in found.items() if bound and seen}
    )


def imbalance_of_run(ep: int, records: Sequence[Mapping[str, object]]) -> float | None:
    """Return the tokens of the fullest expert-parallel rank's experts as a multiple of the mean; None if every rank has
    all experts, or the run did not count.

    It is the mean over MoE layers, as each layer waits for its fullest rank, and the median over the records. Counts
    are of whole steps: single microbatches are less even.
    """
    if ep == 1:
        return None
    found = [_imbalance(loads, ep) for record in records if (loads := record.get(LOADS))]
    return median(found) if found else None


def _imbalance(loads: Any, ep: int) -> float:
    """Return the load of the fullest of `ep` ranks over their mean, for tokens by layer and expert."""
    of_layers = []
    for layer in loads:
        if sum(layer):  # dense layers have zeros
            local = len(layer) // ep
            ranks = [sum(layer[first : first + local]) for first in range(0, len(layer), local)]
            of_layers.append(max(ranks) * ep / sum(layer))
    return fmean(of_layers) if of_layers else 1.0


def fitted_speed(work: Workload, seconds: float) -> dict[str, float]:
    """Return the fields of RatesConfig with which a step takes this many seconds: `host_layer_s`, or `speed`, or
    both.
    """

    def with_host(host_s: float) -> float:
        return step(replace(work, rates=replace(work.rates, host_layer_s=host_s))).seconds

    planned = step(work)
    fields: dict[str, float] = {}
    if planned.parts.get("host waits", 0.0) >= LEAST_WAITS * planned.seconds:
        host_s = _where(with_host, seconds, 0.0, LARGEST_HOST_S)
        fields["host_layer_s"] = host_s
        if with_host(host_s) == seconds or 0.0 < host_s < LARGEST_HOST_S:
            return fields

    def with_speed(slowness: float) -> float:
        config = RatesConfig(speed=1 / slowness, host_layer_s=fields.get("host_layer_s"))
        return step(replace(work, rates=rates_of(config))).seconds

    fields["speed"] = 1 / _where(with_speed, seconds, 0.05, 20.0)
    return fields


def _where(rising: Callable[[float], float], wanted: float, low: float, high: float) -> float:
    """Return where a rising function has a value, by bisection; an end of the interval if the value is beyond it."""
    if rising(low) >= wanted:
        return low
    if rising(high) <= wanted:
        return high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < wanted else (low, middle)
    return (low + high) / 2
