"""Memory of each rank and of its node, and the disk that a run takes, in closed form.

Device memory counts weights of all models, gradients, optimizer state, kept activations (planning/activations.py), the
recomputation of one layer, logits, and in RL keys and values of rollouts; not CUDA's context, NCCL's buffers and
fragmentation. The disk counts checkpoints and the samples of RL.
"""

import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.model import LayerKind, ModelConfig
from mcore_rl.config.optim import OptimConfig
from mcore_rl.config.rl.rollout import InProcessConfig, ServedConfig, VllmConfig
from mcore_rl.families import family_of
from mcore_rl.planning import weights as counts
from mcore_rl.planning.activations import LayerActivations
from mcore_rl.planning.step import chunks_in_flight, most_kept
from mcore_rl.planning.training import ModelOnRanks, Rollouts, Training

GIB = 2**30
MAIN_COPY_BYTES = {"bf16": 4, "fp32": 0}
"""Bytes of the fp32 copy of a weight that an optimizer updates, by precision."""
OFFLOADED_BYTES = 16
"""Bytes of main memory for an offloaded weight: fp32 weight, two moments, and the gradient."""
FP8_COPIES_BYTES = 2
"""Bytes of the 8-bit copies of a weight and of its transpose that TransformerEngine keeps."""
SERVER_REST_BYTES = 4 * GIB
"""Bytes of a GPU that a server keeps while it sleeps: its context, NCCL's buffers and CUDA graphs."""
SERVER_WORK_BYTES = 2 * GIB
"""Bytes of a server's activations and logits."""
STAGED_BUCKETS = 2
"""Largest buckets of weights that a server has in a push: as they came, and as it packs them."""


def largest_layer(model: ModelConfig, kinds: Iterable[LayerKind], ep: int = 1) -> int:
    """Return the number of weights of the largest layer of a push, with all experts or one of `ep` shares of them."""
    return max((counts.layer_weights(model, MeshConfig(ep=ep), kind).total for kind in {*kinds}), default=0)


def muon_state_bytes(optim: OptimConfig, weights: counts.Weights, frozen: int, copy: int) -> int:
    """Return the bytes of Muon's whole state: of each weight a `copy` and a moment, and of Adam's another moment.
    `frozen` routers' weights have none.
    """
    by_adam = weights.vectors + (0 if optim.muon.router else weights.router - frozen)
    return (weights.dense + weights.expert - frozen) * (copy + counts.FP32_BYTES) + by_adam * counts.FP32_BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedServer:
    """Bytes of an inference server on each of the trainer's GPUs that it shares (rl.engine.share_gpus)."""

    gpus: int
    weights: int
    bucket: int
    """The largest bucket of a push."""
    token: int
    """Keys and values of a token."""
    sample: int
    """Keys and values of the longest sample."""
    keeps_weights: bool
    """Whether the weights wait in main memory while the server sleeps, because a push does not send them."""

    @property
    def push(self) -> int:
        """Bytes in a push beside the trainer's, before keys and values are back."""
        return SERVER_REST_BYTES + self.weights + STAGED_BUCKETS * self.bucket

    @property
    def generate(self) -> int:
        """Bytes in a rollout, without keys and values."""
        return SERVER_REST_BYTES + self.weights + SERVER_WORK_BYTES


def shared_server(training: Training) -> SharedServer | None:
    """Return the memory of each server on the GPUs of the ranks; None if there are none."""
    engine = None if training.rollouts is None else training.rollouts.engine
    if not isinstance(engine, ServedConfig) or not engine.share_gpus:
        return None
    model, parts = training.model, engine.tensor_parallel
    element = 4 if "fp32" in (engine.dtype, training.platform.precision * (engine.dtype == "auto")) else 2
    (whole,) = counts.weights_by_stage(model, MeshConfig())
    token = 2 * model.num_layers * max(1, model.num_kv_heads // parts) * model.head_dim * element
    vocabulary = model.vocab_size * model.hidden_size * (1 if model.tied_embeddings else 2)
    in_fp8 = whole.dense + whole.expert - whole.router - vocabulary if engine.in_fp8 else 0
    return SharedServer(
        gpus=parts,
        weights=(whole.bytes(element) - in_fp8 * (element - 1)) // parts,
        bucket=max(largest_layer(model, model.layer_kinds), model.vocab_size * model.hidden_size) * element,
        token=token,
        sample=training.sample_length * token,
        keeps_weights=engine.lora == "adapter",
    )


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
    pushed: int = 0
    """Tensors that the rank gathers for servers and writes at one time, beside two messages of hf_stream.py."""
    routes: int = 0
    """Routes and router scores of a rollout batch that wait on the device."""
    host: int = 0
    """Main memory that the rank takes for waiting tensors, such as the weights of the reference policy."""
    host_routes: int = 0
    """Page-locked main memory of routes and router scores."""
    host_sent: int = 0
    """Main memory of the weights last sent to servers (rl.engine.delta), of the rank and of a worker beside it."""
    host_optimizer: int = 0
    """Main memory of the rank's offloaded optimizer state, and of the gradients that the processor reads."""
    rollout_models: int = 0
    """Weights, gradients and optimizer states on the device in a rollout."""
    scoring_models: int = 0
    """The same in the passes without gradient, with the largest of the models that come to the device for them."""
    saving_models: int = 0
    """The same while a checkpoint is written or read."""
    server: SharedServer | None = None
    """The inference server that has a part of its memory on the same GPU; None if there is none."""

    @property
    def main_memory(self) -> int:
        """Bytes of main memory of the rank."""
        return self.host + self.host_routes + self.host_sent + self.host_optimizer

    @property
    def permanent(self) -> int:
        """Bytes of weights, gradients and optimizer states in the update with the most of them."""
        return self.weights + self.gradients + self.optimizer

    @property
    def phases(self) -> dict[str, int]:
        """Bytes in use in each phase; without reinforcement learning there are no rollouts and scoring passes. Servers
        on the same GPU sleep but in a push of weights to them, and while they generate at least one sample at a time.
        """
        in_use = {
            "rollout": self.rollout_models + self.rollout_cache,
            "scoring": self.scoring_models,
            "update": self.permanent + self.activations + self.recomputed + self.logits,
            "checkpoint": self.saving_models,
        }
        if self.server is not None:
            in_use = {phase: size + SERVER_REST_BYTES for phase, size in in_use.items() if phase != "rollout"}
            in_use["push"] = self.rollout_models + self.pushed + self.server.push
            in_use["generate"] = self.rollout_models + self.server.generate + self.server.sample
        elif self.pushed:
            in_use["push"] = self.rollout_models + self.pushed
        return {phase: self.routes + size for phase, size in in_use.items()}

    @property
    def total(self) -> int:
        """Largest number of bytes in use at one time, of all phases."""
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


def memory_of_fullest_rank(training: Training) -> Memory:
    """Return the memory of a rank of the stage that needs most."""
    return max(memory_by_stage(training), key=lambda memory: memory.total)


def memory_by_stage(training: Training, imbalance: float = 1.0) -> list[Memory]:
    """Return a rank's memory on each pipeline stage; `imbalance` is its experts' load as a multiple of the mean."""
    stages = StageMemory(training, layout_of(training.models, training.mesh), imbalance)
    return [stages.of(stage) for stage in range(training.mesh.pp)]


@dataclass(frozen=True, slots=True)
class Layout:
    """The parts of an estimate that only the mesh decides, for each pipeline stage."""

    kinds: list[dict[LayerKind, int]]
    """Number of layers of each kind."""
    chunks: list[list[range]]
    """Indices of the layers of each chunk."""
    weights: list[list[counts.Weights]]
    """Weights of each model on the ranks."""


def layout_of(models: Sequence[ModelOnRanks], mesh: MeshConfig) -> Layout:
    """Return the layout of a run's models over its mesh."""
    # Models with the same head have the same weights.
    by_head = {on_ranks.model.head: counts.weights_by_stage(on_ranks.model, mesh) for on_ranks in models}
    weights = [
        counts.with_adapters(by_head[on_ranks.model.head], on_ranks.lora, on_ranks.model, mesh) for on_ranks in models
    ]
    return Layout(
        kinds=counts.layer_kinds_by_stage(models[0].model, mesh),
        chunks=counts.layers_by_chunk(models[0].model, mesh),
        weights=[
            [stage.adapters for stage in stages] if on_ranks.is_swapped and on_ranks.lora.is_on else stages
            for on_ranks, stages in zip(models, weights, strict=True)
        ],
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelBytes:
    """Bytes that a model has on a rank, wherever they wait."""

    on_ranks: ModelOnRanks
    weights: int
    """Weights on the device, with their 8-bit copies."""
    stored_weights: int
    """Weights that wait in another memory, without copies."""
    gradients: int
    optimizer: int
    """Optimizer state that is not offloaded."""
    offloaded: int
    """Main memory of the optimizer state that is, and of its gradients."""
    logits: int
    """Logits of its update."""

    @property
    def visiting(self) -> int:
        """Weights that come to the device for a phase."""
        return 0 if self.on_ranks.has_weights else self.weights

    @property
    def resident(self) -> int:
        """Gradients and optimizer state that are on the device all the time."""
        return self.gradients + self.optimizer if self.on_ranks.store == "device" else 0


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """Bytes of the activations of a kind of layer: kept until its backward pass, and in total while recomputed."""

    kept: int
    whole: int


class StageMemory:
    """The memory of a rank of any pipeline stage; a search asks only for as many stages as decide."""

    def __init__(self, training: Training, layout: Layout, imbalance: float = 1.0) -> None:
        self.training, self.layout = training, layout
        self.layer = LayerActivations(
            training.model,
            training.mesh,
            training.platform,
            training.micro_batch * training.seq_length // training.mesh.cp,
            training.layers,
            imbalance,
        )
        self.sizes = {
            kind: LayerBytes(self.layer.kept(kind), sum(self.layer.all_parts(kind).values()))
            for kind in training.model.all_kinds
        }

    def on_node(self, ranks_per_node: int) -> int:
        """Return the bytes of main memory of the node with the ranks that need most."""
        stages = [self.of(stage) for stage in range(self.training.mesh.pp)]
        return main_memory_of_fullest_node(stages, self.training.world_size, ranks_per_node)

    def fullest(self, limit_bytes: float) -> Memory:
        """Return the memory of the stage that needs most, or of the first found to need more than the limit."""
        last = self.training.mesh.pp - 1
        fullest = self.of(0)
        for stage in (last, *range(1, last)) if last else ():
            if fullest.total > limit_bytes:
                return fullest
            fullest = max(fullest, self.of(stage), key=lambda memory: memory.total)
        return fullest

    def of(self, stage: int) -> Memory:
        """Return the memory of a rank of `stage`."""
        training = self.training
        models = [
            self._model_bytes(on_ranks, weights[stage], stage)
            for on_ranks, weights in zip(training.models, self.layout.weights, strict=True)
        ]
        # Weights that are always on the device, and weights that come to it for a phase.
        always = sum(model.weights for model in models if model.on_ranks.has_weights)
        visitors = [model.visiting for model in models if not model.on_ranks.is_swapped]
        trained = [model for model in models if model.on_ranks.trains]

        def update(updated: ModelBytes) -> tuple[int, int, int, int]:
            """Return the weights, gradients, optimizer states and logits on the device in the update of a model."""
            present = [model for model in trained if model is updated or model.on_ranks.store == "device"]
            gradients = sum(model.gradients for model in present)
            optimizer = sum(model.optimizer for model in present)
            return always + updated.visiting, gradients, optimizer, updated.logits

        updated = max(trained, key=lambda model: sum(update(model)))
        weights, gradients, optimizer, logits = update(updated)
        activations, recomputed = self._activations(stage)
        lasting = always + sum(model.resident for model in trained)
        routes = routes_of_rank(training, stage)
        rollouts, server = training.rollouts, shared_server(training)
        return Memory(
            server=server,
            stage=stage,
            updated=updated.on_ranks.name,
            weights=weights,
            gradients=gradients,
            optimizer=optimizer,
            host_optimizer=sum(model.offloaded for model in trained),
            activations=activations,
            recomputed=recomputed,
            logits=logits,
            rollout_cache=0 if rollouts is None else self._rollout_cache(rollouts, stage),
            pushed=0 if rollouts is None else self._pushed(rollouts, stage),
            routes=routes.device,
            host_routes=routes.host,
            host=sum(
                (0 if model.on_ranks.weights_stay else model.stored_weights) + model.optimizer
                for model in models
                if model.on_ranks.on_host
            )
            + (server.weights if server is not None and server.keeps_weights else 0),
            host_sent=0 if rollouts is None else self._sent(rollouts, server),
            rollout_models=0 if rollouts is None else lasting,
            scoring_models=0 if rollouts is None else lasting + max(visitors),
            saving_models=always
            + sum(
                model.optimizer + model.visiting + (model.gradients if model.on_ranks.store == "device" else 0)
                for model in trained
            ),
        )

    def _model_bytes(self, on_ranks: ModelOnRanks, weights: counts.Weights, stage: int) -> ModelBytes:
        training, mesh, optim = self.training, self.training.mesh, on_ranks.optim
        fp8 = FP8_COPIES_BYTES if training.platform.fp8 != "none" else 0
        stored = weights.bytes(self.layer.element)
        is_last = stage == mesh.pp - 1
        gradients = state = offloaded = logits = 0
        if optim is not None:
            dense, expert = weights.dense - (weights.router if training.freezes_router else 0), weights.expert
            if on_ranks.lora.is_on:
                # A scalar head is trained in addition to the adapters.
                head = on_ranks.model.hidden_size if on_ranks.model.head == "score" and is_last else 0
                dense, expert = weights.dense_adapters + head, weights.expert_adapters
            gradients = (dense + expert) * optim.gradient_bytes
            copies = training.world_size // (mesh.tp * mesh.pp)
            expert_copies = max(1, training.world_size // (mesh.etp * mesh.ep * mesh.pp))
            each = MAIN_COPY_BYTES[training.platform.precision] + optim.moment_bytes
            state = dense * each // copies + expert * each // expert_copies
            state = int((1 - optim.offload_fraction) * state)
            if not optim.is_sharded:
                frozen = weights.router if training.freezes_router else 0
                state = muon_state_bytes(optim, weights, frozen, MAIN_COPY_BYTES[training.platform.precision])
            share = dense // copies + expert // expert_copies
            offloaded = int(optim.offload_fraction * OFFLOADED_BYTES * share)
            logits = self._logits(on_ranks.model) if is_last and on_ranks.model.head == "logits" else 0
        return ModelBytes(
            on_ranks=on_ranks,
            weights=stored + weights.total * fp8,
            stored_weights=stored,
            gradients=gradients,
            optimizer=state,
            offloaded=offloaded,
            logits=logits,
        )

    def _logits(self, model: ModelConfig) -> int:
        # The last stage has the logits and their loss.
        layer, columns = self.layer, model.padded_vocab_size // self.training.mesh.tp
        chunk = self.training.platform.logits_chunk(layer.tokens, columns)
        if chunk is None:
            # The output layer's result, its fp32 copy for the loss, and the gradient in fp32.
            heads = 1 + model.mtp_layers
            return heads * (layer.tokens * columns * (layer.element + 4 + 4))
        # A product, its fp32 copy, two fp32 results; the weight's gradient, summed in fp32, with the part of a chunk.
        return chunk * columns * (layer.element + 3 * 4) + columns * model.hidden_size * (layer.element + 4)

    def _rollout_cache(self, rollouts: Rollouts, stage: int) -> int:
        # Every slot has room for the longest sample; servers have other GPUs.
        engine = rollouts.engine
        if not isinstance(engine, InProcessConfig):
            return 0
        training, model, mesh = self.training, self.training.model, self.training.mesh
        # An additional slot takes the keys and values of padding, which no token reads.
        slots = min(engine.native_slots, -(-rollouts.num_completions // training.replicas)) + 1
        if family_of(model).is_latent:
            mla = model.mla
            widths = model.num_heads // mesh.tp * (mla.qk_nope_head_dim + mla.qk_rope_head_dim + mla.v_head_dim)
        else:
            widths = 2 * max(1, model.num_kv_heads // mesh.tp) * model.head_dim
        mixers: Counter[str] = Counter()
        for kind, count in self.layout.kinds[stage].items():
            mixers[kind.mixer] += count
        numbers = (mixers.total() - mixers["delta"]) * widths + mixers["indexed"] * model.indexer.width
        states = mixers["delta"] * counts.delta_state_bytes(model, mesh.tp, self.layer.element)
        return slots * (training.sample_length * numbers * self.layer.element + states)

    def _pushed(self, rollouts: Rollouts, stage: int) -> int:
        # Every rank gathers layers with its own experts; rank 0 whole layers, for a broadcast, slots, and files that
        # other machines may not see. A bucket is gathered while the one before it is written; a slot is on every rank.
        model, mesh, engine = self.training.model, self.training.mesh, rollouts.engine
        if not isinstance(engine, ServedConfig) or (self.training.lora.is_on and engine.lora == "adapter"):
            return 0
        if stage and engine.way == "nccl":
            return 0
        if engine.way == "ipc":
            largest = max(largest_layer(model, model.layer_kinds), model.vocab_size * model.hidden_size)
            return largest * self.layer.element * (1 if stage else 2)
        is_alone = engine.transport_dir is None and not engine.share_gpus
        kinds, ep = (model.layer_kinds, 1) if is_alone and not stage else (self.layout.kinds[stage], mesh.ep)
        layer = largest_layer(model, kinds, ep)
        vocabulary = model.vocab_size * model.hidden_size if stage in (0, mesh.pp - 1) else 0
        written = 0 if engine.way == "nccl" else layer * (1 if engine.in_fp8 else self.layer.element)
        return max(layer, vocabulary) * self.layer.element + written

    def _sent(self, rollouts: Rollouts, server: SharedServer | None) -> int:
        # The ranks keep what they write between them, and each worker of a server all weights.
        engine, training = rollouts.engine, self.training
        if not isinstance(engine, VllmConfig) or not engine.delta:
            return 0
        (whole,) = counts.weights_by_stage(training.model, MeshConfig())
        share = whole.total * self.layer.element // training.world_size
        return share + (0 if server is None else server.weights * server.gpus)

    def _activations(self, stage: int) -> tuple[int, int]:
        """Return the bytes kept over all microbatches in flight, and the bytes that are recomputed at one time."""
        training, model, mesh = self.training, self.training.model, self.training.mesh
        platform, sizes, layer = training.platform, self.sizes, self.layer
        num_microbatches = training.global_batch * mesh.model_parallel // (training.micro_batch * training.world_size)
        kinds, has_mtp = Counter(self.layout.kinds[stage]), stage == mesh.pp - 1 and model.mtp_layers > 0
        if has_mtp:
            kinds[model.mtp_kind] += model.mtp_layers
        group = platform.recompute_layers if platform.recompute == "full" else 0
        # Recomputed layers without an indexer need the choice that they share: it is kept.
        shared = sum(
            pair == ("indexed", "shared")
            for layers in self.layout.chunks[stage]
            for pair in pairwise(model.mixers[index] for index in layers)
        )
        choices = shared * layer.choice * chunks_in_flight(mesh, stage, num_microbatches) // mesh.vpp if group else 0

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
        chunks = [Counter(model.layer_kinds[layer] for layer in layers) for layers in self.layout.chunks[stage]]
        if has_mtp:
            chunks[-1][model.mtp_kind] += model.mtp_layers
        sizes_of_chunks = [kept(chunk) for chunk in chunks]
        if len(set(sizes_of_chunks)) == 1:
            return chunks_in_flight(mesh, stage, num_microbatches) * sizes_of_chunks[0] + choices, recomputed
        return most_kept(mesh, stage, num_microbatches, sizes_of_chunks) + choices, recomputed


BYTE_CODES = 256
"""Largest number of route codes that a byte stores."""
SCORE_BYTES = 6
"""Bytes of an expert and of its score, for the router-shift ratio (rl/step/router_shift.py)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RouteBytes:
    """Bytes of a rank's routes in each memory."""

    device: int = 0
    host: int = 0
    """Page-locked main memory."""


def layer_bytes(model: ModelConfig) -> int:
    """Return the bytes of a token's route in one layer, as replay/cache.py stores it."""
    num_codes = model.moe.num_experts * (2 if model.moe.capacity_factor else 1)
    return model.moe.top_k * (1 if num_codes <= BYTE_CODES else 2)


def routes_of_rank(training: Training, stage: int) -> RouteBytes:
    """Return the bytes on a rank of a pipeline stage, assuming completions of the longest length."""
    model, mesh, rollouts = training.model, training.mesh, training.rollouts
    if rollouts is None or not model.is_moe:
        return RouteBytes()
    parts = mesh.cp * (mesh.tp if mesh.sequence_parallel else 1)
    tokens = -(-rollouts.num_completions * training.sample_length // (max(1, training.replicas) * parts))
    layers = sum(model.moe_layers[layer] for layer in counts.layers_by_stage(model, mesh)[stage])
    each = layer_bytes(model) * rollouts.routes_per_token
    if rollouts.keeps_router_scores:
        each += model.moe.top_k * SCORE_BYTES
    size = tokens * layers * each
    return RouteBytes(device=size) if rollouts.route_store == "device" else RouteBytes(host=size)


STATE_BYTES = 12
"""Bytes of a weight's Adam state in a checkpoint, fp32 in every precision: the weight and two moments."""
TEXT_BYTES = 5
"""Bytes of a token's text in the files of samples."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Disk:
    """Bytes that a run writes to its folder."""

    checkpoint: int
    num_checkpoints: int
    """Largest number of checkpoints at one time: the kept checkpoints, and the checkpoint that is being written."""
    samples: int
    """Bytes of all files of samples; 0 without RL."""

    @property
    def total(self) -> int:
        """Bytes of everything."""
        return self.checkpoint * self.num_checkpoints + self.samples

    def describe(self) -> str:
        """Return the total and its parts, for messages."""
        text = f"{_gib(self.total)} ({self.num_checkpoints} checkpoints of {_gib(self.checkpoint)}"
        if self.samples:
            text += f", samples {_gib(self.samples)}"
        return f"{text})"


def disk_of(training: Training) -> Disk:
    """Return the bytes that a whole run takes."""
    checkpoint, steps, rollouts, whole = training.checkpoint, training.steps, training.rollouts, MeshConfig()
    weights, state = counts.Weights(), 0
    # A checkpoint holds every model that is trained, including a critic.
    for model in (model for model in training.models if model.trains):
        (stage,) = counts.with_adapters(counts.weights_by_stage(model.model, whole), model.lora, model.model, whole)
        is_left_out = model.lora.is_on and checkpoint.weights == "adapters"
        weights += stage.adapters if is_left_out else stage
        assert model.optim is not None
        if model.optim.is_sharded:
            state += STATE_BYTES * (stage.adapters if model.lora.is_on else stage).trainable
        else:
            state += muon_state_bytes(model.optim, stage, 0, MAIN_COPY_BYTES[training.platform.precision])
    element = 2 if training.platform.precision == "bf16" else 4
    saves = -(-steps // (checkpoint.interval or steps))
    samples = 0
    if rollouts is not None and rollouts.samples_interval is not None:
        files = -(-training.num_rollouts // rollouts.samples_interval)
        samples = files * rollouts.num_completions * training.sample_length * TEXT_BYTES
    return Disk(
        checkpoint=weights.total * element + state + weights.fp32_buffers * counts.FP32_BYTES,
        num_checkpoints=saves if checkpoint.keep == "all" else min(saves, checkpoint.keep + 1),
        samples=samples,
    )


def disk_warning(run_dir: Path, disk: Disk) -> str:
    """Return a sentence if the file system of `run_dir` has less room than the run will take, else an empty string."""
    folder = run_dir.absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    # A run that resumes has written a part already.
    written = sum(path.stat().st_size for path in (folder / "checkpoints").rglob("*") if path.is_file())
    if disk.total - written <= free:
        return ""
    return (
        f"the run will take {disk.describe()} of disk, and {existing} has {_gib(free)} free"
        f"{f' beside {_gib(written)} of checkpoints' if written else ''}. Make room, choose another run_dir, or lower "
        "checkpoint.keep."
    )


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB / 10 else f"{size / 2**20:.1f} MiB"


NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


def local_memory_violations(training: Training, *, trains: bool) -> Iterator[str]:
    """Yield a sentence if weights (and, if it `trains`, gradients and optimizer state) exceed this machine's memory.

    Activations, a rough estimate on CPUs, are not counted, nor is a GPU's memory.
    """
    device = training.platform.device
    if device == "cuda" or (device == "auto" and NVIDIA_DRIVER.exists()):
        return
    each = training.world_size // training.mesh.pp
    needed = sum(each * (stage.permanent if trains else stage.weights) for stage in memory_by_stage(training))
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > there:
        what = "weights, gradients and optimizer state" if trains else "the weights"
        yield (
            f"{what} of this model take {needed / GIB:,.0f} GiB on {training.world_size} local ranks, and this machine "
            f"has {there / GIB:,.0f} GiB. Correct the sizes in [model] if one is a slip, or run it on more machines."
        )


def device_memory_lines(training: Training, device_bytes: int) -> Iterator[str]:
    """Yield the estimate against the memory of a device, and a warning if the estimate is larger."""
    memory = memory_of_fullest_rank(training)
    yield f"memory, estimated: {memory.describe()} of {device_bytes / GIB:.1f}"
    if memory.total > device_bytes:
        yield (
            f"warning: the estimate is {(memory.total - device_bytes) / GIB:.1f} GiB more than the device has. "
            "`mcore-rl plan CONFIG --cluster CLUSTER.toml --nodes N --search` lists meshes that fit."
        )
