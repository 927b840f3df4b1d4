"""Seconds of one transformer layer on one rank, forwards and backwards, by part: a roofline for each operation.

A matrix product takes the larger of its arithmetic and its bytes; everything else its bytes. Sources: arXiv 2205.05198
for tensor and sequence parallelism, 2412.19437 section 3.2 (DeepEP) for experts' tokens, 2106.09685 for adapters.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from math import ceil, sqrt

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.model import LayerKind, ModelConfig
from mcore_rl.config.optim import LoraConfig, Target
from mcore_rl.config.speed import planned_flags
from mcore_rl.errors import ConfigError
from mcore_rl.families import family_of
from mcore_rl.planning.activations import CHUNK, load_of_fullest_rank
from mcore_rl.planning.device import Device, Links, Rates
from mcore_rl.planning.training import Training

TILE = 128
"""Rows and columns of a product that one multiprocessor computes at a time."""
REDONE = {
    "moe": ("experts", "expert activation", "permute", "router", "shared experts", "all-to-all"),
    "moe_act": ("expert activation",),
    "mla_up_proj": ("latent projections", "rotary"),
    "mlp": ("dense MLP", "activation"),
    "core_attn": ("attention",),
    "shared_experts": ("shared experts",),
    "layernorm": (),
}
"""Parts that each of `platform.recompute_modules` computes again."""
NORM_OF_NORMS = 1 / 3
"""Share of the norms' forward time that recomputing them takes: their reads stay in the backward pass."""
HOST_BACKWARD = 1.2
"""Host's time of a backward pass, as a multiple of the forward pass's."""
FP32_PRODUCTS = 1 / 15
"""Share of bf16's peak that products in fp32 reach, in which an indexer's scores are: 67 of 989 TFLOP/s of an H100."""
SORTED_BYTES = 100
"""Bytes that sorting moves for each score of an indexer: four passes over 4 bytes and 8 of an index, both ways."""

Seconds = tuple[float, float]
"""Seconds forwards, and backwards."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A training step on a device: everything that its time depends on."""

    model: ModelConfig
    mesh: MeshConfig
    device: Device
    world_size: int
    seq_length: int
    """Positions of a sequence, packed or not."""
    sample_length: int | None = None
    """Tokens that attend to each other, if several samples are packed; None for the whole sequence."""
    micro_batch: int
    """Sequences of one forward pass on a rank."""
    global_batch: int
    """Sequences of an optimizer step over all ranks."""
    precision: str = "bf16"
    fp8: bool = False
    recompute: str = "none"
    recompute_modules: tuple[str, ...] = ()
    defers_logits: bool = False
    """Whether the backward pass computes the logits again, a chunk at a time."""
    deepep: bool = False
    overlap_ep: bool = False
    """Whether the experts' exchange overlaps with another microbatch's computation."""
    overlap_dp: bool = True
    """Whether gradients are reduced during the backward pass."""
    gradient_bytes: int = 4
    """Bytes in which the gradient of a weight is summed and travels."""
    moment_bytes: int = 8
    """Bytes of both moments of a weight, or of its only one."""
    is_sharded: bool = True
    """Whether data-parallel ranks have shares of the optimizer's state, and gather the weights of the others."""
    offload_fraction: float = 0.0
    """Fraction of the optimizer's state that is in main memory."""
    offload_overlap: bool = True
    """Whether offloaded gradients and weights travel while the processor updates other weights."""
    imbalance: float = 1.0
    """Tokens sent to the fullest rank's experts, as a multiple of the mean."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Low-rank adapters; if there are any, only they are trained."""
    rates: Rates = field(default_factory=Rates)

    @property
    def dp(self) -> int:
        """Data-parallel ranks."""
        return self.world_size // self.mesh.model_parallel

    @property
    def num_microbatches(self) -> int:
        """Microbatches of a step on each rank."""
        return max(1, self.global_batch // (self.micro_batch * self.dp))

    @cached_property
    def load(self) -> float:
        """Tokens that the fullest rank's experts compute, as a multiple of the mean."""
        return load_of_fullest_rank(self.model, self.mesh, self.imbalance)

    @cached_property
    def links(self) -> Links:
        """The device's bandwidths, which a time needs."""
        assert self.device.links is not None, f"no bandwidths of {self.device.name}"
        return self.device.links


def workload_of(training: Training, device: Device, rates: Rates) -> Workload:
    """Return the optimizer step of a training on a device, with completions and answers of the longest length. Raises
    ConfigError if the device has no products in the run's number format.
    """
    model, mesh, platform = training.model, training.mesh, training.platform
    for name in (platform.precision, *(["fp8"] if platform.fp8 != "none" else [])):
        if name not in device.peak_tflops:
            raise ConfigError(
                f"{device.name} has no matrix products in {name}. Change platform.precision or platform.fp8, or "
                "node.device."
            )
    rows, sample = training.global_batch, training.sample_length
    if sample != training.seq_length or training.num_samples != rows:
        packed = -(-training.num_samples // max(1, training.seq_length // sample))
        rows = -(-packed // training.replicas) * training.replicas
    tokens, columns = (training.micro_batch * training.seq_length // mesh.cp, model.padded_vocab_size // mesh.tp)
    flags = planned_flags(platform, mesh, model, training.world_size, trains_mtp=training.rollouts is None)
    return Workload(
        model=model,
        mesh=mesh,
        device=device,
        world_size=training.world_size,
        seq_length=training.seq_length,
        sample_length=sample,
        micro_batch=training.micro_batch,
        global_batch=rows,
        precision=platform.precision,
        fp8=platform.fp8 != "none",
        recompute=platform.recompute,
        recompute_modules=platform.recompute_modules if platform.recompute == "selective" else (),
        defers_logits=platform.logits_chunk(tokens, columns) is not None,
        deepep=model.is_moe and model.moe.is_flex,
        overlap_dp=flags.overlap_grad_reduce,
        gradient_bytes=training.optim.gradient_bytes,
        moment_bytes=training.optim.moment_bytes,
        is_sharded=training.optim.is_sharded,
        offload_fraction=training.optim.offload_fraction,
        offload_overlap=training.optim.offload_overlap,
        imbalance=1.0 if rates.imbalance is None else rates.imbalance,
        lora=training.lora,
        rates=rates,
    )


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """Seconds of one layer, or of all layers of a stage, for one microbatch."""

    forward: float
    backward: float
    """Seconds including recomputation."""
    parts: dict[str, float]
    """Seconds of forward and backward pass by part; `recomputed` and `host waits` are among them."""


class Roofline:
    """Seconds of operations of a workload."""

    def __init__(self, work: Workload) -> None:
        self.work, self.rates, self.links = work, work.rates, work.links
        self.tokens = work.micro_batch * work.seq_length // work.mesh.cp
        self.slice = self.tokens // work.mesh.tp
        """Tokens of the residual stream on this rank."""
        self.element = 2 if work.precision == "bf16" else 4
        self.hbm = self.links.hbm_gbytes_per_s * 1e9 * self.rates.hbm
        self.link = self.links.link_gbytes_per_s * 1e9 * self.rates.link
        self.nic = self.links.nic_gbit_per_s / 8 * 1e9 * self.rates.nic
        self.peak = work.device.peak_tflops[work.precision] * 1e12

    def moved(self, num_bytes: float) -> float:
        """Seconds of reading and writing."""
        return num_bytes / self.hbm

    def product(self, rows: int, columns: int, inner: int, group: int | None = None, *, fp8: bool) -> float:
        """Seconds of a product [rows, inner] x [inner, columns], or of a group of this many at once."""
        if min(rows, columns, inner) <= 0:
            return 0.0
        peak, part = self.peak, self.rates.products
        if fp8:
            peak, part = self.work.device.peak_tflops["fp8"] * 1e12, self.rates.products_fp8
        if group is not None:
            full = rows / (rows + TILE)  # a group of few rows does not fill its tiles
        else:
            waves = ceil(rows / TILE) * ceil(columns / TILE) / self.links.num_multiprocessors
            # The last wave of tiles is not full; less than a whole wave leaves multiprocessors idle.
            full = max(0.25, waves) if waves < 1 else (waves / ceil(waves) if waves < 8 else 1.0)
        # With a short inner axis the start of a tile weighs more.
        deep = inner / (inner + 2 * TILE)
        count = 1 if group is None else group
        flops = 2.0 * ceil(rows / TILE) * TILE * columns * inner * count
        weight_bytes = 1 if fp8 else self.element
        moved = count * (rows * inner + columns * inner) * weight_bytes + count * rows * columns * self.element
        cast = self.moved(3.0 * count * rows * inner) if fp8 else 0.0
        return max(flops / (peak * part * full * deep), self.moved(moved)) + cast

    def linear(self, rows: int, columns: int, inner: int, group: int | None = None, *, fp8: bool = False) -> Seconds:
        """Seconds of a linear layer; backwards, the product for the weight counts only if the weight is trained."""
        forward, backward = self._trained(rows, columns, inner, group, fp8=fp8)
        if self.work.lora.is_on:
            backward = self.product(rows, inner, columns, group, fp8=fp8)
        return forward, backward

    def adapter(
        self,
        target: Target,
        rows: tuple[int, int],
        columns: int,
        inner: int,
        *,
        blocks: int = 1,
        group: int | None = None,
    ) -> Seconds:
        """Seconds of a layer's low-rank adapters: both products and the sum; 0 if `target` has none. `rows` are the
        tokens in the products with A and B (of each of `group` experts), `blocks` the projections that the layer packs.
        """
        model, lora = self.work.model, self.work.lora
        if target not in lora.targets_in(model):
            return 0.0, 0.0
        rank = lora.rank_of(target, model)
        low = self._trained(rows[0], blocks * rank, inner, group, fp8=False)
        high = self._trained(rows[1], columns, rank, group, fp8=False)
        # Three passes over the outputs; backwards two, and three over the inputs, which have two gradients to add.
        outputs, inputs = ((group or 1) * rows[1] * columns, (group or 1) * rows[0] * inner)
        added = self.stream(outputs, 3)[0], self.stream(2 * outputs + 3 * inputs, 1)[0]
        return low[0] + high[0] + added[0], low[1] + high[1] + added[1]

    def _trained(self, rows: int, columns: int, inner: int, group: int | None, *, fp8: bool) -> Seconds:
        backward = self.product(rows, inner, columns, group, fp8=fp8)
        backward += self.product(columns, inner, rows, group, fp8=fp8)
        return self.product(rows, columns, inner, group, fp8=fp8), backward

    def stream(self, numbers: float, passes: float, backward: float = 2.0) -> Seconds:
        """Seconds of this many passes over this many numbers."""
        forward = self.moved(numbers * self.element * passes)
        return forward, backward * forward

    def ring(self, num_bytes: float, ranks: int, stride: int = 1) -> float:
        """Seconds of an all-gather or reduce-scatter of `num_bytes` in total over `ranks`, `stride` apart."""
        if ranks == 1:
            return 0.0
        domain = self.links.domain
        inside = ranks * stride <= domain
        speed = self.link if inside else self.nic
        if not inside and stride < domain:
            # A ring over nodes uses the network adapters of all its ranks of a node.
            speed = min(self.nic * max(1, min(ranks, domain // stride)), self.link)
        latency = self.rates.link_latency_s if inside else self.rates.nic_latency_s
        return num_bytes * (ranks - 1) / ranks / speed + latency * sqrt(min(ranks - 1, 64))

    def dispatch(self) -> float:
        """Seconds in which tokens reach their experts' ranks, or come back."""
        work, domain, moe = self.work, self.links.domain, self.work.model.moe
        ranks = work.mesh.ep * work.mesh.etp
        if ranks == 1:
            return 0.0
        token = work.model.hidden_size * self.element
        sent = self.slice * moe.top_k * token
        if ranks <= domain:
            return sent * (ranks - 1) / ranks * work.load / self.link + 3 * self.rates.link_latency_s
        nodes, inside = ranks / domain, domain
        remote = (nodes - 1) / nodes
        if work.deepep:
            # So many nodes a token reaches with picks that are spread evenly over `limit` of them.
            limit = min(moe.top_groups or nodes, nodes)
            reached = limit * (1 - (1 - 1 / limit) ** moe.top_k)
            across = self.slice * token * reached * remote / self.nic
            within = sent * (inside - 1) / inside / self.link
            return max(across, within) * work.load + 3 * self.rates.nic_latency_s
        seconds = sent * remote / self.nic + sent / nodes / self.link
        return seconds * work.load + nodes * self.rates.nic_latency_s


def all_layer_times(work: Workload) -> dict[LayerKind, LayerTimes]:
    """Return the seconds of each kind of layer."""
    return {kind: layer_times(work, kind) for kind in work.model.all_kinds}


def layer_times(work: Workload, kind: LayerKind) -> LayerTimes:
    """Return the seconds of a layer, including recomputation and the device's waits for the host."""
    roof = Roofline(work)
    parts: dict[str, list[float]] = {}
    mixer = _delta_net(roof) if kind.mixer == "delta" else _attention(roof)
    indexer = _indexer(roof) if kind.mixer == "indexed" else ()
    is_moe = kind.is_moe
    for name, (forward, backward) in (*mixer, *indexer, *(_experts(roof) if is_moe else _mlp(roof))):
        part = parts.setdefault(name, [0.0, 0.0])
        part[0] += forward
        part[1] += backward
    if work.recompute == "full":
        redone = sum(part[0] for part in parts.values())
    else:
        # Not a set: the order of a sum decides its last digit.
        names = dict.fromkeys(name for module in work.recompute_modules for name in REDONE[module])
        norms = NORM_OF_NORMS * parts["norms"][0] if "layernorm" in work.recompute_modules else 0.0
        redone = sum(parts[name][0] for name in names if name in parts) + norms
    if work.overlap_ep and is_moe:
        parts["all-to-all"] = [seconds * (1 - work.rates.hidden) for seconds in parts["all-to-all"]]
    forward = sum(part[0] for part in parts.values())
    backward = sum(part[1] for part in parts.values()) + redone
    host = work.rates.host_layer_s * (1.0 if is_moe else 0.5)
    if is_moe:
        each = work.rates.host_expert_s + (work.rates.host_fp8_s if work.fp8 else 0.0)
        host += each * work.model.moe.num_experts / work.mesh.ep
    waits = max(0.0, host - forward), max(0.0, HOST_BACKWARD * host - backward)
    by_part = {name: sum(seconds) for name, seconds in parts.items()}
    by_part |= {"recomputed": redone, "host waits": sum(waits)}
    return LayerTimes(forward + waits[0], backward + waits[1], by_part)


def output_times(work: Workload) -> Seconds:
    """Return the seconds of the output layer and its loss for one microbatch."""
    roof = Roofline(work)
    rows = work.model.padded_vocab_size // work.mesh.tp if work.model.head == "logits" else 1
    forward, backward = roof.linear(roof.tokens, rows, work.model.hidden_size)
    loss = roof.moved(roof.tokens * rows * 4.0 * 4)
    if work.defers_logits and work.model.head == "logits":
        backward += forward
    return forward + loss / 2, backward + loss / 2


def _attention(roof: Roofline) -> Iterator[tuple[str, Seconds]]:
    work, rates = roof.work, roof.rates
    model, tp, fp8 = work.model, work.mesh.tp, work.fp8
    tokens, hidden, heads = roof.tokens, model.hidden_size, model.num_heads // tp
    gathered, scattered = (roof.slice, tokens), (tokens, roof.slice)
    family = family_of(model)
    yield "norms", roof.stream(hidden * roof.slice, 9)
    gather = roof.ring(tokens * hidden * roof.element, tp)
    yield "tensor parallel", (2 * gather, 3 * gather)
    if family.is_latent:
        mla = model.mla
        width = mla.qk_nope_head_dim + mla.qk_rope_head_dim
        latents = (mla.q_lora_rank or 0) + mla.kv_lora_rank + mla.qk_rope_head_dim
        yield "projections", roof.linear(roof.slice, latents, hidden, fp8=fp8)
        yield (
            "projections",
            roof.adapter("attention", (roof.slice, roof.slice), latents, hidden, blocks=2 if mla.q_lora_rank else 1),
        )
        yield "projections", roof.linear(tokens, hidden, heads * mla.v_head_dim, fp8=fp8)
        yield "projections", roof.adapter("attention", scattered, hidden, heads * mla.v_head_dim)
        query_input = mla.q_lora_rank or hidden
        yield "latent projections", roof.linear(tokens, heads * width, query_input, fp8=fp8)
        yield "latent projections", roof.adapter("attention", gathered, heads * width, query_input)
        expanded = heads * (mla.qk_nope_head_dim + mla.v_head_dim)
        yield "latent projections", roof.linear(tokens, expanded, mla.kv_lora_rank, fp8=fp8)
        yield "latent projections", roof.adapter("attention", gathered, expanded, mla.kv_lora_rank)
        yield "rotary", roof.stream(tokens * heads * (2 * width + mla.v_head_dim), 4)
        scores, rate = heads * (width + mla.v_head_dim) * 2, rates.latent
        key_value = heads * (width + mla.v_head_dim)
    else:
        kv_heads = max(1, model.num_kv_heads // tp)
        projected = heads * (2 if family.has_output_gate else 1) + 2 * kv_heads
        yield "projections", roof.linear(tokens, projected * model.head_dim, hidden, fp8=fp8)
        yield "projections", roof.adapter("attention", gathered, projected * model.head_dim, hidden, blocks=3)
        yield "projections", roof.linear(tokens, hidden, heads * model.head_dim, fp8=fp8)
        yield "projections", roof.adapter("attention", scattered, hidden, heads * model.head_dim)
        rotated = tokens * (heads + 2 * kv_heads) * model.head_dim
        yield "rotary", roof.stream(rotated, 5 if family.has_qk_norm(model) else 3)
        scores, rate = heads * model.head_dim * 4, 1.0
        key_value = 2 * kv_heads * model.head_dim
    seen = (work.sample_length or work.seq_length) / 2
    flops = tokens * seen * scores
    forward = flops / (roof.peak * rates.attention * rate)
    # Five products for the two of the forward pass: the scores are computed again.
    backward = 2.5 * flops / (roof.peak * rates.attention_backward * rate)
    if model.indexer.top_k is not None and 2 * seen > model.indexer.top_k:
        backward += forward  # blocks of queries over chosen keys are computed again
    cp = work.mesh.cp
    if cp > 1:
        # Keys and values travel while earlier ones are attended to.
        exchange = roof.ring(tokens * cp * key_value * roof.element, cp, tp)
        forward, backward = max(forward, exchange), max(backward, 2 * exchange)
    yield "attention", (forward, backward)


def _indexer(roof: Roofline) -> Iterator[tuple[str, Seconds]]:
    # Every tensor-parallel rank computes the whole indexer, which has no gradient.
    work, model, shape, cp = roof.work, roof.work.model, roof.work.model.indexer, roof.work.mesh.cp
    length = work.sample_length or work.seq_length
    if shape.top_k is None or length <= shape.top_k:
        return
    rank = model.mla.q_lora_rank or model.hidden_size
    for outputs, inputs in ((shape.heads * shape.width, rank), (shape.width + shape.heads, model.hidden_size)):
        yield "indexer", (roof.linear(roof.tokens, outputs, inputs)[0], 0.0)
    scores = roof.tokens * length / 2
    products = 2.0 * scores * shape.heads * shape.width / (roof.peak * FP32_PRODUCTS)
    yield "indexer", (products + roof.moved(scores * SORTED_BYTES), 0.0)
    if cp > 1:
        yield "indexer", (roof.ring(roof.tokens * cp * shape.width * roof.element, cp, work.mesh.tp), 0.0)


def _delta_net(roof: Roofline) -> Iterator[tuple[str, Seconds]]:
    work, delta, cp = roof.work, roof.work.model.delta, roof.work.mesh.cp
    tokens, hidden, tp = roof.tokens, work.model.hidden_size, work.mesh.tp
    yield "norms", roof.stream(hidden * roof.slice, 9)
    gather = roof.ring(tokens * hidden * roof.element, tp)
    yield "tensor parallel", (2 * gather, 3 * gather)
    projected = 2 * (delta.query_width + delta.value_width + delta.value_heads) // tp
    value, heads = delta.value_width // tp, delta.value_heads // tp
    yield "projections", roof.linear(tokens, projected, hidden, fp8=work.fp8)
    yield "projections", roof.linear(tokens, hidden, value, fp8=work.fp8)
    # Convolution, unit length and gates, computed again in the backward pass as the rule is.
    yield "convolution", roof.stream(tokens * projected, 6, backward=3.0)
    key, width = delta.key_dim, delta.value_dim
    products = 3 * key * width + 2 * CHUNK * key + CHUNK * (key + width) / 2 + CHUNK * width
    forward = 2.0 * tokens * heads * products / (roof.peak * work.rates.attention)
    yield "delta rule", (forward, 3.5 * forward)
    if cp > 1:
        # Each rank gets all positions of its share of the heads, and gives their outputs back.
        exchange = roof.ring(tokens * (projected + value) * roof.element, cp, tp)
        yield "context parallel", (exchange, exchange)


def _mlp(roof: Roofline) -> Iterator[tuple[str, Seconds]]:
    work, model = roof.work, roof.work.model
    width = model.ffn_hidden_size // work.mesh.tp
    yield from _gated(roof, "dense MLP", "mlp", width)
    yield "activation", roof.stream(roof.tokens * width, 3)


def _gated(roof: Roofline, part: str, target: Target, width: int) -> Iterator[tuple[str, Seconds]]:
    # A gated MLP of this `width` on a rank, without its activation.
    work, hidden = roof.work, roof.work.model.hidden_size
    yield part, roof.linear(roof.tokens, 2 * width, hidden, fp8=work.fp8)
    yield part, roof.linear(roof.tokens, hidden, width, fp8=work.fp8)
    yield part, roof.adapter(target, (roof.slice, roof.tokens), 2 * width, hidden, blocks=2)
    yield part, roof.adapter(target, (roof.tokens, roof.slice), hidden, width)
    gather = roof.ring(roof.tokens * hidden * roof.element, work.mesh.tp)
    yield "tensor parallel", (2 * gather, 3 * gather)


def _experts(roof: Roofline) -> Iterator[tuple[str, Seconds]]:
    work, model, moe, mesh = roof.work, roof.work.model, roof.work.model.moe, roof.work.mesh
    hidden, local, width = model.hidden_size, moe.num_experts // mesh.ep, moe.ffn_hidden_size // mesh.etp
    routed = int(roof.slice * moe.top_k * mesh.etp * work.load)
    each = max(1, routed // local)
    yield "experts", roof.linear(each, 2 * width, hidden, local, fp8=work.fp8)
    yield "experts", roof.linear(each, hidden, width, local, fp8=work.fp8)
    blocks = 2 if work.lora.expert_gate_up == "split" else 1
    yield "experts", roof.adapter("experts", (each, each), 2 * width, hidden, blocks=blocks, group=local)
    yield "experts", roof.adapter("experts", (each, each), hidden, width, group=local)
    yield "expert activation", roof.stream(routed * width, 3)
    # Into the order of ranks, of experts, and back twice.
    yield "permute", roof.stream(routed * hidden, 5 if work.deepep else 8, backward=1.0)
    yield "router", roof.stream(roof.slice * moe.num_experts * 2, 10)
    exchange = roof.dispatch()
    yield "all-to-all", (2 * exchange, 2 * exchange)
    if moe.shared_experts:
        yield from _gated(roof, "shared experts", "shared_experts", moe.shared_width // mesh.tp)
