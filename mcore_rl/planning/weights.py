"""Layers of each pipeline stage, weights and adapters of each rank in closed form, and a rank's place in the mesh."""

from collections import Counter
from dataclasses import dataclass, fields

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.model import LayerKind, ModelConfig
from mcore_rl.config.optim import LoraConfig
from mcore_rl.families import family_of
from mcore_rl.families.family import Family

FP32_BYTES = 4


@dataclass(frozen=True, slots=True)
class Weights:
    """Numbers of weights on a rank, by the group of ranks that hold copies of them."""

    dense: int = 0
    """Number of weights of attention, norms, dense MLPs, shared experts, routers and embeddings: on dp * cp ranks."""
    expert: int = 0
    """Number of weights of routed experts: on expert_dp ranks."""
    router: int = 0
    """Number of the routers' weights, which are counted among the dense weights too."""
    vectors: int = 0
    """Number of the dense weights, and of the experts', that Adam updates beside Muon, but for the routers'."""
    fp32_buffers: int = 0
    """Numbers that no gradient trains, fp32 in every precision: experts' biases, the shift of scores."""
    frozen: int = 0
    """Number of the indexers' weights, which nothing trains: on dp * cp ranks."""
    buffers: int = 0
    """Numbers that no gradient trains, in the type of the weights: YaRN's cosines and sines. They are not saved."""
    loads: int = 0
    """Numbers of tokens of each expert since the last step, fp32 in every precision. They are not saved."""
    dense_adapters: int = 0
    """Number of parameters of low-rank adapters of all but routed experts: on dp * cp ranks."""
    expert_adapters: int = 0
    """Number of parameters of low-rank adapters of routed experts: on expert_dp ranks."""

    def __add__(self, other: "Weights") -> "Weights":
        return Weights(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))

    def __mul__(self, count: int) -> "Weights":
        return Weights(*(getattr(self, field.name) * count for field in fields(self)))

    @property
    def adapters(self) -> "Weights":
        """Only the low-rank adapters."""
        return Weights(dense_adapters=self.dense_adapters, expert_adapters=self.expert_adapters)

    def bytes(self, element: int) -> int:
        """Return the bytes of weights of `element` bytes, and of the buffers that belong to them."""
        return (self.total + self.buffers) * element + (self.fp32_buffers + self.loads) * FP32_BYTES

    @property
    def total(self) -> int:
        """Number of all weights, and of their adapters."""
        return self.trainable + self.frozen

    @property
    def trainable(self) -> int:
        """Number of weights that can be trained, and of their adapters."""
        return self.dense + self.expert + self.dense_adapters + self.expert_adapters


def weights_by_stage(model: ModelConfig, mesh: MeshConfig) -> list[Weights]:
    """Return the weights of one rank of each pipeline stage; the mesh must have passed the checks."""
    kinds = layer_kinds_by_stage(model, mesh)
    each = {kind: layer_weights(model, mesh, kind) for kind in model.all_kinds}
    stages = [sum((each[kind] * count for kind, count in counts.items()), start=Weights()) for counts in kinds]
    embedding = _vectors(model.padded_vocab_size * model.hidden_size // mesh.tp)
    stages[0] += embedding
    if not family_of(model).is_latent:
        # Each chunk has its own tables.
        tables = _yarn_tables(model, int(model.head_dim * model.rope.fraction)) * mesh.vpp
        stages = [stage + tables for stage in stages]
    hidden = model.hidden_size
    if model.head == "score":
        # The last norm and the head, which every rank has whole, and the shift of scores.
        stages[-1] += _vectors(2 * hidden) + Weights(fp32_buffers=1)
        return stages
    # The last stage has its own copy of the embedding if the output is tied to it, or an MTP layer needs it.
    if mesh.pp > 1 and (model.tied_embeddings or model.mtp_layers):
        stages[-1] += embedding
    if not model.tied_embeddings:
        stages[-1] += embedding
    # The last norm is on the stage of the last layer if multi-token-prediction layers follow it.
    by_stage = layers_by_stage(model, mesh)
    beside = max(range(mesh.pp), key=lambda stage: max(by_stage[stage], default=-1))
    stages[beside if model.mtp_layers else -1] += _vectors(hidden)
    for _ in range(model.mtp_layers):
        projection = 2 * hidden * hidden // mesh.tp
        stages[-1] += _vectors(projection + 3 * hidden)  # norms of embedding, hidden state and output
        stages[-1] += each[model.mtp_kind]
    return stages


def _vectors(count: int) -> Weights:
    return Weights(dense=count, vectors=count)


def layers_by_chunk(model: ModelConfig, mesh: MeshConfig) -> list[list[range]]:
    """Return the indices of layers by `[stage][chunk]`; chunks are dealt out in rounds over the stages."""
    stages: list[list[range]] = [[] for _ in range(mesh.pp)]
    layer = 0
    for index, count in enumerate(mesh.chunk_layers(model.num_layers, model.mtp_layers)):
        stages[index % mesh.pp].append(range(layer, layer + count))
        layer += count
    return stages


def layers_by_stage(model: ModelConfig, mesh: MeshConfig) -> list[list[int]]:
    """Return the indices of each pipeline stage's layers."""
    return [[layer for chunk in stage for layer in chunk] for stage in layers_by_chunk(model, mesh)]


def layer_kinds_by_stage(model: ModelConfig, mesh: MeshConfig) -> list[dict[LayerKind, int]]:
    """Return, for each pipeline stage, the number of its layers of each kind."""
    kinds = model.layer_kinds
    return [dict(Counter(kinds[layer] for layer in layers)) for layers in layers_by_stage(model, mesh)]


def layer_weights(model: ModelConfig, mesh: MeshConfig, kind: LayerKind) -> Weights:
    """Return the weights of one transformer layer on one rank."""
    hidden, moe, family = model.hidden_size, model.moe, family_of(model)
    if kind.mixer == "delta":
        mixer = _delta_net(model, mesh.tp)
    elif family.is_latent:
        mixer = _latent_attention(model, mesh.tp)
    else:
        mixer = _attention(model, family, mesh.tp)
    mixer += _vectors(2 * hidden)  # the two norms
    frozen, indexer = Weights(), model.indexer
    if kind.mixer == "indexed":
        # Whole on every tensor-parallel rank: queries, keys with their norm's weight and bias, and the heads' weights.
        queries = (model.mla.q_lora_rank or hidden) * indexer.heads * indexer.width
        frozen = Weights(frozen=queries + (hidden + 2) * indexer.width + hidden * indexer.heads)
    # Each layer of latent attention has its own tables.
    tables = _yarn_tables(model, model.mla.qk_rope_head_dim if family.is_latent else 0)
    if not kind.is_moe:
        return mixer + Weights(3 * hidden * model.ffn_hidden_size // mesh.tp) + tables + frozen
    biases = family.has_linear_bias
    router = moe.num_experts * (hidden + (1 if biases else 0))
    shared_gate = hidden if family.has_shared_expert_gate else 0
    shared = 3 * hidden * moe.shared_width // mesh.tp
    bias, local = (2 * moe.ffn_hidden_size + hidden if biases else 0), moe.num_experts // mesh.ep
    return (
        mixer
        + _vectors(shared_gate)
        + Weights(
            router + shared,
            local * (3 * hidden * moe.ffn_hidden_size // mesh.etp + bias),
            router,
            vectors=local * bias,
            fp32_buffers=moe.num_experts if moe.expert_bias else 0,
            loads=moe.num_experts if moe.expert_bias else 0,
        )
        + tables
        + frozen
    )


def _yarn_tables(model: ModelConfig, width: int) -> Weights:
    return Weights(buffers=2 * model.rope.original_length * width if model.rope.scaling == "yarn" else 0)


def _attention(model: ModelConfig, family: Family, tp: int) -> Weights:
    # With fewer key/value heads than ranks, each rank has a part of a head and gathers the product.
    hidden, head = model.hidden_size, model.head_dim
    heads, gates = model.num_heads, model.num_heads if family.has_output_gate else 0
    projected = head * (heads + gates + 2 * model.num_kv_heads) // tp
    vectors = projected if family.has_qkv_bias(model) else 0
    if family.has_qk_norm(model):
        # A norm over all heads is whole on every tensor-parallel rank.
        vectors += head * (model.num_heads + model.num_kv_heads) if family.has_full_qk_norm else 2 * head
    if family.has_linear_bias:
        vectors += hidden  # the bias of the output
    if family.has_attention_sinks:
        vectors += heads // tp
    return Weights(hidden * (projected + head * heads // tp)) + _vectors(vectors)


def _delta_net(model: ModelConfig, tp: int) -> Weights:
    # The gated norm is whole on every tensor-parallel rank.
    delta, hidden = model.delta, model.hidden_size
    convolved = 2 * delta.query_width + delta.value_width
    projected = convolved + delta.value_width + 2 * delta.value_heads
    vectors = (delta.conv_width * convolved + 2 * delta.value_heads) // tp + delta.value_dim
    return Weights(hidden * (projected + delta.value_width) // tp) + _vectors(vectors)


def delta_state_bytes(model: ModelConfig, tp: int, element: int) -> int:
    """Return the bytes that a gated delta net keeps of a completion: an fp32 state, and inputs of `element` bytes."""
    delta = model.delta
    state = FP32_BYTES * delta.value_heads * delta.key_dim * delta.value_dim
    inputs = element * (delta.conv_width - 1) * (2 * delta.query_width + delta.value_width)
    return (state + inputs) // tp


def _latent_attention(model: ModelConfig, tp: int) -> Weights:
    # Down-projections are whole on every tensor-parallel rank.
    hidden, mla, heads = model.hidden_size, model.mla, model.num_heads // tp
    query = heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    if mla.q_lora_rank:
        weights = hidden * mla.q_lora_rank + mla.q_lora_rank * query
    else:
        weights = hidden * query
    weights += hidden * (mla.kv_lora_rank + mla.qk_rope_head_dim)
    weights += mla.kv_lora_rank * heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    # The norms are of the latents.
    return Weights(weights + heads * mla.v_head_dim * hidden) + _vectors((mla.q_lora_rank or 0) + mla.kv_lora_rank)


def with_adapters(weights: list[Weights], lora: LoraConfig, model: ModelConfig, mesh: MeshConfig) -> list[Weights]:
    """Return the weights of one rank of each pipeline stage with their adapters."""
    if not lora.is_on:
        return weights
    kinds = layer_kinds_by_stage(model, mesh)
    each = {kind: layer_adapters(lora, model, mesh, kind) for kind in model.all_kinds}
    return [
        sum((each[kind] * count for kind, count in counts.items()), start=stage)
        for stage, counts in zip(weights, kinds, strict=True)
    ]


def active_adapters(lora: LoraConfig, model: ModelConfig) -> int:
    """Return the number of adapters' parameters that a token passes in all layers of a whole model."""
    if not lora.is_on:
        return 0
    total = 0
    for kind in model.layer_kinds:
        layer = layer_adapters(lora, model, MeshConfig(), kind)
        routed = layer.expert_adapters // model.moe.num_experts * model.moe.top_k if kind.is_moe else 0
        total += layer.dense_adapters + routed
    return total


def layer_adapters(lora: LoraConfig, model: ModelConfig, mesh: MeshConfig, kind: LayerKind) -> Weights:
    """Return a layer's adapters on one rank; A is whole where outputs are split, B where inputs are."""
    targets, moe, tp = lora.targets_in(model), model.moe, mesh.tp
    found = Weights()
    is_moe = kind.is_moe
    if "attention" in targets:
        sizes = _latent_adapter_sizes(model, tp) if family_of(model).is_latent else _adapter_sizes(model, tp)
        found += Weights(dense_adapters=lora.rank_of("attention", model) * sizes)
    for target, width in (("mlp", 0 if is_moe else model.ffn_hidden_size), ("shared_experts", moe.shared_width)):
        if target in targets and width and (target == "mlp") != is_moe:
            found += Weights(dense_adapters=lora.rank_of(target, model) * _gated(model, width // tp, num_blocks=2))
    if "experts" in targets and is_moe:
        blocks = 2 if lora.expert_gate_up == "split" else 1
        each = _gated(model, moe.ffn_hidden_size // mesh.etp, num_blocks=blocks)
        found += Weights(expert_adapters=moe.num_experts // mesh.ep * lora.rank_of("experts", model) * each)
    return found


def _gated(model: ModelConfig, width: int, *, num_blocks: int) -> int:
    """Return the inputs and outputs of both matrices; `width` is this rank's."""
    return num_blocks * model.hidden_size + 2 * width + width + model.hidden_size


def _adapter_sizes(model: ModelConfig, tp: int) -> int:
    hidden, head = model.hidden_size, model.head_dim
    queries, keys = model.num_heads // tp * head, max(1, model.num_kv_heads // tp) * head
    return 3 * hidden + queries + 2 * keys + queries + hidden


def _latent_adapter_sizes(model: ModelConfig, tp: int) -> int:
    # Down-projections are whole on every tensor-parallel rank.
    hidden, mla, heads = model.hidden_size, model.mla, model.num_heads // tp
    queries = heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    query_path = hidden + queries
    if mla.q_lora_rank:
        query_path = hidden + mla.q_lora_rank + mla.q_lora_rank + queries
    down = hidden + mla.kv_lora_rank + mla.qk_rope_head_dim
    up = mla.kv_lora_rank + heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    return query_path + down + up + heads * mla.v_head_dim + hidden


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Ranks that exchange something."""

    ranks: tuple[int, ...]
    num_nodes: int
    """Number of nodes that the ranks are on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankView:
    """One rank of a world."""

    rank: int
    node: int
    coordinates: dict[str, int]
    """Index on each axis: tp, cp, dp, pp; etp, ep, copy for the experts."""
    groups: dict[str, Group]
    """Groups of more than one rank, by axis."""
    layers: tuple[int, ...]
    experts: range
    """Indices of the experts of each MoE layer that the rank has."""


def view_of_rank(model: ModelConfig, mesh: MeshConfig, rank: int, world_size: int, ranks_per_node: int) -> RankView:
    """Return the place of `rank`; the mesh must have passed the checks for this world."""
    dp = world_size // mesh.model_parallel
    axes = _axes({"tp": mesh.tp, "cp": mesh.cp, "dp": dp, "pp": mesh.pp}, rank)
    if model.is_moe:
        copies = world_size // (mesh.etp * mesh.ep * mesh.pp)
        axes |= _axes({"etp": mesh.etp, "ep": mesh.ep, "copy": copies, "pp": mesh.pp}, rank)
    groups = {}
    for name, (index, size, stride) in axes.items():
        if size > 1:
            ranks = tuple(rank + (other - index) * stride for other in range(size))
            groups[name] = Group(ranks=ranks, num_nodes=len({rank // ranks_per_node for rank in ranks}))
    local = model.moe.num_experts // mesh.ep
    ep = axes["ep"][0] if "ep" in axes else 0
    return RankView(
        rank=rank,
        node=rank // ranks_per_node,
        coordinates={name: index for name, (index, _, _) in axes.items()},
        groups=groups,
        layers=tuple(layers_by_stage(model, mesh)[axes["pp"][0]]),
        experts=range(ep * local, (ep + 1) * local),
    )


def _axes(sizes: dict[str, int], rank: int) -> dict[str, tuple[int, int, int]]:
    """Return index, size and stride of each axis; the first axis changes fastest."""
    axes, stride = {}, 1
    for name, size in sizes.items():
        axes[name] = (rank // stride % size, size, stride)
        stride *= size
    return axes
