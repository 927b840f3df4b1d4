"""The names that Megatron has for the same tensors: TransformerEngine's or its own, layers stacked or apart."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Literal

from mcore_rl.config.model import ModelConfig
from mcore_rl.errors import CheckpointError
from mcore_rl.families import family_of
from mcore_rl.families.weight_map import AxisRange, Region, Shape, WeightMap

Keys = Literal["te", "local"]
Layers = Literal["stacked", "each", "singletons"]
"""One tensor for all layers, a tensor a layer, or with `singleton_local_shards` a tensor an expert, gate and
up-projection apart: this last one Megatron-LM writes on request, and it is read here but not written."""

STACK = "decoder.layers."
HALVES = ("_w", "_v")
"""What Megatron calls the gate and the up-projection, where they are apart."""
EXPERTS = ".mlp.experts.experts."
FC1 = re.compile(r"\.linear_fc1\.(weight|bias)$")
MTP_LAYER = "transformer_layer."
LATENT_NORMS = {
    "self_attention.linear_q_up_proj.layer_norm_weight": "self_attention.q_layernorm.weight",
    "self_attention.linear_kv_up_proj.layer_norm_weight": "self_attention.kv_layernorm.weight",
}
DENSE_NORM, MOE_NORM = "mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"


@dataclass(frozen=True, slots=True)
class Layout:
    """How a checkpoint's keys are made."""

    keys: Keys
    layers: Layers

    def __str__(self) -> str:
        names = "TransformerEngine's names" if self.keys == "te" else "names of the local layers"
        layers = {"stacked": "layers stacked", "each": "a tensor a layer", "singletons": "a tensor an expert"}
        return f"{names}, {layers[self.layers]}"


class Relaid:
    """The keys of a model in a layout, from those of its weight map."""

    def __init__(self, model: ModelConfig, layout: Layout) -> None:
        if layout.layers == "stacked" and not model.layers_alike:
            raise CheckpointError(
                f"The layers of this {model.family} differ (model.moe.first_dense_layers="
                f"{model.moe.first_dense_layers}), so that they cannot be stacked in one tensor. Use --layers each."
            )
        self.layout = layout
        self._names = LATENT_NORMS if family_of(model).is_latent else {MOE_NORM: DENSE_NORM}
        self._dense_norm = MOE_NORM if family_of(model).is_latent else DENSE_NORM

    def weights(self, canonical: WeightMap) -> WeightMap:
        """The same pairing under this layout's keys."""
        blocks = []
        for block in canonical.blocks:
            key, where = self.place(block.mcore_key, block.mcore_where)
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
            padding=tuple(self.place(key, where) for key, where in canonical.padding),
            fp32_keys=frozenset(fp32),
        )

    def place(self, key: str, where: Region) -> tuple[str, Region]:
        """Where a rectangle of one of the weight map's tensors is; it must lie in one layer if these are apart."""
        if self.layout.layers != "stacked" and is_stacked(key):
            assert where[0].stop == where[0].start + 1, f"{key} is cut by layers"
            return self._key(key, where[0].start), where[1:]
        return self._key(key, None), where

    def shapes(self, canonical: Mapping[str, Shape]) -> Iterator[tuple[str, Shape]]:
        """Keys and shapes."""
        for key, shape in canonical.items():
            apart = self.layout.layers != "stacked" and is_stacked(key)
            for layer in range(shape[0]) if apart else (None,):
                found = self._key(key, layer), shape[1:] if apart else shape
                yield from _singles(*found) if self.layout.layers == "singletons" else (found,)

    def _layers(self, key: str, canonical: WeightMap) -> list[int | None]:
        apart = self.layout.layers != "stacked" and is_stacked(key)
        return list(range(canonical.mcore_shapes[key][0])) if apart else [None]

    def _key(self, key: str, layer: int | None) -> str:
        front, rest = _parted(key)
        if self.layout.keys == "local" and front:
            rest = self._dense_norm if rest == DENSE_NORM else self._names.get(rest, rest)
        return f"{front}{layer}.{rest}" if layer is not None else front + rest


def detect(model: ModelConfig, canonical: WeightMap, stored: Mapping[str, Shape]) -> Relaid:
    """The layout whose keys are `stored`. CheckpointError, with names, when none fits."""
    nearest: tuple[int, Relaid] | None = None
    for keys, layers in product(("te", "local"), ("stacked", "each", "singletons")):
        if layers == "stacked" and not model.layers_alike:
            continue
        relaid = Relaid(model, Layout(keys, layers))  # type: ignore[arg-type]
        wanted = dict(relaid.shapes(canonical.mcore_shapes))
        distance = len(wanted.keys() ^ stored.keys())
        if nearest is None or distance < nearest[0]:
            nearest = distance, relaid
    assert nearest is not None
    relaid = nearest[1]
    relaid.weights(canonical).check_mcore(stored)
    return relaid


def refuse_singletons(layout: Layout, path: Path) -> None:
    """CheckpointError for what is read here by an export alone."""
    if layout.layers == "singletons":
        raise CheckpointError(
            f"{path} has a tensor an expert (singleton_local_shards). Export it, and import what comes out."
        )


def native(model: ModelConfig) -> Layout:
    """The layout that our training reads and writes."""
    return Layout("te", "stacked" if model.layers_alike else "each")


def is_stacked(key: str) -> bool:
    """Whether a key holds all layers."""
    return key.startswith(STACK) and not key.removeprefix(STACK)[:1].isdigit()


def _rows_axis(key: str) -> int:
    """Of a linear layer's weight, or bias."""
    return -1 if key.endswith(".bias") else -2


def _singles(key: str, shape: Shape) -> Iterator[tuple[str, Shape]]:
    """What stands for a tensor of one layer: an expert each, halves of the first linear layer apart."""
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
    """Where a rectangle of a tensor of one layer is, which lies in one expert and in one half."""
    is_first = FC1.search(key) is not None
    if EXPERTS in key:
        assert where[0].count == 1, f"{key} is cut by experts"
        key, where = key.replace(EXPERTS, f"{EXPERTS}{where[0].start}."), where[1:]
    if is_first:
        axis, half = len(where) + _rows_axis(key), shape[_rows_axis(key)] // 2
        rows = where[axis]
        number = rows.start // half
        assert rows.stop <= (number + 1) * half, f"{key} is cut into gate and up-projection"
        inside = AxisRange(rows.start - number * half, rows.stop - number * half, rows.step)
        key, where = key + HALVES[number], (*where[:axis], inside, *where[axis + 1 :])
    return key, where


def _parted(key: str) -> tuple[str, str]:
    """The prefix of a layer, and the name within; no prefix outside of layers."""
    if is_stacked(key):
        return STACK, key.removeprefix(STACK)
    if key.startswith(STACK):
        number, _, rest = key.removeprefix(STACK).partition(".")
        return f"{STACK}{number}.", rest
    front, inner, rest = key.partition(MTP_LAYER)
    return (front + inner, rest) if inner else ("", key)
