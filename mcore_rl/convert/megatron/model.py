"""Match a Megatron checkpoint to a model family, and its keys to one of Megatron's layouts."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Literal

import torch

from mcore_rl.checks.model import checked_model_from_hf
from mcore_rl.config.extension import is_extension
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.toml import toml_value
from mcore_rl.convert.hf.model import FLOATS, MtpLayers
from mcore_rl.convert.megatron.folder import DistFolder, check_files, open_dist
from mcore_rl.convert.megatron.tensors import DistSource, MergedSource, StoredAdapter, stored_adapters, stored_lora
from mcore_rl.errors import CheckpointError
from mcore_rl.families import family_of, weight_map
from mcore_rl.families.rules import ExpertLayout
from mcore_rl.families.same_model import model_changes
from mcore_rl.families.weight_map import AxisRange, Region, Shape, WeightMap, listed
from mcore_rl.storage.checkpoint import ADAPTER, EXTRA_STATE, HYBRID_NORM
from mcore_rl.storage.folders import read_config
from mcore_rl.storage.megatron_lm import args_changes, read_args

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
        owner = "TransformerEngine's" if self.keys == "te" else "Megatron's own"
        layers = {
            "stacked": "one tensor for all",
            "each": "one tensor each",
            "singletons": "one tensor for each expert",
            "hybrid": "HybridModel's",
        }
        return f"keys {self.keys} ({owner}), layers {self.layers} ({layers[self.layers]})"


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
        shapes = canonical.mcore_shapes
        fp32 = {self._key(key, layer) for key in canonical.fp32_keys for layer in self._layers(key, shapes[key])}
        return replace(
            canonical,
            blocks=tuple(blocks),
            mcore_shapes=dict(self.shapes(shapes)),
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
            for layer in self._layers(key, shape):
                found = self._key(key, layer), shape if layer is None else shape[1:]
                yield from _singles(*found) if self.layout.layers == "singletons" else (found,)

    def _layers(self, key: str, shape: Shape) -> Sequence[int | None]:
        """Return the layers that have a tensor of their own; [None] if a single tensor has all layers."""
        return range(shape[0]) if self.layout.layers != "stacked" and is_stacked(key) else [None]

    def _key(self, key: str, layer: int | None) -> str:
        front, rest = _parted(key)
        if self.layout.keys == "local" and front:
            rest = self._dense_norm if rest == DENSE_NORM else self._names.get(rest, rest)
        if layer is not None:
            front = f"{front}{layer}."
        if self.layout.layers != "hybrid":
            return front + rest
        if not front:
            return HYBRID_NORM if rest == FINAL_NORM else rest
        # HybridModel has the attention of layer i in its layer 2i, and the MLP in its layer 2i + 1.
        hybrid_layer = 2 * int(front.removeprefix(STACK).removesuffix(".")) + (not rest.startswith(ATTENTION))
        return f"{STACK}{hybrid_layer}.{rest}"


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
    """Yield the keys of all extra states that a model may look for: one a module, and one an expert of it."""
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


def _rows_axis(key: str) -> int:
    """Return the axis of the rows of a linear layer's weight, or of its bias, counted from the end."""
    return -1 if key.endswith(".bias") else -2


def _singles(key: str, shape: Shape) -> Iterator[tuple[str, Shape]]:
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


EMBEDDING, MTP = "embedding.word_embeddings.weight", "mtp."


@dataclass(frozen=True, kw_only=True, slots=True)
class DistModel:
    """A checkpoint with exactly the tensors of `model`."""

    folder: DistFolder
    model: ModelConfig
    canonical: WeightMap
    """The weight map under the keys that training writes."""
    weights: WeightMap
    """The weight map under the checkpoint's keys."""
    layout: KeyLayout
    adapters: Mapping[str, StoredAdapter]
    merges: bool

    def dtype(self, key: str) -> torch.dtype:
        """Return the type that a tensor is stored in."""
        return self.folder.tensors[key].dtype

    def source(self) -> DistSource:
        """Open the checkpoint's tensors for reading."""
        return MergedSource(self.folder, self.adapters) if self.merges else DistSource(self.folder)


def open_dist_model(
    path: Path,
    reference: Path | None = None,
    *,
    mtp: MtpLayers = "keep",
    experts: ExpertLayout = "each",
    adapters: Literal["refuse", "merge", "apart"] = "refuse",
) -> DistModel:
    """Return the model in a checkpoint, in the newest of a folder, or of a run. `experts` is the layout of the Hugging
    Face side. Raises CheckpointError if it is damaged, or naming tensors that are not the model's, or for adapters that
    `adapters` refuses; ConfigError if the reference's config.json describes a model that cannot be represented.
    """
    folder = open_dist(path)
    check_files(folder)
    lora = stored_lora(folder)
    if lora is not None and adapters == "refuse":
        raise CheckpointError(
            f"{folder.path} has low-rank adapters beside its weights. Export them added to the weights, with "
            "`mcore-rl convert export --merge`, or alone, with `mcore-rl convert export --adapter each`."
        )
    stored = {key: tensor.shape for key, tensor in folder.weights.items() if ADAPTER not in key}
    model = _model(folder, reference, stored)
    if mtp == "drop":
        model = model.model_copy(update={"mtp_layers": 0})
        stored = {key: shape for key, shape in stored.items() if not key.startswith(MTP)}
    elif model.mtp_layers and not any(key.startswith(MTP) for key in stored):
        raise CheckpointError(
            f"{folder.path} has no MTP layers, though its model has {model.mtp_layers}. Leave them out: --mtp drop."
        )
    canonical = weight_map(model, experts)
    canonical.prove()
    translation = detect(model, canonical, stored)
    weights = translation.weights(canonical)
    weights.prove()
    odd = [f"{key} is {folder.tensors[key].dtype}" for key in stored if folder.tensors[key].dtype not in FLOATS]
    if odd:
        raise CheckpointError(f"{folder.path} has tensors that are no plain weights:\n{listed(odd)}")
    return DistModel(
        folder=folder,
        model=model,
        canonical=canonical,
        weights=weights,
        layout=translation.layout,
        adapters=stored_adapters(folder, lora, model) if lora is not None else {},
        merges=adapters == "merge",
    )


def _model(folder: DistFolder, reference: Path | None, stored: Mapping[str, Shape]) -> ModelConfig:
    own = ModelConfig.model_validate(folder.marker.model) if folder.marker else None
    if reference is None:
        if own is None:
            raise CheckpointError(
                f"{folder.path} does not name its model (it was not written by this program). Give a folder with "
                "the config.json of the same model: --reference HF_DIR."
            )
        return own
    own_family = own.family if own is not None and is_extension(own.family) else None
    described = checked_model_from_hf(read_config(reference), own_family)
    if own is not None and own.head == "score":
        # The reference of a reward model may be the language model that its training began from.
        described = described.scored
    faults = (
        disagreements(described, own)
        if own is not None
        else [
            f"{change.key} is {toml_value(change.now)} there, {toml_value(change.before)} here"
            for change in args_changes(read_args(folder.path), described)
        ]
    )
    if faults:
        raise CheckpointError(
            f"{reference} (there) and {folder.path} (here) are different models:\n{listed(faults)}\n"
            "Name the folder that the training began from"
            + (", or leave out --reference." if own is not None else ", or correct its config.json.")
        )
    if own is not None:
        return own
    # The vocabulary is padded to the stored number of rows, which is a multiple of itself.
    rows = stored.get(EMBEDDING, (0,))[0]
    if rows < described.vocab_size:
        raise CheckpointError(
            f"{folder.path}: {EMBEDDING} has {rows} rows, the reference's vocabulary {described.vocab_size}. Is the "
            "reference that of the same model?"
        )
    return described.model_copy(update={"vocab_multiple": rows})


def disagreements(there: ModelConfig, here: ModelConfig) -> list[str]:
    """Return a line for each setting with which the same weights would give other results."""
    return [str(change) for change in model_changes(there.model_dump(mode="json"), here)]
