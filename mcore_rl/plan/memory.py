"""An estimate, in closed form, of the device memory that training takes on a rank.

The estimate contains weights, fp32 gradients, the rank's share of the optimizer state, the activations that forward
passes keep for the backward pass (as in arXiv 2205.05198, with attention that keeps no scores), the recomputation of
one layer, and the logits; for RL also the keys and values of rollouts, during which no activations are kept. It takes
experts as evenly loaded. CUDA's context, NCCL's buffers and fragmentation are not in it: a cluster reserves room for
them.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.config.run import PlatformConfig, RunConfig
from mcore_rl.families import family_of
from mcore_rl.plan.weights import Weights, layers_by_stage, weights_by_stage

GIB = 2**30
GRADIENT_BYTES = 4
"""Bytes of a weight's gradient, which Megatron accumulates in fp32."""
STATE_BYTES = {"bf16": 12, "fp32": 8}
"""Bytes of optimizer state for a weight, by precision: two fp32 moments, and with bf16 an fp32 master copy."""
FP8_COPIES_BYTES = 2
"""Bytes of the 8-bit copies of a weight and of its transpose that TransformerEngine keeps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Bytes on one rank of a pipeline stage."""

    stage: int
    """Index of the pipeline stage; all other fields are bytes."""
    weights: int
    gradients: int
    optimizer: int
    activations: int
    """Activations that wait for their backward pass, over all microbatches in flight."""
    recomputed: int
    """Activations of the layers whose forward pass is being repeated for the backward pass."""
    logits: int
    """Logits, their fp32 copy for the loss, and their gradient."""
    rollout_cache: int = 0
    """Keys and values of completions in progress, which exist at other times than activations."""

    @property
    def permanent(self) -> int:
        """Bytes that are in use all the time."""
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        """Largest number of bytes in use at one time."""
        return self.permanent + max(self.activations + self.recomputed + self.logits, self.rollout_cache)

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
        if self.rollout_cache:
            text += f", or instead of the last two a rollout's cache {self.rollout_cache / GIB:.1f}"
        return f"{self.total / GIB:.1f} GiB on a rank of pipeline stage {self.stage} ({text})"


def memory_of_fullest_rank(config: RunConfig, world_size: int, seq_length: int) -> Memory:
    """Return the memory of a rank of the stage that needs most; config and world size must have passed the checks."""
    return max(memory_by_stage(config, world_size, seq_length), key=lambda memory: memory.total)


def memory_by_stage(config: RunConfig, world_size: int, seq_length: int) -> list[Memory]:
    """Return the memory of one rank of each pipeline stage, for sequences of `seq_length` tokens."""
    return [
        _memory(config, world_size, seq_length, stage, weights)
        for stage, weights in enumerate(weights_by_stage(config.model, config.mesh))
    ]


def _memory(config: RunConfig, world_size: int, seq_length: int, stage: int, weights: Weights) -> Memory:
    mesh, precision = config.mesh, config.platform.precision
    element = 2 if precision == "bf16" else 4
    tokens = config.train.micro_batch * seq_length // mesh.cp
    layer = LayerActivations(config.model, mesh, config.platform, tokens)
    kept, recomputed = _activations(config, stage, layer, world_size)
    copies = world_size // (mesh.tp * mesh.pp)
    expert_copies = max(1, world_size // (mesh.etp * mesh.ep * mesh.pp))
    state = STATE_BYTES[precision]
    fp8 = FP8_COPIES_BYTES if config.platform.fp8 != "none" else 0
    has_logits = stage == mesh.pp - 1 and config.model.head == "logits"
    heads = (1 + config.model.mtp_layers) if has_logits else 0
    # The output layer's result, its fp32 copy for the loss, and the gradient in fp32.
    logits = tokens * config.model.padded_vocab_size // mesh.tp * (element + 4 + 4)
    return Memory(
        stage=stage,
        weights=weights.total * (element + fp8),
        gradients=weights.total * GRADIENT_BYTES,
        optimizer=weights.dense * state // copies + weights.expert * state // expert_copies,
        activations=kept,
        recomputed=recomputed,
        logits=heads * logits,
        rollout_cache=_rollout_cache(config, stage, world_size) if isinstance(config, RlRunConfig) else 0,
    )


def _rollout_cache(config: RlRunConfig, stage: int, world_size: int) -> int:
    """Return the bytes of the native engine's cache, whose every slot has room for the longest sample."""
    model, mesh = config.model, config.mesh
    element = 2 if config.platform.precision == "bf16" else 4
    replicas = world_size // mesh.model_parallel
    # One slot more takes the keys and values of padding, which no token reads.
    slots = min(config.rl.engine.slots, -(-config.rollout_size // replicas)) + 1
    if family_of(model).is_latent:
        mla = model.mla
        widths = model.num_heads // mesh.tp * (mla.qk_nope_head_dim + mla.qk_rope_head_dim + mla.v_head_dim)
    else:
        widths = 2 * max(1, model.num_kv_heads // mesh.tp) * model.head_dim
    layers = len(layers_by_stage(model, mesh)[stage])
    return slots * config.longest_sample * layers * widths * element


def _activations(
    config: RunConfig, stage: int, layer: "LayerActivations", world_size: int
) -> tuple[int, int]:
    """Return the bytes kept over all microbatches in flight, and those that are computed again at one time."""
    mesh, model = config.mesh, config.model
    num_microbatches = (
        config.train.global_batch * mesh.model_parallel // (config.train.micro_batch * world_size)
    )
    layers = [model.moe_layers[index] for index in layers_by_stage(model, mesh)[stage]]
    if stage == mesh.pp - 1:
        layers += [model.moe_layers[-1]] * model.mtp_layers
    chunks = chunks_in_flight(mesh, stage, num_microbatches)
    if config.platform.recompute == "full":
        group = config.platform.recompute_layers
        kept = -(-len(layers) // group) * layer.residual
        recomputed = group * max(sum(layer.all_parts(is_moe).values()) for is_moe in layers)
    else:
        kept = sum(layer.kept(is_moe) for is_moe in layers)
        recomputed = max(sum(layer.all_parts(is_moe).values()) - layer.kept(is_moe) for is_moe in layers)
    return kept * chunks // mesh.vpp, recomputed


def chunks_in_flight(mesh: MeshConfig, stage: int, num_microbatches: int) -> int:
    """Return the largest number of a stage's model chunks whose forward pass waits for its backward pass (1F1B)."""
    if mesh.vpp == 1:
        return min(mesh.pp - stage, num_microbatches)
    # Megatron's warm-up of the interleaved schedule (arXiv 2104.04473), and the microbatch in its forward pass.
    warmup = 2 * (mesh.pp - stage - 1) + (mesh.vpp - 1) * mesh.pp
    return min(warmup + 1, num_microbatches * mesh.vpp)


@dataclass(frozen=True, slots=True)
class LayerActivations:
    """Bytes of the activations that one transformer layer keeps of one microbatch on one rank."""

    model: ModelConfig
    mesh: MeshConfig
    platform: PlatformConfig
    tokens: int
    """Number of the microbatch's tokens on a rank, before sequence parallelism cuts them."""

    @property
    def element(self) -> int:
        """Bytes of one number of an activation."""
        return 2 if self.platform.precision == "bf16" else 4

    @property
    def residual(self) -> int:
        """Bytes of the residual stream at one point of the layer."""
        slices = self.mesh.tp if self.mesh.sequence_parallel else 1
        return self.tokens * self.model.hidden_size * self.element // slices

    def all_parts(self, is_moe: bool) -> dict[str, int]:
        """Return the bytes by part of the layer, without recomputation."""
        return dict(self._attention()) | dict(self._experts() if is_moe else self._mlp())

    def kept(self, is_moe: bool) -> int:
        """Return the bytes kept with `platform.recompute` none or selective."""
        parts = self.all_parts(is_moe)
        modules = self.platform.recompute_modules if self.platform.recompute == "selective" else ()
        dropped = {
            # Attention that keeps no scores has nothing to drop but its inputs, which stay.
            "core_attn": (),
            "layernorm": ("normed",),
            "mla_up_proj": ("queries_keys_values",) if family_of(self.model).is_latent else (),
            "moe": ("routed_in", "routed_up", "routed_act", "shared_up", "shared_act", "router"),
            "moe_act": ("routed_act",),
            "mlp": ("up", "act"),
            "shared_experts": ("shared_up", "shared_act"),
        }
        parts_dropped = {part for module in modules for part in dropped[module]}
        return sum(size for part, size in parts.items() if part not in parts_dropped)

    def _attention(self) -> Iterator[tuple[str, int]]:
        model, each = self.model, self.tokens * self.element
        family = family_of(model)
        heads, kv_heads = model.num_heads // self.mesh.tp, max(1, model.num_kv_heads // self.mesh.tp)
        yield "inputs", 2 * self.residual  # of both norms
        yield "normed", 2 * self.residual
        if family.is_latent:
            mla = model.mla
            width = mla.qk_nope_head_dim + mla.qk_rope_head_dim
            # Each latent is kept before and after its norm, cut as the residual stream is.
            latents = 2 * (mla.q_lora_rank or 0) + 2 * mla.kv_lora_rank + mla.qk_rope_head_dim
            yield "latents", self.residual * latents // model.hidden_size
            yield "queries_keys_values", each * heads * (2 * width + mla.v_head_dim)
            yield "attended", each * heads * mla.v_head_dim
            return
        if family.has_qk_norm(model):
            yield "unnormed_queries_keys", each * (heads + kv_heads) * model.head_dim
        yield "queries_keys_values", each * (heads + 2 * kv_heads) * model.head_dim
        yield "attended", each * heads * model.head_dim

    def _mlp(self) -> Iterator[tuple[str, int]]:
        width = self.tokens * self.element * self.model.ffn_hidden_size // self.mesh.tp
        yield "up", 2 * width
        yield "act", width

    def _experts(self) -> Iterator[tuple[str, int]]:
        moe, tp = self.model.moe, self.mesh.tp
        # Tokens are spread over tp * cp * dp ranks; an expert cut over etp ranks works on the tokens of all of them.
        routed = self.tokens * moe.top_k * self.mesh.etp // tp
        width = routed * moe.ffn_hidden_size * self.element // self.mesh.etp
        yield "router", self.tokens // tp * moe.num_experts * 4
        yield "routed_in", routed * self.model.hidden_size * self.element
        yield "routed_up", 2 * width
        yield "routed_act", width
        shared = self.tokens * self.element * moe.shared_width // tp
        yield "shared_up", 2 * shared
        yield "shared_act", shared
