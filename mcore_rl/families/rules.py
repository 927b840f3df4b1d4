"""Building blocks of the families' weight rules: tensor names on both sides, and which rows go where."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from mcore_rl.config.model import Mixer, ModelConfig
from mcore_rl.families.weight_map import DuplicateTensor, HfRows, Shape, WeightRule

ExpertLayout = Literal["each", "fused", "transposed"]
"""Layout of Hugging Face's experts: a tensor for each expert, as in most published checkpoints, or a single tensor for
all experts of a layer, in which each matrix may be transposed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerNames:
    """Name prefixes of one transformer layer's tensors, and its index in Megatron tensors that hold several layers."""

    hf: str
    """Prefix of Hugging Face's names."""
    mcore: str
    """Prefix of Megatron's keys."""
    is_moe: bool
    mixer: Mixer = "attention"
    """The part of the layer that mixes positions."""
    index: tuple[int, ...] = ()
    """The layer's index on each leading axis of Megatron's tensors, as in `WeightRule`."""
    lead: Shape = ()

    def vector(self, key: str, name: str, size: int) -> WeightRule:
        """Return the rule for a vector that is the same on both sides."""
        return self.tensor(key, [HfRows(self.hf + name, 0, size)], ())

    def matrix(self, key: str, width: int, *parts: tuple[str, int]) -> WeightRule:
        """Return the rule for a matrix with `width` columns: the concatenated Hugging Face tensors (name, rows)."""
        return self.tensor(key, [HfRows(self.hf + name, 0, count) for name, count in parts], (width,))

    def interleaved(self, key: str, row: Shape, groups: int, *parts: tuple[str, int]) -> WeightRule:
        """Return the rule for a tensor with, for each group in turn, the rows of each part (name, rows per group)."""
        rows = [
            HfRows(self.hf + name, group * count, (group + 1) * count)
            for group in range(groups)
            for name, count in parts
        ]
        return self.tensor(key, rows, row)

    def tensor(self, key: str, rows: Sequence[HfRows], row: Shape) -> WeightRule:
        """Return the rule for a tensor of these rows, each of shape `row`; their names must be complete."""
        return WeightRule(key=self.mcore + key, rows=tuple(rows), row=row, index=self.index, lead=self.lead)


@dataclass(frozen=True, slots=True)
class MoENames:
    """Hugging Face's names in an MoE layer; the defaults fit most families."""

    prefix: str = "mlp."
    gate: str = "gate_proj"
    """An expert's gate projection; the activation is applied to its output."""
    up: str = "up_proj"
    """An expert's up-projection; its output is multiplied by the activation's."""
    down: str = "down_proj"
    """An expert's output matrix."""
    shared: str = "shared_experts"
    shared_gate: str = "shared_expert_gate"
    """The sigmoid gate on the shared experts' output, in families with such a gate."""
    bias: str = "gate.e_score_correction_bias"
    """The bias on the choice of experts, in families with such a bias."""


def decoder_layers(model: ModelConfig) -> list[LayerNames]:
    """Return the names of all layers; those of one kind share tensors with a leading axis, as in Megatron."""
    stacked = model.layers_alike
    return [
        LayerNames(
            hf=f"model.layers.{i}.",
            mcore="decoder.layers." if stacked else f"decoder.layers.{i}.",
            is_moe=kind.is_moe,
            mixer=kind.mixer,
            index=(i,) if stacked else (),
            lead=(model.num_layers,) if stacked else (),
        )
        for i, kind in enumerate(model.layer_kinds)
    ]


def mtp_layers(model: ModelConfig) -> list[LayerNames]:
    """Return the names of the layers inside MTP layers, numbered after the model's, and like its last one."""
    return [
        LayerNames(
            hf=f"model.layers.{model.num_layers + i}.",
            mcore=f"mtp.layers.{i}.transformer_layer.",
            is_moe=model.mtp_kind.is_moe,
            mixer=model.mtp_kind.mixer,
        )
        for i in range(model.mtp_layers)
    ]


def outer(model: ModelConfig) -> Iterator[WeightRule]:
    """Yield the rules of the embeddings and their padding, of the output layer or scalar head, and of the last norm."""
    names = {"embedding.word_embeddings.weight": "model.embed_tokens.weight"}
    if model.head == "score":
        score = HfRows("score.weight", 0, 1)
        yield WeightRule(key="score.weight", rows=(score,), row=(model.hidden_size,))
        # Hugging Face's models have no shift: it is 0 after an import, and an export does not subtract it.
        yield WeightRule(key="score.shift", rows=(), row=(), padding=1, fp32=True)
    elif not model.tied_embeddings:
        names["output_layer.weight"] = "lm_head.weight"
    for key, name in names.items():
        yield WeightRule(
            key=key,
            rows=(HfRows(name, 0, model.vocab_size),),
            row=(model.hidden_size,),
            padding=model.padded_vocab_size - model.vocab_size,
        )
    final = HfRows("model.norm.weight", 0, model.hidden_size)
    yield WeightRule(key="decoder.final_layernorm.weight", rows=(final,), row=())


def grouped_query(
    model: ModelConfig, layer: LayerNames, *, has_bias: bool, has_norms: bool, has_full_norms: bool, has_gate: bool
) -> Iterator[WeightRule]:
    """Yield the rules of grouped-query attention and the norm before it. `has_full_norms`: queries and keys are normed
    over all heads at once; `has_gate`: each head's gate comes after its query.
    """
    head, hidden = model.head_dim, model.hidden_size
    sizes = {"q": model.num_heads // model.num_kv_heads * head, "k": head, "v": head}
    yield layer.vector("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight", hidden)
    for kind, row in (("weight", (hidden,)), ("bias", ()))[: 1 + has_bias]:
        parts = [(f"self_attn.{part}_proj.{kind}", size) for part, size in sizes.items()]
        # Megatron keeps the queries, the key and the value of a group together, so that tensor parallelism splits
        # between groups.
        if has_gate:
            yield layer.tensor(f"self_attention.linear_qkv.{kind}", _gated_rows(model, layer, kind), row)
        else:
            yield layer.interleaved(f"self_attention.linear_qkv.{kind}", row, model.num_kv_heads, *parts)
    yield layer.matrix("self_attention.linear_proj.weight", model.num_heads * head, ("self_attn.o_proj.weight", hidden))
    if has_norms:
        heads = (model.num_heads, model.num_kv_heads) if has_full_norms else (1, 1)
        for part, count in zip("qk", heads, strict=True):
            key, name = f"self_attention.{part}_layernorm.weight", f"self_attn.{part}_norm.weight"
            yield layer.vector(key, name, count * head)


def _gated_rows(model: ModelConfig, layer: LayerNames, kind: str) -> list[HfRows]:
    """Return the rows of queries, gates, keys and values; each group in Megatron has its queries before its gates."""
    head, name = model.head_dim, layer.hf + "self_attn.{}_proj." + kind
    rows, per_group = [], model.num_heads // model.num_kv_heads
    for group in range(model.num_kv_heads):
        heads = range(group * per_group, (group + 1) * per_group)
        for part in (0, 1):
            starts = [(2 * index + part) * head for index in heads]
            rows += [HfRows(name.format("q"), start, start + head) for start in starts]
        rows += [HfRows(name.format(part), group * head, (group + 1) * head) for part in "kv"]
    return rows


def delta_net(
    model: ModelConfig, layer: LayerNames, projections: Mapping[str, Sequence[HfRows]]
) -> Iterator[WeightRule]:
    """Yield the rules of a gated delta net and the norm before it; `projections` has Hugging Face's rows by part."""
    delta, hidden, key = model.delta, model.hidden_size, "self_attention."
    yield layer.vector(key + "in_proj.layer_norm_weight", "input_layernorm.weight", hidden)
    for part, rows in projections.items():
        yield layer.tensor(f"{key}in_proj.weight.{part}", rows, (hidden,))
    begin = 0
    for part, width in (("query", delta.query_width), ("key", delta.query_width), ("value", delta.value_width)):
        rows = [HfRows(layer.hf + "linear_attn.conv1d.weight", begin, begin + width)]
        yield layer.tensor(f"{key}conv1d.weight.{part}", rows, (1, delta.conv_width))
        begin += width
    for part in ("A_log", "dt_bias"):
        yield layer.vector(key + part, f"linear_attn.{part}", delta.value_heads)
    yield layer.vector(key + "out_norm.weight", "linear_attn.norm.weight", delta.value_dim)
    yield layer.matrix(key + "out_proj.weight", delta.value_width, ("linear_attn.out_proj.weight", hidden))


def latent(model: ModelConfig, layer: LayerNames) -> Iterator[WeightRule]:
    """Yield the rules of multi-head latent attention and of the norm before it; row orders are equal on both sides."""
    mla, hidden, heads = model.mla, model.hidden_size, model.num_heads
    query = heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    key_value = heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    key, name = "self_attention.linear_", "self_attn."
    yield layer.vector("input_layernorm.weight", "input_layernorm.weight", hidden)
    if mla.q_lora_rank:
        rank = mla.q_lora_rank
        yield layer.matrix(key + "q_down_proj.weight", hidden, (name + "q_a_proj.weight", rank))
        yield layer.vector(key + "q_up_proj.layer_norm_weight", name + "q_a_layernorm.weight", rank)
        yield layer.matrix(key + "q_up_proj.weight", rank, (name + "q_b_proj.weight", query))
    else:
        yield layer.matrix(key + "q_proj.weight", hidden, (name + "q_proj.weight", query))
    rank = mla.kv_lora_rank
    yield layer.matrix(
        key + "kv_down_proj.weight", hidden, (name + "kv_a_proj_with_mqa.weight", rank + mla.qk_rope_head_dim)
    )
    yield layer.vector(key + "kv_up_proj.layer_norm_weight", name + "kv_a_layernorm.weight", rank)
    yield layer.matrix(key + "kv_up_proj.weight", rank, (name + "kv_b_proj.weight", key_value))
    yield layer.matrix(key + "proj.weight", heads * mla.v_head_dim, (name + "o_proj.weight", hidden))


def indexer(model: ModelConfig, layer: LayerNames) -> Iterator[WeightRule]:
    """Yield the rules of a layer's indexer, if it has one; the keys are named as in Megatron's own layer."""
    key, name = "self_attention.core_attention.indexer.", "self_attn.indexer."
    heads, width = model.indexer.heads, model.indexer.width
    rank = model.mla.q_lora_rank or model.hidden_size
    yield layer.matrix(key + "linear_wq_b.weight", rank, (name + "wq_b.weight", heads * width))
    yield layer.matrix(key + "linear_wk.weight", model.hidden_size, (name + "wk.weight", width))
    for part in ("weight", "bias"):
        yield layer.vector(f"{key}k_norm.{part}", f"{name}k_norm.{part}", width)
    yield layer.matrix(key + "linear_weights_proj.weight", model.hidden_size, (name + "weights_proj.weight", heads))


def feed_forward(
    model: ModelConfig, layer: LayerNames, experts: ExpertLayout, names: MoENames, *, has_shared_gate: bool
) -> Iterator[WeightRule]:
    """Yield the rules of the layer's MLP, or of its router and experts, and of the norm before them."""
    moe, hidden = model.moe, model.hidden_size
    norm = "pre_mlp_layernorm.weight" if layer.is_moe else "mlp.linear_fc1.layer_norm_weight"
    yield layer.vector(norm, "post_attention_layernorm.weight", hidden)
    if not layer.is_moe:
        yield from _gated(model, layer, "mlp.", model.ffn_hidden_size, "mlp.")
        return
    # In the fused layouts all families have the same names.
    prefix = names.prefix if experts == "each" else "mlp."
    yield layer.matrix("mlp.router.weight", hidden, (prefix + "gate.weight", moe.num_experts))
    if moe.expert_bias:
        bias = layer.vector("mlp.router.expert_bias", prefix + names.bias, moe.num_experts)
        yield replace(bias, fp32=True)
    if moe.shared_experts:
        yield from _gated(model, layer, "mlp.shared_experts.", moe.shared_width, f"{prefix}{names.shared}.")
    if has_shared_gate:
        gate = (f"{prefix}{names.shared_gate}.weight", 1)
        yield layer.matrix("mlp.shared_experts.gate_weight", hidden, gate)
    if experts != "each":
        yield from (_fused_experts if experts == "fused" else _transposed_experts)(model, layer)
        return
    width = moe.ffn_hidden_size
    for e in range(moe.num_experts):
        name = f"{names.prefix}experts.{e}."
        expert = replace(layer, index=(*layer.index, e), lead=(*layer.lead, moe.num_experts))
        gate_up = (f"{name}{names.gate}.weight", width), (f"{name}{names.up}.weight", width)
        yield expert.matrix("mlp.experts.experts.linear_fc1.weight", hidden, *gate_up)
        yield expert.matrix("mlp.experts.experts.linear_fc2.weight", width, (f"{name}{names.down}.weight", hidden))


def mtp(model: ModelConfig) -> Iterator[WeightRule]:
    """Yield the rules of each MTP layer's tensors outside its transformer layer."""
    hidden = model.hidden_size
    for i in range(model.mtp_layers):
        around = LayerNames(hf=f"model.layers.{model.num_layers + i}.", mcore=f"mtp.layers.{i}.", is_moe=False)
        yield around.vector("enorm.weight", "enorm.weight", hidden)
        yield around.vector("hnorm.weight", "hnorm.weight", hidden)
        # Both sides put the embedding before the hidden state.
        yield around.matrix("eh_proj.weight", 2 * hidden, ("eh_proj.weight", hidden))
        yield around.vector("final_layernorm.weight", "shared_head.norm.weight", hidden)


def tied_output(model: ModelConfig) -> Iterator[DuplicateTensor]:
    """Yield the output layer if it repeats the embedding."""
    if model.tied_embeddings and model.head == "logits":
        yield DuplicateTensor("lm_head.weight", "model.embed_tokens.weight", written=False)


def duplicates(model: ModelConfig) -> Iterator[DuplicateTensor]:
    """Yield the embeddings that Hugging Face checkpoints repeat: a tied output, and copies in each MTP layer."""
    yield from tied_output(model)
    if model.head == "score":
        return
    embedding = "model.embed_tokens.weight"
    output = embedding if model.tied_embeddings else "lm_head.weight"
    for i in range(model.num_layers, model.num_layers + model.mtp_layers):
        yield DuplicateTensor(f"model.layers.{i}.embed_tokens.weight", embedding, written=True)
        yield DuplicateTensor(f"model.layers.{i}.shared_head.head.weight", output, written=True)


def _gated(model: ModelConfig, layer: LayerNames, key: str, width: int, name: str) -> Iterator[WeightRule]:
    gate, up = (name + "gate_proj.weight", width), (name + "up_proj.weight", width)
    yield layer.matrix(key + "linear_fc1.weight", model.hidden_size, gate, up)
    yield layer.matrix(key + "linear_fc2.weight", width, (name + "down_proj.weight", model.hidden_size))


def _fused_experts(model: ModelConfig, layer: LayerNames) -> Iterator[WeightRule]:
    """Yield the rules of experts in a single Hugging Face tensor per layer; a rule's "rows" are then whole experts."""
    moe, hidden = model.moe, model.hidden_size
    for key, name, row in (
        ("linear_fc1", "gate_up_proj", (2 * moe.ffn_hidden_size, hidden)),
        ("linear_fc2", "down_proj", (hidden, moe.ffn_hidden_size)),
    ):
        rows = (HfRows(f"{layer.hf}mlp.experts.{name}", 0, moe.num_experts),)
        key = f"{layer.mcore}mlp.experts.experts.{key}.weight"
        yield WeightRule(key=key, rows=rows, row=row, index=layer.index, lead=layer.lead)


def _transposed_experts(model: ModelConfig, layer: LayerNames) -> Iterator[WeightRule]:
    moe, hidden = model.moe, model.hidden_size
    for e in range(moe.num_experts):
        expert = replace(layer, index=(*layer.index, e), lead=(*layer.lead, moe.num_experts))
        for key, name, rows, width in (
            ("linear_fc1", "gate_up_proj", 2 * moe.ffn_hidden_size, hidden),
            ("linear_fc2", "down_proj", hidden, moe.ffn_hidden_size),
        ):
            part = HfRows(f"{layer.hf}mlp.experts.{name}", 0, rows, at=(e,), transposed=True)
            yield expert.tensor(f"mlp.experts.experts.{key}.weight", [part], (width,))


class Rows(NamedTuple):
    """Order of a matrix's rows: `groups` times, the rows of each projection in turn; `sizes` has their numbers."""

    groups: int
    sizes: tuple[int, ...]


def packed_rows(layer: str, num_rows: int, model: ModelConfig) -> Rows:
    """Return the row order of the linear layer of this name, such as "linear_qkv", or of a rank's part of it."""
    if layer == "linear_qkv":
        width = model.head_dim
        sizes: tuple[int, ...] = (model.num_heads // model.num_kv_heads * width, width, width)
    elif layer == "linear_fc1":
        sizes = (num_rows // 2, num_rows // 2)
    else:
        sizes = (num_rows,)
    groups, rest = divmod(num_rows, sum(sizes))
    assert not rest, f"{layer} has {num_rows} rows, no multiple of {sizes}"
    return Rows(groups, sizes)
