"""An estimate, in closed form, of the device memory that training takes on a rank.

The estimate contains the weights of every model on the ranks, gradients, the rank's share of the optimizer state, the
activations that forward passes keep for the backward pass (plan/activations.py), the recomputation of one layer, and
the logits; for RL also the keys and values of rollouts, during which no activations are kept. Experts are evenly
loaded, or the rank's experts have a given multiple of the mean. CUDA's context, NCCL's buffers and fragmentation are
not in it: a cluster reserves room for them.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from mcore_rl.config.lora import LoraConfig
from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.model import LayerKind, ModelConfig
from mcore_rl.config.optim import OptimConfig
from mcore_rl.config.rl.distill import SELF
from mcore_rl.config.rl.engine import InProcessConfig
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.config.run import PlatformConfig, RunConfig, TrainConfig
from mcore_rl.config.section import Store
from mcore_rl.families import family_of
from mcore_rl.plan.activations import LayerActivations, layers_of
from mcore_rl.plan.adapters import with_adapters
from mcore_rl.plan.routes import RouteBytes, routes_of_rank
from mcore_rl.plan.schedule import chunks_in_flight, most_kept
from mcore_rl.plan.weights import (
    Weights,
    delta_state_bytes,
    layer_kinds_by_stage,
    layers_by_chunk,
    layers_by_stage,
    weights_by_stage,
)

GIB = 2**30
NO_ADAPTERS = LoraConfig()
MAIN_COPY_BYTES = {"bf16": 4, "fp32": 0}
"""Bytes of the fp32 copy of a weight that an optimizer updates, by precision."""
OFFLOADED_BYTES = 16
"""Bytes of main memory for an offloaded weight: fp32 weight, two moments, and the gradient."""
FP8_COPIES_BYTES = 2
"""Bytes of the 8-bit copies of a weight and of its transpose that TransformerEngine keeps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Bytes on one rank of a pipeline stage."""

    stage: int
    """Index of the pipeline stage; all other fields but `updated` are bytes."""
    updated: str
    """Name of the model with the largest update, to which `weights`, `gradients` and `optimizer` refer."""
    weights: int
    gradients: int
    optimizer: int
    activations: int
    """Activations that wait for their backward pass, over all microbatches in flight."""
    recomputed: int
    """Activations of the layers that repeat their forward pass for the backward pass."""
    logits: int
    """Logits, their fp32 copy for the loss, and their gradient; for deferred logits, of a chunk."""
    rollout_cache: int = 0
    """Keys and values of completions in progress, which exist at other times than activations."""
    routes: int = 0
    """Routes and router scores of a rollout batch that wait on the device."""
    host: int = 0
    """Main memory that the rank takes for waiting tensors, such as the weights of the reference policy."""
    host_routes: int = 0
    """Page-locked main memory of routes and router scores."""
    host_optimizer: int = 0
    """Main memory of the rank's offloaded optimizer state, and of the gradients that the processor reads."""
    rollout_models: int = 0
    """Weights, gradients and optimizer states on the device in a rollout."""
    scoring_models: int = 0
    """The same in the passes without gradient, with the largest of the models that come to the device for them."""
    saving_models: int = 0
    """The same while a checkpoint is written or read."""

    @property
    def main_memory(self) -> int:
        """Bytes of main memory of the rank."""
        return self.host + self.host_routes + self.host_optimizer

    @property
    def permanent(self) -> int:
        """Bytes of weights, gradients and optimizer states in the update with the most of them; without a `store` in
        which some wait, they are in use all the time.
        """
        return self.weights + self.gradients + self.optimizer

    @property
    def phases(self) -> dict[str, int]:
        """Bytes in use in each phase; without reinforcement learning there are no rollouts and scoring passes."""
        in_use = {
            "rollout": self.rollout_models + self.rollout_cache,
            "scoring": self.scoring_models,
            "update": self.permanent + self.activations + self.recomputed + self.logits,
            "checkpoint": self.saving_models,
        }
        return {phase: self.routes + size for phase, size in in_use.items()}

    @property
    def total(self) -> int:
        """Largest number of bytes in use at one time: in an update, a rollout, a scoring pass, or a save."""
        return max(self.phases.values())

    def describe(self) -> str:
        """Return the total and its parts in GiB, for messages."""
        parts = {
            "weights": self.weights,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
            "activations": self.activations + self.recomputed,
            "logits": self.logits,
        }
        text = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items())
        if self.routes:
            text += f", beside them routes {self.routes / GIB:.1f}"
        if self.rollout_cache:
            text += f", or instead of activations and logits a rollout's cache {self.rollout_cache / GIB:.1f}"
        return f"{self.total / GIB:.1f} GiB on a rank of pipeline stage {self.stage} ({text})"


def main_memory_of_fullest_node(stages: Sequence[Memory], world_size: int, ranks_per_node: int) -> int:
    """Return the bytes of main memory of the node with the ranks that need most; ranks of a stage are neighbours."""
    ranks_per_stage = world_size // len(stages)
    needed = [stages[rank // ranks_per_stage].main_memory for rank in range(world_size)]
    return max(sum(needed[first : first + ranks_per_node]) for first in range(0, world_size, ranks_per_node))


def memory_of_fullest_rank(config: RunConfig, world_size: int, seq_length: int) -> Memory:
    """Return the memory of a rank of the stage that needs most; config and world size must have passed the checks."""
    return max(memory_by_stage(config, world_size, seq_length), key=lambda memory: memory.total)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelOnRanks:
    """A model that a run has on its ranks, cut over them as `config.mesh` says."""

    name: str
    """Name in messages, such as policy."""
    model: ModelConfig
    optim: OptimConfig | None
    """Its optimizer; None if it is not trained, and has neither gradients nor optimizer state."""
    store: Store = "device"
    """Memory in which its weights wait, and in training its optimizer state."""
    weights_stay: bool = False
    """Whether the weights are on the device regardless of the store."""
    is_swapped: bool = False
    """Whether its weights replace the policy's during a pass, tensor by tensor, and take no room of their own."""
    lora: LoraConfig = NO_ADAPTERS
    """Its low-rank adapters: only these are trained, and if the model is swapped, only these are kept."""

    @property
    def trains(self) -> bool:
        """Whether it has gradients and optimizer state."""
        return self.optim is not None

    @property
    def offload_fraction(self) -> float:
        """Fraction of its optimizer state that is in main memory."""
        return self.optim.offload_fraction if self.optim is not None else 0.0

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradient of a weight."""
        return self.optim.gradient_bytes if self.optim is not None else 0

    @property
    def on_host(self) -> bool:
        """Whether any of it waits in main memory."""
        return self.store == "host"

    @property
    def has_weights(self) -> bool:
        """Whether its weights are on the device all the time."""
        return self.weights_stay or self.store == "device"


def models_on_ranks(config: RunConfig) -> list[ModelOnRanks]:
    """Return every model that a run has on its ranks, the model with the largest activations first."""
    if not isinstance(config, RlRunConfig):
        return [ModelOnRanks(name="model", model=config.model, optim=config.optim, lora=config.lora)]
    rl = config.rl
    models = [
        ModelOnRanks(
            name="policy",
            model=config.model,
            optim=config.optim,
            store=rl.update.store,
            weights_stay=True,
            lora=config.lora,
        )
    ]
    if rl.loss.kl_coeff:
        store = rl.loss.reference_store
        models.append(
            ModelOnRanks(
                name="reference",
                model=config.model,
                optim=None,
                store=store,
                is_swapped=True,
                lora=config.lora,
            )
        )
    if config.critic_optim is not None:
        models.append(
            ModelOnRanks(
                name="critic",
                model=config.model.scored,
                optim=config.critic_optim,
                store=config.critic_store,
            )
        )
    # Assumed to be of the policy's size: their own size is only known when their checkpoints are read.
    models += [
        ModelOnRanks(name=part, model=config.model.scored, optim=None, store=rl.reward.model_store)
        for part in rl.reward.model_parts
    ]
    models += [
        ModelOnRanks(
            name=f"teacher {path}",
            model=config.model,
            optim=None,
            store=rl.distill.store,
            is_swapped=path == SELF,
            lora=config.lora if path == SELF else NO_ADAPTERS,
        )
        for path in rl.distill.paths
    ]
    return models


@dataclass(frozen=True, slots=True)
class Layout:
    """The parts of an estimate that only the mesh decides, for each pipeline stage."""

    kinds: list[dict[LayerKind, int]]
    """Number of layers of each kind."""
    chunks: list[list[range]]
    """Indices of the layers of each chunk."""
    weights: list[list[Weights]]
    """Weights of each model on the ranks."""


def layout_of(config: RunConfig) -> Layout:
    """Return the layout of a run's models over its mesh."""
    models, mesh = models_on_ranks(config), config.mesh
    # Models with the same head have the same weights.
    by_head = {on_ranks.model.head: weights_by_stage(on_ranks.model, mesh) for on_ranks in models}
    weights = [
        with_adapters(by_head[on_ranks.model.head], on_ranks.lora, on_ranks.model, mesh)
        for on_ranks in models
    ]
    return Layout(
        kinds=layer_kinds_by_stage(config.model, config.mesh),
        chunks=layers_by_chunk(config.model, config.mesh),
        weights=[
            [stage.adapters for stage in stages] if on_ranks.is_swapped and on_ranks.lora.is_on else stages
            for on_ranks, stages in zip(models, weights, strict=True)
        ],
    )


def memory_by_stage(
    config: RunConfig, world_size: int, seq_length: int, imbalance: float = 1.0
) -> list[Memory]:
    """Return the memory of one rank of each pipeline stage, for sequences of `seq_length` tokens.

    Args:
        config: The config, checked for this world.
        world_size: Number of ranks.
        seq_length: Positions of a sequence, packed or not.
        imbalance: Tokens sent to the rank's experts, as a multiple of the mean over ranks.
    """
    stages = StageMemory(config, world_size, seq_length, layout_of(config), imbalance)
    return [stages.of(stage) for stage in range(config.mesh.pp)]


class StageMemory:
    """The memory of a rank of any pipeline stage; a search asks only for as many stages as decide."""

    def __init__(
        self, config: RunConfig, world_size: int, seq_length: int, layout: Layout, imbalance: float = 1.0
    ) -> None:
        self.config, self.world_size, self.layout = config, world_size, layout
        self.models = models_on_ranks(config)
        self.layer = LayerActivations(
            config.model,
            config.mesh,
            config.platform,
            config.train.micro_batch * seq_length // config.mesh.cp,
            layers_of(config.platform, allows_te=config.allows_te),
            imbalance,
        )
        self.sizes = {kind: LayerBytes.of(self.layer, kind) for kind in config.model.all_kinds}

    def of(self, stage: int) -> Memory:
        """Return the memory of a rank of `stage`."""
        weights = [by_stage[stage] for by_stage in self.layout.weights]
        models = list(zip(self.models, weights, strict=True))
        return _memory(self.config, self.world_size, stage, self.layout, models, self.layer, self.sizes)

    def on_node(self, ranks_per_node: int) -> int:
        """Return the bytes of main memory of the node with the ranks that need most."""
        stages = [self.of(stage) for stage in range(self.config.mesh.pp)]
        return main_memory_of_fullest_node(stages, self.world_size, ranks_per_node)

    def fullest(self, limit_bytes: float) -> Memory:
        """Return the memory of the stage that needs most, or of the first found to need more than the limit."""
        last = self.config.mesh.pp - 1
        fullest = self.of(0)
        for stage in (last, *range(1, last)) if last else ():
            if fullest.total > limit_bytes:
                return fullest
            fullest = max(fullest, self.of(stage), key=lambda memory: memory.total)
        return fullest


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """Bytes of the activations of a kind of layer: kept until its backward pass, and in total while it is
    recomputed.
    """

    kept: int
    whole: int

    @classmethod
    def of(cls, layer: LayerActivations, kind: LayerKind) -> "LayerBytes":
        """Return the bytes of one layer."""
        return cls(kept=layer.kept(kind), whole=sum(layer.all_parts(kind).values()))


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateBytes:
    """Bytes on the device in the update of a trained model."""

    name: str
    """Name of the model."""
    weights: int
    gradients: int
    optimizer: int
    logits: int


def _memory(
    config: RunConfig,
    world_size: int,
    stage: int,
    layout: Layout,
    models: Sequence[tuple[ModelOnRanks, Weights]],
    layer: LayerActivations,
    sizes: dict[LayerKind, LayerBytes],
) -> Memory:
    mesh, precision = config.mesh, config.platform.precision
    element = layer.element
    kept, recomputed = _activations(
        config.mesh, config.model, config.platform, config.train, stage, layout, layer, sizes, world_size
    )
    copies = world_size // (mesh.tp * mesh.pp)
    expert_copies = max(1, world_size // (mesh.etp * mesh.ep * mesh.pp))
    fp8 = FP8_COPIES_BYTES if config.platform.fp8 != "none" else 0
    has_logits = stage == mesh.pp - 1 and config.model.head == "logits"
    logits = _logits(config.mesh, config.model, config.platform, layer) if has_logits else 0

    def weights_bytes(weights: Weights) -> int:
        return weights.bytes(element) + weights.total * fp8

    def trained_numbers(on_ranks: ModelOnRanks, weights: Weights) -> tuple[int, int]:
        """Return the numbers of trained parameters: dense parameters, and parameters of experts."""
        if on_ranks.lora.is_on:
            # A scalar head is trained in addition to the adapters.
            head = (
                on_ranks.model.hidden_size if on_ranks.model.head == "score" and stage == mesh.pp - 1 else 0
            )
            return weights.dense_adapters + head, weights.expert_adapters
        return weights.dense - (weights.router if config.freezes_router else 0), weights.expert

    def gradient_bytes(on_ranks: ModelOnRanks, weights: Weights) -> int:
        return sum(trained_numbers(on_ranks, weights)) * on_ranks.gradient_bytes

    def state_bytes(on_ranks: ModelOnRanks, weights: Weights) -> int:
        state = MAIN_COPY_BYTES[precision] + (
            on_ranks.optim.moment_bytes if on_ranks.optim is not None else 0
        )
        dense, expert = trained_numbers(on_ranks, weights)
        return int(
            (1 - on_ranks.offload_fraction) * (dense * state // copies + expert * state // expert_copies)
        )

    def offloaded_bytes(on_ranks: ModelOnRanks, weights: Weights) -> int:
        dense, expert = trained_numbers(on_ranks, weights)
        return int(on_ranks.offload_fraction * OFFLOADED_BYTES * (dense // copies + expert // expert_copies))

    # Weights that are always on the device, and weights that come to it for a phase.
    always = sum(weights_bytes(weights) for on_ranks, weights in models if on_ranks.has_weights)
    visitors = [
        weights_bytes(weights)
        for on_ranks, weights in models
        if not on_ranks.has_weights and not on_ranks.is_swapped
    ]
    trained = [(on_ranks, weights) for on_ranks, weights in models if on_ranks.trains]
    updates = []
    for updated, weights in trained:
        resident = [each for each in trained if each[0] is updated or each[0].store == "device"]
        updates.append(
            UpdateBytes(
                name=updated.name,
                weights=always + (0 if updated.has_weights else weights_bytes(weights)),
                gradients=sum(gradient_bytes(*each) for each in resident),
                optimizer=sum(state_bytes(*each) for each in resident),
                logits=logits if updated.model.head == "logits" else 0,
            )
        )
    fullest = max(
        updates, key=lambda update: update.weights + update.gradients + update.optimizer + update.logits
    )
    lasting = always + sum(
        gradient_bytes(on_ranks, weights) + state_bytes(on_ranks, weights)
        for on_ranks, weights in trained
        if on_ranks.store == "device"
    )
    waiting = sum(
        (0 if on_ranks.weights_stay else weights.bytes(element))
        + (state_bytes(on_ranks, weights) if on_ranks.trains else 0)
        for on_ranks, weights in models
        if on_ranks.on_host
    )
    is_rl = isinstance(config, RlRunConfig)
    routes = RouteBytes()
    if isinstance(config, RlRunConfig):
        routes = routes_of_rank(config, world_size, stage)
    return Memory(
        stage=stage,
        updated=fullest.name,
        weights=fullest.weights,
        gradients=fullest.gradients,
        optimizer=fullest.optimizer,
        host_optimizer=sum(offloaded_bytes(on_ranks, weights) for on_ranks, weights in trained),
        activations=kept,
        recomputed=recomputed,
        logits=fullest.logits,
        rollout_cache=_rollout_cache(config, stage, world_size) if isinstance(config, RlRunConfig) else 0,
        routes=routes.device,
        host_routes=routes.host,
        host=waiting,
        rollout_models=lasting if is_rl else 0,
        scoring_models=lasting + max(visitors, default=0) if is_rl else 0,
        saving_models=always
        + sum(
            state_bytes(on_ranks, weights)
            + (0 if on_ranks.has_weights else weights_bytes(weights))
            + (gradient_bytes(on_ranks, weights) if on_ranks.store == "device" else 0)
            for on_ranks, weights in trained
        ),
    )


def _logits(mesh: MeshConfig, model: ModelConfig, platform: PlatformConfig, layer: LayerActivations) -> int:
    """Return the bytes of a microbatch's logits and their loss, on the last stage."""
    columns = model.padded_vocab_size // mesh.tp
    chunk = platform.logits_chunk(layer.tokens, columns)
    if chunk is None:
        # The output layer's result, its fp32 copy for the loss, and the gradient in fp32.
        heads = 1 + model.mtp_layers
        return heads * (layer.tokens * columns * (layer.element + 4 + 4))
    # A product, its fp32 copy, two fp32 results; the weight's gradient, summed in fp32, with the part of a chunk.
    return chunk * columns * (layer.element + 3 * 4) + columns * model.hidden_size * (layer.element + 4)


def _rollout_cache(config: RlRunConfig, stage: int, world_size: int) -> int:
    """Return the bytes of the native engine's cache, with room for the longest sample in every slot; 0 with servers,
    which have other GPUs.
    """
    engine = config.rl.engine
    if not isinstance(engine, InProcessConfig):
        return 0
    model, mesh = config.model, config.mesh
    element = 2 if config.platform.precision == "bf16" else 4
    replicas = world_size // mesh.model_parallel
    # An additional slot takes the keys and values of padding, which no token reads.
    slots = min(engine.native_slots, -(-config.rollout_size // replicas)) + 1
    if family_of(model).is_latent:
        mla = model.mla
        widths = model.num_heads // mesh.tp * (mla.qk_nope_head_dim + mla.qk_rope_head_dim + mla.v_head_dim)
    else:
        widths = 2 * max(1, model.num_kv_heads // mesh.tp) * model.head_dim
    mixers = Counter(model.mixers[layer] for layer in layers_by_stage(model, mesh)[stage])
    numbers = (mixers.total() - mixers["delta"]) * widths + mixers["indexed"] * model.indexer.width
    states = mixers["delta"] * delta_state_bytes(model, mesh.tp, element)
    return slots * (config.longest_sample * numbers * element + states)


def _activations(
    mesh: MeshConfig,
    model: ModelConfig,
    platform: PlatformConfig,
    train: TrainConfig,
    stage: int,
    layout: Layout,
    layer: LayerActivations,
    sizes: dict[LayerKind, LayerBytes],
    world_size: int,
) -> tuple[int, int]:
    """Return the bytes kept over all microbatches in flight, and the bytes that are recomputed at one time."""
    num_microbatches = train.global_batch * mesh.model_parallel // (train.micro_batch * world_size)
    kinds, has_mtp = Counter(layout.kinds[stage]), stage == mesh.pp - 1 and model.mtp_layers > 0
    if has_mtp:
        kinds[model.mtp_kind] += model.mtp_layers
    group = platform.recompute_layers if platform.recompute == "full" else 0

    # Recomputed layers without an indexer need the choice that they share: it is kept.
    shared = sum(_shared_choices(model, layers) for layers in layout.chunks[stage]) * layer.choice
    choices = shared * chunks_in_flight(mesh, stage, num_microbatches) // mesh.vpp if group else 0

    def kept(kinds: Mapping[LayerKind, int]) -> int:
        if group:
            return -(-sum(kinds.values()) // group) * layer.residual
        return sum(sizes[kind].kept * count for kind, count in kinds.items())

    if group:
        recomputed = group * max((sizes[kind].whole for kind in kinds), default=0)
    else:
        recomputed = max((sizes[kind].whole - sizes[kind].kept for kind in kinds), default=0)
    if mesh.pp_layout is None:
        in_flight = kept(kinds) * chunks_in_flight(mesh, stage, num_microbatches) // mesh.vpp
        return in_flight + choices, recomputed
    chunks = [Counter(model.layer_kinds[layer] for layer in layers) for layers in layout.chunks[stage]]
    if has_mtp:
        chunks[-1][model.mtp_kind] += model.mtp_layers
    sizes_of_chunks = [kept(chunk) for chunk in chunks]
    if len(set(sizes_of_chunks)) == 1:
        return chunks_in_flight(mesh, stage, num_microbatches) * sizes_of_chunks[0] + choices, recomputed
    return most_kept(mesh, stage, num_microbatches, sizes_of_chunks) + choices, recomputed


def _shared_choices(model: ModelConfig, layers: Sequence[int]) -> int:
    """Return the number of choices of keys that layers of a chunk share."""
    mixers = [model.mixers[layer] for layer in layers]
    return sum(pair == ("indexed", "shared") for pair in pairwise(mixers))
