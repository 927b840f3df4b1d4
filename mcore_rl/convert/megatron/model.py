"""Match a Megatron checkpoint to a model family, by its marker or by a Hugging Face folder of the same model."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from mcore_rl.checks.model import checked_model_from_hf
from mcore_rl.config.extension import is_extension
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.toml import toml_value
from mcore_rl.convert.hf.model import FLOATS, MtpLayers
from mcore_rl.convert.megatron.adapters import MergedSource, StoredAdapter, stored_adapters, stored_lora
from mcore_rl.convert.megatron.folder import DistFolder, check_files, open_dist
from mcore_rl.convert.megatron.layouts import KeyLayout, detect
from mcore_rl.convert.megatron.source import DistSource
from mcore_rl.errors import CheckpointError
from mcore_rl.families import weight_map
from mcore_rl.families.rules import ExpertLayout
from mcore_rl.families.same_model import model_changes
from mcore_rl.families.weight_map import Shape, WeightMap, listed
from mcore_rl.storage.checkpoints.megatron_lm import args_changes, read_args
from mcore_rl.storage.checkpoints.read import ADAPTER
from mcore_rl.storage.huggingface import read_config

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
    """Low-rank adapters by the keys of their weights."""
    merges: bool
    """Whether the weights are read with the adapters added."""

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
    """Return the model in a checkpoint.

    Args:
        path: A checkpoint, a folder of them (the newest is taken) or a run's folder.
        reference: A Hugging Face folder of the same model, for checkpoints that do not name their family.
        mtp: Whether layers for multi-token prediction are kept or left out.
        experts: Whether the Hugging Face side has a tensor for each expert, or a single tensor for a layer's experts.
        adapters: Whether low-rank adapters are added to the weights as they are read, or kept apart.

    Raises:
        CheckpointError: The checkpoint is damaged, or its tensors are not the model's; each is named. Or it has
            low-rank adapters and `adapters` is "refuse".
        ConfigError: The reference's config.json describes a model that cannot be represented.
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
    odd = [
        f"{key} is {folder.tensors[key].dtype}" for key in stored if folder.tensors[key].dtype not in FLOATS
    ]
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
    """Return the model of the marker, which must be the reference's; without a marker the reference's."""
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
    if own is None:
        return described.model_copy(update={"vocab_multiple": _vocab_multiple(folder, described, stored)})
    return own


def disagreements(there: ModelConfig, here: ModelConfig) -> list[str]:
    """Return a line for each setting with which the same weights would give other results."""
    return [str(change) for change in model_changes(there.model_dump(mode="json"), here)]


def _vocab_multiple(folder: DistFolder, model: ModelConfig, stored: Mapping[str, Shape]) -> int:
    """Return a vocab_multiple that pads the vocabulary to the stored number of rows: that number itself."""
    rows = stored.get(EMBEDDING, (0,))[0]
    if rows < model.vocab_size:
        raise CheckpointError(
            f"{folder.path}: {EMBEDDING} has {rows} rows, the reference's vocabulary {model.vocab_size}. Is the "
            "reference that of the same model?"
        )
    return rows
