"""Seconds of a reinforcement-learning step by its parts, as a lower bound: generation, passes, updates, new weights.

Lengths of completions are log-normal, cut at the longest. The engine's scheduler, environments, rewards and queues are
not included: published steps took 1.1 to 4.4 times as long (`python -m bench.plan`).
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import ceil, erf, log, sqrt
from typing import Any

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.model import LayerKind, ModelConfig
from mcore_rl.config.rl.rollout import InProcessConfig, ServedConfig
from mcore_rl.families import family_of
from mcore_rl.planning.device import Device, Rates
from mcore_rl.planning.flops import forward_flops_per_token
from mcore_rl.planning.layer_times import LayerTimes, Workload, all_layer_times
from mcore_rl.planning.step import stage_times, step
from mcore_rl.planning.training import Training
from mcore_rl.planning.weights import Weights, delta_state_bytes, layer_weights, with_adapters

SPREAD = 0.6
"""Standard deviation of the logarithm of a completion's length."""
PUBLISHED_FACTORS = (1.1, 4.4)
"""Published steps as multiples of this bound."""
DECODE_PRODUCTS = 0.5
"""Fraction of the peak that the products of decoding reach when they are not bound by memory."""
STRIDE = 16
"""Tokens between two steps of decoding that are timed; the steps in between are assumed to take as long."""
ACROSS = 3.0
"""Seconds of a small message between nodes, as a multiple of a small message inside a node."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Engine:
    """The replicas of a model that generate."""

    replicas: int
    tp: int
    """GPUs that share each layer's dense weights."""
    ep: int
    """GPUs that share the experts of each layer, over which tokens of several replicas may meet."""
    slots: int
    """Completions in progress at a time on a replica."""
    layer_s: float
    """Seconds in which the host launches a layer."""
    is_served: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """Lengths in tokens, and the number of completions of a rollout batch."""

    num_completions: int
    prompt: int
    mean: float
    longest: int
    spread: float = SPREAD


@dataclass(frozen=True, kw_only=True, slots=True)
class RlStep:
    """Minimum seconds of a rollout batch with its updates."""

    parts: dict[str, float]
    """Seconds of rollout, logprobs, updates, critic, weights to servers; on their own ranks one after the other."""
    tail_s: float
    """Seconds of the rollout in which less than a tenth of the completions is in progress."""
    mean_tokens: float
    """Mean length of a completion in the plan."""
    factors: dict[str, float] = field(default_factory=dict)
    """Measured / planned seconds by part, of the run that the rates were calibrated with; empty: a bound."""

    @property
    def seconds(self) -> float:
        """Seconds of the whole step."""
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True)
class KnownParts:
    """Parts of the steps of a run that many of its meshes have in common; a search fills it."""

    generations: dict[Engine, tuple[float, float]] = field(default_factory=dict)
    """Engine -> seconds of a rollout batch, and of its tail."""
    layers: dict[tuple[Any, ...], dict[LayerKind, LayerTimes]] = field(default_factory=dict)
    """Seconds of the layers of an update (`known_layers`)."""


def known_layers(
    work: Workload, known: dict[tuple[Any, ...], dict[LayerKind, LayerTimes]]
) -> dict[LayerKind, LayerTimes]:
    """Return the seconds of the layers, which no pipeline stage changes, with `known` as a cache."""
    mesh = work.mesh
    key = (mesh.tp, mesh.ep, mesh.etp, mesh.cp, work.micro_batch, work.recompute, work.recompute_modules)
    if key not in known:
        known[key] = all_layer_times(work)
    return known[key]


def engine_of(training: Training, server_gpus: int, rates: Rates) -> Engine | None:
    """Return the engine of a run with rollouts; None for an unknown number of servers."""
    assert training.rollouts is not None
    mesh, engine = training.mesh, training.rollouts.engine
    if isinstance(engine, InProcessConfig):
        return Engine(
            replicas=training.replicas,
            tp=mesh.tp,
            ep=mesh.ep * mesh.etp,
            slots=engine.native_slots,
            layer_s=rates.decode_layer_native_s,
        )
    tp = engine.tensor_parallel
    replicas = training.world_size // tp if engine.share_gpus else server_gpus // tp or engine.count
    if not replicas:
        return None
    return Engine(
        replicas=replicas,
        tp=tp,
        ep=tp,
        # Each replica of the trained model requests this many completions at a time, from all servers together.
        slots=max(1, engine.requests * training.replicas // replicas),
        layer_s=rates.decode_layer_s,
        is_served=True,
    )


def rl_step(training: Training, work: Workload, engine: Engine, mean_tokens: float | None, known: KnownParts) -> RlStep:
    """Return the rollout batch of a run with its updates. `work` is its update with completions of the longest length,
    `mean_tokens` their mean length (None: half of the longest), `known` a cache for the same run and place.
    """
    rollouts = training.rollouts
    assert rollouts is not None
    longest, prompt = rollouts.completion_tokens, rollouts.prompt_tokens // 2
    mean = min(float(longest), mean_tokens or longest / 2)
    lengths = Lengths(num_completions=rollouts.num_completions, prompt=prompt, mean=mean, longest=longest)
    if engine not in known.generations:
        known.generations[engine] = generation(work.model, work.device, engine, lengths, work.rates)
    rollout, tail = known.generations[engine]
    update = with_lengths(work, training.global_batch, prompt + mean)
    layers = known_layers(update, known.layers)
    update_s = step(update, layers).seconds * rollouts.updates
    forward = forward_seconds(update, layers) * rollouts.updates / rollouts.epochs
    parts = {"rollout": rollout, "logprobs and values": rollouts.scoring_passes * forward, "updates": update_s}
    if rollouts.critic_epochs:
        parts["critic"] = update_s * (rollouts.critic_epochs / rollouts.epochs)
    if engine.is_served:
        sent = sum(_weights(work.model))
        if isinstance(rollouts.engine, ServedConfig) and rollouts.engine.lora == "adapter":
            (adapters,) = with_adapters([Weights()], work.lora, work.model, MeshConfig())
            sent = adapters.total
        elif isinstance(rollouts.engine, ServedConfig) and rollouts.engine.in_fp8:
            sent //= 2  # a byte each
        # Every server gets them once: a part of them over the network on each of its GPUs, the rest from the others.
        roof_nic = work.links.nic_gbit_per_s / 8 * 1e9 * work.rates.nic
        roof_link = work.links.link_gbytes_per_s * 1e9 * work.rates.link
        parts["weights to servers"] = 2 * sent / (roof_nic * engine.tp) + 2 * sent / (engine.tp * roof_link)
    factors = work.rates.rl_factors
    return RlStep(
        parts={name: seconds * factors.get(name, 1.0) for name, seconds in parts.items()},
        tail_s=tail * factors.get("rollout", 1.0),
        mean_tokens=mean,
        factors=factors,
    )


def with_lengths(work: Workload, global_batch: int, sample_tokens: float) -> Workload:
    """Return an update with samples of this mean length, packed as densely as can be."""
    packed = ceil(global_batch * sample_tokens / work.seq_length)
    rows = -(-packed // (work.dp * work.micro_batch)) * work.dp * work.micro_batch
    return replace(work, global_batch=rows, sample_length=ceil(sample_tokens))


def forward_seconds(work: Workload, layers: dict[LayerKind, LayerTimes] | None = None) -> float:
    """Return the seconds of a pass without gradients over the rows of an update; its layers may be known already."""
    stages = [stage.forward for stage in stage_times(work, layers or all_layer_times(work))]
    return (work.num_microbatches - 1) * max(stages) + sum(stages)


def generation(
    model: ModelConfig, device: Device, engine: Engine, lengths: Lengths, rates: Rates
) -> tuple[float, float]:
    """Return the seconds of a rollout batch, and those in which under a tenth of the completions is in progress."""
    rows = lengths.num_completions / engine.replicas
    slots = min(rows, float(engine.slots))
    context = lengths.prompt + lengths.mean / 2
    flops = (
        lengths.num_completions * lengths.prompt * sum(forward_flops_per_token(model, max(1, lengths.prompt)).values())
    )
    gpus = engine.replicas * engine.tp
    seconds = flops / gpus / (device.peak_tflops["bf16"] * 1e12 * DECODE_PRODUCTS)
    # Completions without a slot at first follow each other in slots that are always taken.
    steps = (rows - slots) * lengths.mean / slots
    weights = _weights(model)
    seconds += steps * decode_seconds(model, device, engine, slots, context, rates, weights)
    alive = share_longer(lengths.mean, lengths.longest, lengths.spread)
    tail = 0.0
    for token in range(0, lengths.longest, STRIDE):
        now = slots * alive(token)
        if now < 0.5:  # as long as one of the replica's completions is expected to go on
            break
        seen = lengths.prompt + token
        each = STRIDE * decode_seconds(model, device, engine, max(1.0, now), seen, rates, weights)
        seconds += each
        tail += each if now < slots / 10 else 0.0
    return seconds, tail


def decode_seconds(
    model: ModelConfig,
    device: Device,
    engine: Engine,
    rows: float,
    context: float,
    rates: Rates,
    weights: tuple[int, int] | None = None,
) -> float:
    """Return the seconds of one token for `rows` completions; `weights` are as `_weights` returns them."""
    links = device.links
    assert links is not None, f"no bandwidths of {device.name}"
    element = 2
    dense, expert = weights or _weights(model)
    met = rows * engine.ep / engine.tp  # tokens of all replicas that share experts
    touched = 1 - (1 - model.moe.top_k / model.moe.num_experts) ** met if model.is_moe else 0.0
    read = element * (dense / engine.tp + expert * touched / engine.ep)
    if family_of(model).is_latent:  # a server keeps latents, our engine all heads
        mla = model.mla
        whole = model.num_heads / engine.tp * (mla.qk_nope_head_dim + mla.qk_rope_head_dim + mla.v_head_dim)
        each = mla.kv_lora_rank + mla.qk_rope_head_dim if engine.is_served else whole
        cached = model.num_layers * each + model.mixers.count("indexed") * model.indexer.width
    else:
        cached = model.mixers.count("attention") * 2 * max(1.0, model.num_kv_heads / engine.tp) * model.head_dim
    read += element * rows * context * cached
    # A state is read and written.
    read += 2 * rows * model.mixers.count("delta") * delta_state_bytes(model, 1, element) / engine.tp
    flops = rows * sum(forward_flops_per_token(model, 2 * context).values()) / engine.tp
    computed = flops / (device.peak_tflops["bf16"] * 1e12 * DECODE_PRODUCTS)
    seconds = max(read / (links.hbm_gbytes_per_s * 1e9 * rates.hbm), computed)
    if max(engine.tp, engine.ep) > 1:
        inside = max(engine.tp, engine.ep) <= links.domain
        speed = links.link_gbytes_per_s * 1e9 * rates.link if inside else links.nic_gbit_per_s / 8 * 1e9 * rates.nic
        each = rates.decode_message_s * (1 if inside else ACROSS) + 2 * rows * model.hidden_size / speed
        seconds += 2 * model.num_layers * each
    return seconds + model.num_layers * engine.layer_s + rates.decode_step_s


def share_longer(mean: float, longest: int, spread: float) -> Callable[[float], float]:
    """Return the share of completions longer than t tokens: log-normal with this mean once cut at the longest."""
    width = spread * sqrt(2)
    logs = [log(max(token, 1)) for token in range(0, longest, STRIDE)]
    low, high = log(mean / 4), log(mean * 64)
    for _ in range(40):
        middle = (low + high) / 2
        found = STRIDE * sum(0.5 * (1 - erf((each - middle) / width)) for each in logs)
        low, high = (middle, high) if found < mean else (low, middle)

    def share(tokens: float) -> float:
        return 0.5 * (1 - erf((log(max(tokens, 1.0)) - middle) / width)) if tokens < longest else 0.0

    return share


def _weights(model: ModelConfig) -> tuple[int, int]:
    layers = {kind: layer_weights(model, MeshConfig(), kind) for kind in set(model.layer_kinds)}
    dense = sum(layers[kind].dense + layers[kind].frozen for kind in model.layer_kinds)
    expert = sum(layers[kind].expert for kind in model.layer_kinds)
    return dense + 2 * model.padded_vocab_size * model.hidden_size, expert
