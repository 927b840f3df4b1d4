"""How the parts of a model are called on both sides, and which rows go where: what the families' rules are made of."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from mcore_rl.config.model import ModelConfig
from mcore_rl.families.weight_map import DuplicateTensor, HfRows, Shape, WeightRule

ExpertLayout = Literal["each", "fused"]
"""Hugging Face's experts: a tensor each, as published checkpoints have them, or all of a layer in one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerNames:
    """Where one transformer layer's tensors are: prefixes, and its place in tensors that hold all layers."""

    hf: str
    mcore: str
    is_moe: bool
    index: tuple[int, ...] = ()
    lead: Shape = ()

    def vector(self, key: str, name: str, size: int) -> WeightRule:
        """A vector that is the same on both sides."""
        return self.tensor(key, [HfRows(self.hf + name, 0, size)], ())

    def matrix(self, key: str, width: int, *parts: tuple[str, int]) -> WeightRule:
        """A matrix of `width` columns: whole Hugging Face tensors (name, number of rows) below one another."""
        return self.tensor(key, [HfRows(self.hf + name, 0, count) for name, count in parts], (width,))

    def interleaved(self, key: str, row: Shape, groups: int, *parts: tuple[str, int]) -> WeightRule:
        """A tensor that takes rows of each part (name, rows of one group) in turn, group by group."""
        rows = [
            HfRows(self.hf + name, group * count, (group + 1) * count)
            for group in range(groups)
            for name, count in parts
        ]
        return self.tensor(key, rows, row)

    def tensor(self, key: str, rows: Sequence[HfRows], row: Shape) -> WeightRule:
        """A tensor of these rows, whose names are whole, each of shape `row`."""
        return WeightRule(key=self.mcore + key, rows=tuple(rows), row=row, index=self.index, lead=self.lead)


@dataclass(frozen=True, slots=True)
class MoENames:
    """Hugging Face's names in an MoE layer: its prefix, an expert's three matrices, the shared experts."""

    prefix: str = "mlp."
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "shared_experts"
    shared_gate: str = ""
    """The gate on the shared experts' output; "": none."""


def decoder_layers(model: ModelConfig) -> list[LayerNames]:
    """The layers, in order; alike ones share tensors with a leading layer axis, as Megatron stores them."""
    stacked = model.layers_alike
    return [
        LayerNames(
            hf=f"model.layers.{i}.",
            mcore="decoder.layers." if stacked else f"decoder.layers.{i}.",
            is_moe=is_moe,
            index=(i,) if stacked else (),
            lead=(model.num_layers,) if stacked else (),
        )
        for i, is_moe in enumerate(model.moe_layers)
    ]


def mtp_layers(model: ModelConfig) -> list[LayerNames]:
    """The transformer layers inside the MTP layers, which Hugging Face numbers on; of the last layer's kind."""
    return [
        LayerNames(
            hf=f"model.layers.{model.num_layers + i}.",
            mcore=f"mtp.layers.{i}.transformer_layer.",
            is_moe=model.moe_layers[-1],
        )
        for i in range(model.mtp_layers)
    ]


def outer(model: ModelConfig) -> Iterator[WeightRule]:
    """Embeddings, with their padding, and the last norm."""
    names = {"embedding.word_embeddings.weight": "model.embed_tokens.weight"}
    if not model.tied_embeddings:
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


def grouped_query(model: ModelConfig, layer: LayerNames) -> Iterator[WeightRule]:
    """Grouped-query attention and the norm before it. Megatron keeps a group's queries, key and value together."""
    head, hidden = model.head_dim, model.hidden_size
    sizes = {"q": model.num_heads // model.num_kv_heads * head, "k": head, "v": head}
    yield layer.vector("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight", hidden)
    for kind, row in (("weight", (hidden,)), ("bias", ()))[: 1 + model.has_qkv_bias]:
        parts = [(f"self_attn.{part}_proj.{kind}", size) for part, size in sizes.items()]
        yield layer.interleaved(f"self_attention.linear_qkv.{kind}", row, model.num_kv_heads, *parts)
    yield layer.matrix(
        "self_attention.linear_proj.weight", model.num_heads * head, ("self_attn.o_proj.weight", hidden)
    )
    if model.has_qk_norm:
        heads = (model.num_heads, model.num_kv_heads) if model.has_full_qk_norm else (1, 1)
        for part, count in zip("qk", heads, strict=True):
            key, name = f"self_attention.{part}_layernorm.weight", f"self_attn.{part}_norm.weight"
            yield layer.vector(key, name, count * head)


def latent(model: ModelConfig, layer: LayerNames) -> Iterator[WeightRule]:
    """Multi-head latent attention and the norm before it. Both sides order a head's rows alike."""
    mla, hidden, heads = model.mla, model.hidden_size, model.num_heads
    query = heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    key_value = heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    ours, theirs = "self_attention.linear_", "self_attn."
    yield layer.vector("input_layernorm.weight", "input_layernorm.weight", hidden)
    if mla.q_lora_rank:
        rank = mla.q_lora_rank
        yield layer.matrix(ours + "q_down_proj.weight", hidden, (theirs + "q_a_proj.weight", rank))
        yield layer.vector(ours + "q_up_proj.layer_norm_weight", theirs + "q_a_layernorm.weight", rank)
        yield layer.matrix(ours + "q_up_proj.weight", rank, (theirs + "q_b_proj.weight", query))
    else:
        yield layer.matrix(ours + "q_proj.weight", hidden, (theirs + "q_proj.weight", query))
    rank = mla.kv_lora_rank
    yield layer.matrix(
        ours + "kv_down_proj.weight",
        hidden,
        (theirs + "kv_a_proj_with_mqa.weight", rank + mla.qk_rope_head_dim),
    )
    yield layer.vector(ours + "kv_up_proj.layer_norm_weight", theirs + "kv_a_layernorm.weight", rank)
    yield layer.matrix(ours + "kv_up_proj.weight", rank, (theirs + "kv_b_proj.weight", key_value))
    yield layer.matrix(ours + "proj.weight", heads * mla.v_head_dim, (theirs + "o_proj.weight", hidden))


def feed_forward(
    model: ModelConfig, layer: LayerNames, experts: ExpertLayout, names: MoENames | None = None
) -> Iterator[WeightRule]:
    """The layer's MLP or experts and the norm before them; `names` default to what most families call them."""
    norm = "pre_mlp_layernorm.weight" if layer.is_moe else "mlp.linear_fc1.layer_norm_weight"
    yield layer.vector(norm, "post_attention_layernorm.weight", model.hidden_size)
    if layer.is_moe:
        yield from _moe(model, layer, experts, names or MoENames())
    else:
        yield from _gated(model, layer, "mlp.", model.ffn_hidden_size, "mlp.")


def mtp(model: ModelConfig) -> Iterator[WeightRule]:
    """What an MTP layer has beside its transformer layer; both sides put the embedding before the hidden state."""
    hidden = model.hidden_size
    for i in range(model.mtp_layers):
        around = LayerNames(
            hf=f"model.layers.{model.num_layers + i}.", mcore=f"mtp.layers.{i}.", is_moe=False
        )
        yield around.vector("enorm.weight", "enorm.weight", hidden)
        yield around.vector("hnorm.weight", "hnorm.weight", hidden)
        yield around.matrix("eh_proj.weight", 2 * hidden, ("eh_proj.weight", hidden))
        yield around.vector("final_layernorm.weight", "shared_head.norm.weight", hidden)


def copies(model: ModelConfig) -> Iterator[DuplicateTensor]:
    """Embeddings that Hugging Face checkpoints repeat: a tied output, and those of each MTP layer."""
    embedding, output = "model.embed_tokens.weight", "lm_head.weight"
    if model.tied_embeddings:
        yield DuplicateTensor(output, embedding, written=False)
        output = embedding
    for i in range(model.num_layers, model.num_layers + model.mtp_layers):
        yield DuplicateTensor(f"model.layers.{i}.embed_tokens.weight", embedding, written=True)
        yield DuplicateTensor(f"model.layers.{i}.shared_head.head.weight", output, written=True)


def _gated(model: ModelConfig, layer: LayerNames, key: str, width: int, name: str) -> Iterator[WeightRule]:
    """A gated MLP: Megatron's first matrix has the gate's rows above those of the up-projection."""
    gate, up = (name + "gate_proj.weight", width), (name + "up_proj.weight", width)
    yield layer.matrix(key + "linear_fc1.weight", model.hidden_size, gate, up)
    yield layer.matrix(key + "linear_fc2.weight", width, (name + "down_proj.weight", model.hidden_size))


def _moe(
    model: ModelConfig, layer: LayerNames, layout: ExpertLayout, names: MoENames
) -> Iterator[WeightRule]:
    """Router, experts, shared experts. Of Hugging Face's fused layout all families have the same names."""
    moe, hidden = model.moe, model.hidden_size
    prefix = names.prefix if layout == "each" else "mlp."
    yield layer.matrix("mlp.router.weight", hidden, (prefix + "gate.weight", moe.num_experts))
    if moe.expert_bias:
        bias = layer.vector(
            "mlp.router.expert_bias", prefix + "gate.e_score_correction_bias", moe.num_experts
        )
        yield replace(bias, fp32=True)
    if moe.shared_experts:
        yield from _gated(model, layer, "mlp.shared_experts.", moe.shared_width, f"{prefix}{names.shared}.")
    if names.shared_gate:
        gate = (f"{prefix}{names.shared_gate}.weight", 1)
        yield layer.matrix("mlp.shared_experts.gate_weight", hidden, gate)
    yield from (_fused_experts(model, layer) if layout == "fused" else _experts(model, layer, names))


def _experts(model: ModelConfig, layer: LayerNames, names: MoENames) -> Iterator[WeightRule]:
    moe, hidden = model.moe, model.hidden_size
    width = moe.ffn_hidden_size
    for e in range(moe.num_experts):
        name = f"{names.prefix}experts.{e}."
        one = replace(layer, index=(*layer.index, e), lead=(*layer.lead, moe.num_experts))
        gate, up = (f"{name}{names.gate}.weight", width), (f"{name}{names.up}.weight", width)
        yield one.matrix("mlp.experts.experts.linear_fc1.weight", hidden, gate, up)
        yield one.matrix(
            "mlp.experts.experts.linear_fc2.weight", width, (f"{name}{names.down}.weight", hidden)
        )


def _fused_experts(model: ModelConfig, layer: LayerNames) -> Iterator[WeightRule]:
    """Here a row is an expert."""
    moe, hidden = model.moe, model.hidden_size
    for key, name, row in (
        ("linear_fc1", "gate_up_proj", (2 * moe.ffn_hidden_size, hidden)),
        ("linear_fc2", "down_proj", (hidden, moe.ffn_hidden_size)),
    ):
        rows = (HfRows(f"{layer.hf}mlp.experts.{name}", 0, moe.num_experts),)
        key = f"{layer.mcore}mlp.experts.experts.{key}.weight"
        yield WeightRule(key=key, rows=rows, row=row, index=layer.index, lead=layer.lead)
