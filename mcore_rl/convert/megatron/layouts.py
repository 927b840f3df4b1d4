"""Keys of a checkpoint in Megatron's layouts: names of TransformerEngine's or local layers, stacked or separate."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Literal

from mcore_rl.config.model import ModelConfig
from mcore_rl.errors import CheckpointError
from mcore_rl.families import family_of
from mcore_rl.families.weight_map import AxisRange, Region, Shape, WeightMap, listed
from mcore_rl.storage.checkpoints.read import EXTRA_STATE, HYBRID_NORM

KeyNames = Literal["te", "local"]
"""Names of TransformerEngine's layers, or of Megatron's local layers."""
LayerGrouping = Literal["stacked", "each", "singletons", "hybrid"]
"""A single tensor for all layers; a tensor for each layer; a tensor for each expert, with separate gate and
up-projection, which Megatron-LM writes with `singleton_local_shards` and this package reads but does not write; or a
tensor for each layer of Megatron's HybridModel, which counts attention and MLP of a layer as two."""

STACK = "decoder.layers."
STATEFUL = re.compile(r"(linear_\w+|\w*norm|eh_proj|(in|out)_proj)$")
"""Names of modules that have an extra state if TransformerEngine builds them, besides the attention's core."""
HALVES = ("_w", "_v")
"""Suffixes of gate and up-projection if they are separate."""
EXPERTS = ".mlp.experts.experts."
FC1 = re.compile(r"\.linear_fc1\.(weight|bias)$")
ATTENTION_OUTPUT = "linear_proj"
MTP_LAYER = "transformer_layer."
LATENT_NORMS = {
    "self_attention.linear_q_up_proj.layer_norm_weight": "self_attention.q_layernorm.weight",
    "self_attention.linear_kv_up_proj.layer_norm_weight": "self_attention.kv_layernorm.weight",
}
FINAL_NORM = "decoder.final_layernorm.weight"
ATTENTION = "self_attention."
"""Beginning of the names of a layer's tensors that HybridModel has in its attention layer; all others are the MLP's."""
DENSE_NORM, MOE_NORM = "mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"


@dataclass(frozen=True, slots=True)
class KeyLayout:
    """The style of a checkpoint's keys."""

    keys: KeyNames
    layers: LayerGrouping

    def __str__(self) -> str:
        names = "TransformerEngine's names" if self.keys == "te" else "names of the local layers"
        layers = {
            "stacked": "layers stacked",
            "each": "a tensor a layer",
            "singletons": "a tensor an expert",
            "hybrid": "layers of HybridModel",
        }
        return f"{names}, {layers[self.layers]}"


class KeyTranslation:
    """Translates the keys of a model's weight map to a layout's."""

    def __init__(self, model: ModelConfig, layout: KeyLayout) -> None:
        if layout.layers == "stacked" and not model.layers_alike:
            raise CheckpointError(
                f"The layers of this {model.family} differ (model.moe.first_dense_layers="
                f"{model.moe.first_dense_layers}, model.delta.full_every={model.delta.full_every}, "
                f"model.indexer.top_k={model.indexer.top_k}), so that "
                "they cannot be stacked in one tensor. Use --layers each."
            )
        if layout.layers == "hybrid" and (parts := list(_parts_without_hybrid_layout(model))):
            raise CheckpointError(
                f"This {model.family} has parts of which no layout of Megatron's HybridModel is known:\n"
                f"{listed(parts)}\n"
                "Such models have the layers of GPTModel only: --layers stacked or each."
            )
        self.layout = layout
        # Local layers do not fuse a norm into the following linear layer, so some norms have names of their own.
        self._names = LATENT_NORMS if family_of(model).is_latent else {MOE_NORM: DENSE_NORM}
        self._dense_norm = MOE_NORM if family_of(model).is_latent else DENSE_NORM

    def weights(self, canonical: WeightMap) -> WeightMap:
        """Return the same weight map under this layout's keys."""
        blocks = []
        for block in canonical.blocks:
            key, where = self.locate(block.mcore_key, block.mcore_where)
            if self.layout.layers == "singletons":
                key, where = _single(key, where, canonical.mcore_shapes[block.mcore_key])
            blocks.append(replace(block, mcore_key=key, mcore_where=where))
        fp32 = {
            self._key(key, layer) for key in canonical.fp32_keys for layer in self._layers(key, canonical)
        }
        return replace(
            canonical,
            blocks=tuple(blocks),
            mcore_shapes=dict(self.shapes(canonical.mcore_shapes)),
            padding=tuple(self.locate(key, where) for key, where in canonical.padding),
            fp32_keys=frozenset(fp32),
        )

    def locate(self, key: str, where: Region) -> tuple[str, Region]:
        """Return key and region for a region of the weight map; it must be within one layer if layers are separate."""
        if self.layout.layers != "stacked" and is_stacked(key):
            assert where[0].stop == where[0].start + 1, f"{key} is cut by layers"
            return self._key(key, where[0].start), where[1:]
        return self._key(key, None), where

    def shapes(self, canonical: Mapping[str, Shape]) -> Iterator[tuple[str, Shape]]:
        """Yield the keys and shapes of this layout, from the weight map's."""
        for key, shape in canonical.items():
            apart = self.layout.layers != "stacked" and is_stacked(key)
            for layer in range(shape[0]) if apart else (None,):
                found = self._key(key, layer), shape[1:] if apart else shape
                yield from _singles(*found) if self.layout.layers == "singletons" else (found,)

    def _layers(self, key: str, canonical: WeightMap) -> list[int | None]:
        """Return the layers that have a tensor of their own; [None] if a single tensor has all layers."""
        apart = self.layout.layers != "stacked" and is_stacked(key)
        return list(range(canonical.mcore_shapes[key][0])) if apart else [None]

    def _key(self, key: str, layer: int | None) -> str:
        """Return the name of a layer's tensor, or with None of the tensor of all layers."""
        front, rest = _parted(key)
        if self.layout.keys == "local" and front:
            rest = self._dense_norm if rest == DENSE_NORM else self._names.get(rest, rest)
        if layer is not None:
            front = f"{front}{layer}."
        return _in_hybrid(front, rest) if self.layout.layers == "hybrid" else front + rest


def detect(model: ModelConfig, canonical: WeightMap, stored: Mapping[str, Shape]) -> KeyTranslation:
    """Return the translation with the keys `stored`. Raises CheckpointError, with names, if no layout fits."""
    nearest: tuple[int, KeyTranslation] | None = None
    groupings = ("hybrid",) if HYBRID_NORM in stored else ("stacked", "each", "singletons")
    for keys, layers in product(("te", "local"), groupings):
        if layers == "stacked" and not model.layers_alike:
            continue
        translation = KeyTranslation(model, KeyLayout(keys, layers))  # type: ignore[arg-type]
        wanted = dict(translation.shapes(canonical.mcore_shapes))
        distance = len(wanted.keys() ^ stored.keys())
        if nearest is None or distance < nearest[0]:
            nearest = distance, translation
    assert nearest is not None
    # Report the layout with the fewest differing names: its differences help the user most.
    translation = nearest[1]
    translation.weights(canonical).check_mcore(stored)
    return translation


def refuse_singletons(layout: KeyLayout, path: Path) -> None:
    """Raise a CheckpointError for a layout that only an export reads."""
    if layout.layers == "singletons":
        raise CheckpointError(
            f"{path} has a tensor an expert (singleton_local_shards). Export it, and import what comes out."
        )


def native_layout(model: ModelConfig) -> KeyLayout:
    """Return the layout that training reads and writes."""
    return KeyLayout("te", "stacked" if model.layers_alike else "each")


def extra_state_keys(weights: WeightMap) -> Iterator[str]:
    """Yield the keys of all extra states that a model of TransformerEngine's or local layers may look for.

    Each module of a layer has an extra state, and modules of experts have an extra state for each expert. `weights` is
    the map under the layout's keys.
    """
    modules: dict[str, Shape] = {}
    for key, shape in weights.mcore_shapes.items():
        module = key.rpartition(".")[0]
        sizes = shape[: is_stacked(key) + (EXPERTS in key)] or (1,)
        if STATEFUL.search(module):
            modules[module] = sizes
        if module.endswith(ATTENTION_OUTPUT):
            modules[module.removesuffix(ATTENTION_OUTPUT) + "core_attention"] = sizes
    if HYBRID_NORM in weights.mcore_shapes:
        # GPTModel leaves out this state, which is always empty; HybridModel has it even where the output is tied.
        modules["output_layer"] = (1,)
    for module, sizes in modules.items():
        total = ".".join(map(str, sizes))
        for index in product(*map(range, sizes)):
            # The key that Megatron gives an object that is sharded like a tensor: its index, then the sizes.
            yield f"{module}.{EXTRA_STATE}/shard_{'.'.join(map(str, index))}_{total}"


def is_stacked(key: str) -> bool:
    """Return whether the tensor of a key holds all layers."""
    return key.startswith(STACK) and not key.removeprefix(STACK)[:1].isdigit()


def _parts_without_hybrid_layout(model: ModelConfig) -> Iterator[str]:
    """Yield the parts of a model that the HybridModel of megatron-core 0.19 lacks, or stores in another way."""
    family = family_of(model)
    if family.is_latent:
        yield "latent attention: its layer of HybridModel has no norms of the latents"
    if "delta" in model.mixers:
        yield "gated delta nets: no checkpoint of a HybridModel with them has been compared"
    if family.has_full_qk_norm:
        yield "norms of queries and keys over all heads: Megatron's attention norms each head"
    if model.sliding_window is not None:
        yield "windows in every second layer, which HybridModel counts otherwise"
    if model.rope.scaling == "llama3":
        yield 'model.rope.scaling="llama3": HybridModel has no argument for it'
    if model.mtp_layers:
        yield "MTP layers, which HybridModel makes of a pattern of their own; --mtp drop leaves them out"
    if model.head == "score":
        yield "a scalar head: HybridModel has logits only"


def _in_hybrid(front: str, rest: str) -> str:
    """Return HybridModel's name of a tensor: attention of layer i is in its layer 2i, the MLP in its layer 2i + 1."""
    if not front:
        return HYBRID_NORM if rest == FINAL_NORM else rest
    layer = int(front.removeprefix(STACK).removesuffix("."))
    return f"{STACK}{2 * layer + (not rest.startswith(ATTENTION))}.{rest}"


def _rows_axis(key: str) -> int:
    """Return the axis of the rows of a linear layer's weight, or of its bias, counted from the end."""
    return -1 if key.endswith(".bias") else -2


def _singles(key: str, shape: Shape) -> Iterator[tuple[str, Shape]]:
    """Yield the tensors that replace a layer's tensor: per expert, and with gate and up-projection separate."""
    names = [key]
    if EXPERTS in key:
        names = [key.replace(EXPERTS, f"{EXPERTS}{expert}.") for expert in range(shape[0])]
        shape = shape[1:]
    if FC1.search(key):
        axis = len(shape) + _rows_axis(key)
        shape = (*shape[:axis], shape[axis] // 2, *shape[axis + 1 :])
        names = [name + half for name in names for half in HALVES]
    yield from ((name, shape) for name in names)


def _single(key: str, where: Region, shape: Shape) -> tuple[str, Region]:
    """Return key and region for a region of a layer's tensor; it must be within one expert and one projection."""
    is_first = FC1.search(key) is not None
    if EXPERTS in key:
        assert where[0].count == 1, f"{key} is cut by experts"
        key, where = key.replace(EXPERTS, f"{EXPERTS}{where[0].start}."), where[1:]
    if is_first:
        axis, half = len(where) + _rows_axis(key), shape[_rows_axis(key)] // 2
        rows = where[axis]
        index = rows.start // half
        assert rows.stop <= (index + 1) * half, f"{key} is cut into gate and up-projection"
        inside = AxisRange(rows.start - index * half, rows.stop - index * half, rows.step)
        key, where = key + HALVES[index], (*where[:axis], inside, *where[axis + 1 :])
    return key, where


def _parted(key: str) -> tuple[str, str]:
    """Return the prefix of a layer, and the name in the layer; the prefix is empty outside of layers."""
    if is_stacked(key):
        return STACK, key.removeprefix(STACK)
    if key.startswith(STACK):
        layer, _, rest = key.removeprefix(STACK).partition(".")
        return f"{STACK}{layer}.", rest
    front, inner, rest = key.partition(MTP_LAYER)
    return (front + inner, rest) if inner else ("", key)
