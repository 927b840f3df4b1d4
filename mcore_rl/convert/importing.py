"""Import: convert a Hugging Face folder to a Megatron checkpoint."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from mcore_rl.convert.copying.conversion import Conversion, CopySettings, RecordedTask
from mcore_rl.convert.copying.manifest import write_manifest
from mcore_rl.convert.copying.plan import NUMBERED, TargetTensor, common_dtype, tasks_of
from mcore_rl.convert.hf.model import HfModel, MtpLayers, check_copies, open_hf_model
from mcore_rl.convert.hf.small_files import copy_files, small_files
from mcore_rl.convert.hf.source import source_checksums
from mcore_rl.convert.megatron.layouts import (
    KeyLayout,
    KeyNames,
    KeyTranslation,
    LayerGrouping,
    native_layout,
)
from mcore_rl.convert.megatron.writer import (
    DistWriter,
    empty_extra_states,
    single_rank_common,
    write_common,
    write_format,
    write_last_file,
    write_metadata,
)
from mcore_rl.errors import CheckpointError
from mcore_rl.families.regions import RegionCopy, copies_into_megatron
from mcore_rl.families.weight_map import WeightMap
from mcore_rl.storage.checkpoint import checkpoints_in, name_latest, path_of_step, step_of
from mcore_rl.storage.files import sizes_and_times

OutputDtype = Literal["keep", "bf16", "fp32"]
OUTPUT_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportOptions:
    """User options for the output of an import."""

    dtype: OutputDtype = "keep"
    """Type of the weights; expert biases stay fp32."""
    mtp: MtpLayers = "keep"
    """Whether layers for multi-token prediction are kept or left out."""
    keys: KeyNames = "te"
    """Names of the keys."""
    layers: LayerGrouping | None = None
    """Grouping of layers in keys; None for the grouping that training reads and writes."""
    vocab_multiple: int | None = None
    """The vocabulary is padded to a multiple of this; None for the default of model.vocab_multiple."""
    family: str | None = None
    """A family of the user's own, as `module:name`; None for the family that config.json names."""


def plan_import(source: Path, folder: Path, options: ImportOptions, settings: CopySettings) -> Conversion:
    """Plan the import of the Hugging Face folder `source` to `folder/iter_0000000`.

    All errors that can be found from headers are raised at this point (CheckpointError or ConfigError, with names).
    """
    hf_model = open_hf_model(
        source, mtp=options.mtp, vocab_multiple=options.vocab_multiple, family=options.family
    )
    layout = KeyLayout(options.keys, options.layers or native_layout(hf_model.model).layers)
    weights = KeyTranslation(hf_model.model, layout).weights(hf_model.weights)
    weights.prove()
    check_copies(hf_model)
    targets = import_targets(hf_model, weights, options.dtype)
    copied = small_files(hf_model.folder.path)
    notes = [f"{hf_model.model.family}: {len(hf_model.weights.hf_shapes)} tensors, {layout}"]
    if hf_model.dropped:
        notes.append(f"left out because of --mtp drop: {len(hf_model.dropped)} tensors of MTP layers")
    if hf_model.passing:
        notes.append(
            f"{len(hf_model.passing)} tensors are not of the text model ({listed_beginnings(hf_model.passing)}): an "
            "export copies them from --reference"
        )
    if later := [path.name for path in checkpoints_in(folder) if step_of(path)]:
        raise CheckpointError(
            f"{folder} has checkpoints of later steps ({later[-1]}), which whoever loads it would get instead of the "
            "import. Name another folder."
        )
    return Conversion(
        title="import",
        final=path_of_step(folder, 0),
        sources=[("the source", source)],
        targets=targets,
        tasks=tasks_of({NUMBERED: targets}, settings.task_bytes),
        open_source=hf_model.source,
        writer=DistWriter(),
        identity=f"import {options} {hf_model.model}",
        read=hf_model.folder.stamps | sizes_and_times(copied.values()),
        finish=partial(_finish, hf_model, layout, weights, copied),
        named=name_latest,
        notes=notes,
    )


def listed_beginnings(names: Sequence[str]) -> str:
    """Return the distinct first two parts of the names, for a message."""
    return ", ".join(sorted({".".join(name.split(".")[:2]) + ".*" for name in names}))


def import_targets(hf_model: HfModel, weights: WeightMap, dtype: OutputDtype) -> list[TargetTensor]:
    """Return Megatron's tensors of `weights`, in the order of the family's rules."""
    copies = copies_into_megatron(weights.blocks)
    return [
        TargetTensor(
            name=key,
            shape=shape,
            dtype=_dtype(hf_model, weights, key, copies.get(key, ()), dtype),
            copies=tuple(copies.get(key, ())),
        )
        for key, shape in weights.mcore_shapes.items()
    ]


def _dtype(
    hf_model: HfModel, weights: WeightMap, key: str, copies: Sequence[RegionCopy], dtype: OutputDtype
) -> torch.dtype:
    """Return a Megatron tensor's type: fp32 if Megatron requires it, else the user's choice or its sources' type."""
    if key in weights.fp32_keys:
        return torch.float32
    if dtype != "keep":
        return OUTPUT_DTYPES[dtype]
    return common_dtype(key, {copy.source: hf_model.dtype(copy.source) for copy in copies})


def _finish(
    hf_model: HfModel,
    layout: KeyLayout,
    weights: WeightMap,
    copied: dict[str, Path],
    folder: Path,
    plan: str,
    done: Sequence[RecordedTask],
) -> None:
    """Add metadata, empty extra states, common state, the source's small files, manifest and marker to the tensors."""
    copy_files(copied, folder)
    write_metadata(folder, done, empty_extra_states(weights))
    write_format(folder)
    write_common(folder, single_rank_common(hf_model.model, 0, layout))
    description = {
        "kind": "import",
        "family": hf_model.model.family,
        "layout": {"keys": layout.keys, "layers": layout.layers},
        "left_out": [*hf_model.dropped, *hf_model.passing],
    }
    write_manifest(folder, plan, description, source_checksums(hf_model.folder, done), done)
    write_last_file(folder, hf_model.model, 0)
