"""The number of low-rank adapters' parameters on each rank, in closed form."""

from mcore_rl.config.lora import LoraConfig
from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.model import LayerKind, ModelConfig
from mcore_rl.families import family_of
from mcore_rl.planning.weights import Weights, layer_kinds_by_stage


def with_adapters(
    weights: list[Weights], lora: LoraConfig, model: ModelConfig, mesh: MeshConfig
) -> list[Weights]:
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
    """Return the adapters of one transformer layer on one rank.

    A of a layer that splits its outputs is whole on every tensor-parallel rank, with rows for each projection, and so
    is B of a layer that splits its inputs; the other of the two is split.
    """
    targets, moe, tp = lora.targets_in(model), model.moe, mesh.tp
    found = Weights()
    is_moe = kind.is_moe
    if "attention" in targets:
        sizes = _latent_attention(model, tp) if family_of(model).is_latent else _attention(model, tp)
        found += Weights(dense_adapters=lora.rank_of("attention", model) * sizes)
    for target, width in (
        ("mlp", 0 if is_moe else model.ffn_hidden_size),
        ("shared_experts", moe.shared_width),
    ):
        if target in targets and width and (target == "mlp") != is_moe:
            found += Weights(
                dense_adapters=lora.rank_of(target, model) * _gated(model, width // tp, num_blocks=2)
            )
    if "experts" in targets and is_moe:
        blocks = 2 if lora.expert_gate_up == "split" else 1
        each = _gated(model, moe.ffn_hidden_size // mesh.etp, num_blocks=blocks)
        found += Weights(expert_adapters=moe.num_experts // mesh.ep * lora.rank_of("experts", model) * each)
    return found


def _gated(model: ModelConfig, width: int, *, num_blocks: int) -> int:
    """Return the inputs and outputs of both matrices of a gated MLP with `width` on this rank."""
    return num_blocks * model.hidden_size + 2 * width + width + model.hidden_size


def _attention(model: ModelConfig, tp: int) -> int:
    """Return the inputs and outputs of queries, keys and values, and of the output's projection."""
    hidden, head = model.hidden_size, model.head_dim
    queries, keys = model.num_heads // tp * head, max(1, model.num_kv_heads // tp) * head
    return 3 * hidden + queries + 2 * keys + queries + hidden


def _latent_attention(model: ModelConfig, tp: int) -> int:
    """Return the same of latent attention; its down-projections are whole on every tensor-parallel rank."""
    hidden, mla, heads = model.hidden_size, model.mla, model.num_heads // tp
    queries = heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    query_path = hidden + queries
    if mla.q_lora_rank:
        query_path = hidden + mla.q_lora_rank + mla.q_lora_rank + queries
    down = hidden + mla.kv_lora_rank + mla.qk_rope_head_dim
    up = mla.kv_lora_rank + heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    return query_path + down + up + heads * mla.v_head_dim + hidden
