"""Import: convert a Hugging Face folder to a Megatron checkpoint. Relayout: convert a checkpoint to other keys."""

import importlib
import io
import json
import pickle
import shutil
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mcore_rl.config.model import ModelConfig
from mcore_rl.convert.copying import conversion
from mcore_rl.convert.copying import tensors as copying
from mcore_rl.convert.hf.folder import copy_files, small_files
from mcore_rl.convert.hf.model import HfModel, MtpLayers, check_copies, open_hf_model, source_checksums
from mcore_rl.convert.megatron import model as megatron_model
from mcore_rl.convert.megatron.tensors import save
from mcore_rl.errors import CheckpointError
from mcore_rl.families.weight_map import (
    AxisRange,
    Copies,
    RegionCopy,
    Shape,
    WeightMap,
    copies_into_megatron,
    listed,
    sizes,
    whole,
)
from mcore_rl.storage import checkpoint
from mcore_rl.storage.archives import FileRange, recorded_crc32
from mcore_rl.storage.files import flush_to_disk, sizes_and_times
from mcore_rl.storage.foreign import TORCHS, load_metadata, load_saved
from mcore_rl.storage.megatron_lm import common_state, hybrid_args, model_args

ONE_RANK = {"tp": 1, "pp": 1, "cp": 1, "dp": 1, "ep": 1, "etp": 1, "vpp": 1}
FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
OBJECTS = "__objects_0.distcp"


class DistWriter:
    """Writes a file per task, each chunk in the format of `torch.save`, which torch's FileSystemReader can read."""

    def prepare(self, folder: Path) -> None:
        """Do nothing: each task makes its file."""

    def write(
        self, folder: Path, task: copying.CopyTask, contents: Iterator[copying.ChunkBytes]
    ) -> list[conversion.WrittenRange]:
        """Write a task's chunks one after another into its file."""
        ranges = []
        with io.FileIO(folder / task.file, "wb") as file:
            for content in contents:
                start = file.tell()
                save(file, content)
                ranges.append(conversion.WrittenRange(start, file.tell() - start))
        return ranges


def empty_extra_states(weights: WeightMap) -> dict[str, bytes]:
    """Return the extra states of a model without fp8, which Megatron-LM demands of a checkpoint by default."""
    file = io.BytesIO()
    # Megatron saves a list of the objects of a key.
    torch.save([None], file)
    return dict.fromkeys(megatron_model.extra_state_keys(weights), file.getvalue())


def write_metadata(folder: Path, done: Sequence[conversion.RecordedTask], objects: Mapping[str, bytes]) -> None:
    """Write `.metadata`, which names file and range of each chunk, and a file of `objects` (by torch.save)."""
    # Imported last: it takes a second, in which the first bytes are copied.
    filesystem, torchs = (importlib.import_module(f"{TORCHS}.{name}") for name in ("filesystem", "metadata"))
    chunks: dict[str, list[Any]] = {}
    entries: dict[str, Any] = {}
    storage: dict[Any, Any] = {}
    for task, records in done:
        for chunk, record in zip(task.chunks, records, strict=True):
            target = chunk.target
            offset = torch.Size([axis.start for axis in chunk.where])
            chunks.setdefault(target.name, []).append(
                torchs.ChunkStorageMetadata(offset, torch.Size(sizes(chunk.where)))
            )
            entries[target.name] = target
            storage[torchs.MetadataIndex(target.name, offset)] = filesystem._StorageInfo(
                task.file, record.written.offset, record.written.length
            )
    state: dict[str, Any] = {
        key: torchs.TensorStorageMetadata(
            torchs.TensorProperties(dtype=target.dtype), torch.Size(target.shape), chunks[key]
        )
        for key, target in entries.items()
    }
    if objects:
        with (folder / OBJECTS).open("wb") as file:
            for key, data in objects.items():
                state[key] = torchs.BytesStorageMetadata()
                storage[torchs.MetadataIndex(key)] = filesystem._StorageInfo(OBJECTS, file.tell(), len(data))
                file.write(data)
        flush_to_disk(folder / OBJECTS)
    with (folder / checkpoint.METADATA).open("wb") as file:
        pickle.dump(torchs.Metadata(state_dict_metadata=state, planner_data=None, storage_data=storage), file)
    flush_to_disk(folder / checkpoint.METADATA)


def write_common(folder: Path, common: dict[str, Any]) -> None:
    """Write `common.pt`, which is the same for all ranks."""
    # To an open file: given a path, torch would put the file's name into the archive.
    with (folder / checkpoint.COMMON).open("wb") as file:
        torch.save(common, file)
    flush_to_disk(folder / checkpoint.COMMON)


def single_rank_common(model: ModelConfig, step: int, layout: megatron_model.KeyLayout) -> dict[str, Any]:
    """Return the common state that a run of one rank would write."""
    common = common_state(model, ONE_RANK, 1, step, {})
    if layout.layers == "hybrid":
        vars(common["args"]).update(hybrid_args(model))
    return common


def write_last_file(folder: Path, model: ModelConfig, step: int, before: checkpoint.Marker | None = None) -> None:
    """Write the marker, which completes the folder; `before` is that of the training state, if any."""
    # A marker already exists if the folder could not be renamed before, for example after comparing logits.
    files = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    names = sorted(name for name in files if name != checkpoint.MARKER)
    archives: dict[str, list[FileRange]] = {}
    for info in (load_metadata(folder).storage_data or {}).values():
        archives.setdefault(info.relative_path, []).append(FileRange(info.relative_path, info.offset, info.length))
    checkpoint.write_marker(
        folder,
        checkpoint.Marker(
            step=step,
            time=datetime.now(UTC).isoformat(timespec="seconds"),
            world_size=before.world_size if before else 1,
            mesh=before.mesh if before else ONE_RANK,
            model=model.model_dump(mode="json"),
            megatron=checkpoint.megatron_version(),
            files={name: (folder / name).stat().st_size for name in names},
            program=before.program if before else "",
            settings=before.settings if before else {},
            inputs=before.inputs if before else {},
            numerics=before.numerics if before else 1,
            crc32={name: recorded_crc32(folder / name, archives.get(name, ())) for name in names},
        ),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportOptions:
    """User options for the output of an import."""

    dtype: copying.OutputDtype = "keep"
    """Type of the weights; expert biases stay fp32."""
    mtp: MtpLayers = "keep"
    keys: megatron_model.KeyNames = "te"
    layers: megatron_model.LayerGrouping | None = None
    """Grouping of layers in keys; None for the grouping that training reads and writes."""
    vocab_multiple: int | None = None
    """The vocabulary is padded to a multiple of this; None for the default of model.vocab_multiple."""
    family: str | None = None
    """A family of the user's own, as `module:name`; None for the family that config.json names."""


def plan_import(
    source: Path, folder: Path, options: ImportOptions, settings: conversion.CopySettings
) -> conversion.Conversion:
    """Plan an import to `folder/iter_0000000`; CheckpointError or ConfigError for all that headers show."""
    hf_model = open_hf_model(source, mtp=options.mtp, vocab_multiple=options.vocab_multiple, family=options.family)
    layout = megatron_model.KeyLayout(
        options.keys, options.layers or megatron_model.native_layout(hf_model.model).layers
    )
    weights = megatron_model.KeyTranslation(hf_model.model, layout).weights(hf_model.weights)
    weights.prove()
    check_copies(hf_model)
    targets = import_targets(hf_model, weights, options.dtype)
    copied = small_files(hf_model.folder.path)
    notes = [f"{hf_model.model.family}: {len(hf_model.weights.hf_shapes)} tensors, {layout}"]
    if hf_model.dropped:
        notes.append(f"left out because of --mtp drop: {len(hf_model.dropped)} tensors of MTP layers")
    if hf_model.passing:
        beginnings = ", ".join(sorted({".".join(name.split(".")[:2]) + ".*" for name in hf_model.passing}))
        notes.append(
            f"{len(hf_model.passing)} tensors are not of the text model ({beginnings}): an export copies them from "
            "--reference"
        )
    if later := [path.name for path in checkpoint.checkpoints_in(folder) if checkpoint.step_of(path)]:
        raise CheckpointError(
            f"{folder} has checkpoints of later steps ({later[-1]}), which whoever loads it would get instead of the "
            "import. Name another folder."
        )
    return conversion.Conversion(
        title="import",
        final=checkpoint.path_of_step(folder, 0),
        sources=[("the source", source)],
        targets=targets,
        tasks=copying.tasks_of({copying.NUMBERED: targets}, settings.task_bytes),
        open_source=hf_model.source,
        writer=DistWriter(),
        identity=f"import {options} {hf_model.model}",
        read=hf_model.folder.stamps | sizes_and_times(copied.values()),
        finish=partial(_finish_import, hf_model, layout, weights, copied),
        named=checkpoint.name_latest,
        notes=notes,
    )


def import_targets(hf_model: HfModel, weights: WeightMap, dtype: copying.OutputDtype) -> list[copying.TargetTensor]:
    """Return Megatron's tensors of `weights`, in the order of the family's rules."""
    copies = copies_into_megatron(weights.blocks)
    return [
        copying.TargetTensor(
            name=key,
            shape=shape,
            dtype=copying.output_dtype(
                key, copies.get(key, ()), dtype, hf_model.dtype, is_fp32=key in weights.fp32_keys
            ),
            copies=copies.get(key, Copies()),
        )
        for key, shape in weights.mcore_shapes.items()
    ]


def _finish_import(
    hf_model: HfModel,
    layout: megatron_model.KeyLayout,
    weights: WeightMap,
    copied: dict[str, Path],
    folder: Path,
    plan: str,
    done: Sequence[conversion.RecordedTask],
) -> None:
    copy_files(copied, folder)
    write_metadata(folder, done, empty_extra_states(weights))
    (folder / checkpoint.FORMAT_FILE).write_text(json.dumps(FORMAT), encoding="utf-8")
    write_common(folder, single_rank_common(hf_model.model, 0, layout))
    description = {
        "kind": "import",
        "family": hf_model.model.family,
        "layout": {"keys": layout.keys, "layers": layout.layers},
        "left_out": [*hf_model.dropped, *hf_model.passing],
    }
    conversion.write_manifest(folder, plan, description, source_checksums(hf_model.folder, done), done)
    write_last_file(folder, hf_model.model, 0)


def plan_relayout(
    source: Path,
    folder: Path,
    layout: megatron_model.KeyLayout,
    reference: Path | None,
    settings: conversion.CopySettings,
) -> conversion.Conversion:
    """Plan to write a checkpoint, with its optimizer state, to `folder/iter_<step>` under the keys of `layout`. Raises
    CheckpointError if it cannot be read, or its optimizer state is not laid out like the weights.
    """
    dist_model = megatron_model.open_dist_model(source, reference)
    targets = list(_targets(dist_model, layout))
    step, objects = dist_model.folder.step, dist_model.folder.objects
    num_objects = sum(checkpoint.EXTRA_STATE not in key for key in objects)
    return conversion.Conversion(
        title="relayout",
        final=checkpoint.path_of_step(folder, step),
        sources=[
            ("the source", source),
            ("the checkpoint", dist_model.folder.path),
            *([("--reference", reference)] if reference is not None else []),
        ],
        targets=targets,
        tasks=copying.tasks_of({copying.NUMBERED: targets}, settings.task_bytes),
        open_source=dist_model.source,
        writer=DistWriter(),
        identity=f"relayout {layout} {dist_model.folder.digest}",
        read=dist_model.folder.stamps,
        finish=partial(_finish_relayout, dist_model, layout, _changed_common(dist_model, layout)),
        named=checkpoint.name_latest,
        notes=[
            f"{dist_model.model.family}, step {step}: {dist_model.layout} -> {layout}",
            f"{len(targets)} tensors and {num_objects} objects; {len(objects) - num_objects} extra states of the old "
            "names are replaced by empty ones of the new",
        ],
    )


def _targets(dist_model: megatron_model.DistModel, layout: megatron_model.KeyLayout) -> Iterator[copying.TargetTensor]:
    folder = dist_model.folder
    megatron_model.refuse_singletons(dist_model.layout, folder.path)
    old = megatron_model.KeyTranslation(dist_model.model, dist_model.layout)
    new = megatron_model.KeyTranslation(dist_model.model, layout)
    tensors = folder.tensors
    copies = _copies_by_new_key(dist_model.canonical.mcore_shapes, old, new)
    shapes = dict(new.shapes(dist_model.canonical.mcore_shapes))
    names = {copy.source for group in copies.values() for copy in group}
    # The optimizer has each weight's moments under a prefix and the weight's name; the weights' prefix is "".
    prefixes = sorted(
        {key.removesuffix(megatron_model.EMBEDDING) for key in tensors if key.endswith(megatron_model.EMBEDDING)}
    )
    known = {prefix + name for prefix in prefixes for name in names}
    left = [f"{key} {tensors[key].shape}" for key in tensors if key not in known]
    left += [
        f"{prefix}{name} {tensors[prefix + name].shape} instead of {tensors[name].shape}"
        for prefix in prefixes
        for name in sorted(names)
        if prefix + name in tensors and tensors[prefix + name].shape != tensors[name].shape
    ]
    if left:
        raise CheckpointError(
            f"{folder.path} has optimizer state that is not laid out like the weights:\n{listed(left)}\n"
            "Save it with distrib_optim_sharding_type fully_reshardable first."
        )
    for prefix in prefixes:
        for key, group in copies.items():
            # Buffers, such as expert biases, have no moments.
            if all(prefix + copy.source in tensors for copy in group):
                moved = Copies(RegionCopy(copy.into, prefix + copy.source, copy.where) for copy in group)
                dtype = copying.common_dtype(prefix + key, {copy.source: tensors[copy.source].dtype for copy in moved})
                yield copying.TargetTensor(name=prefix + key, shape=shapes[key], dtype=dtype, copies=moved)


def _copies_by_new_key(
    shapes: Mapping[str, Shape], old: megatron_model.KeyTranslation, new: megatron_model.KeyTranslation
) -> dict[str, list[RegionCopy]]:
    copies: dict[str, list[RegionCopy]] = {}
    one_by_one = {old.layout.layers, new.layout.layers} != {"stacked"}
    for key, shape in shapes.items():
        regions = [whole(shape)]
        if one_by_one and megatron_model.is_stacked(key):
            regions = [(AxisRange(layer, layer + 1), *whole(shape[1:])) for layer in range(shape[0])]
        for region in regions:
            source, where = old.locate(key, region)
            target, into = new.locate(key, region)
            copies.setdefault(target, []).append(RegionCopy(into, source, where))
    return copies


def _finish_relayout(
    dist_model: megatron_model.DistModel,
    layout: megatron_model.KeyLayout,
    changed_common: dict[str, Any] | None,
    folder: Path,
    plan: str,
    done: Sequence[conversion.RecordedTask],
) -> None:
    source = dist_model.source()
    weights = megatron_model.KeyTranslation(dist_model.model, layout).weights(dist_model.canonical)
    objects = empty_extra_states(weights) | {
        key: source.object_bytes(key, saved)
        for key, saved in dist_model.folder.objects.items()
        if checkpoint.EXTRA_STATE not in key
    }
    if (dist_model.folder.path / "config.json").is_file():  # an import has the small files of its source
        copy_files(small_files(dist_model.folder.path), folder)
    write_metadata(folder, done, objects)
    (folder / checkpoint.FORMAT_FILE).write_text(json.dumps(FORMAT), encoding="utf-8")
    common = dist_model.folder.path / checkpoint.COMMON
    if changed_common is not None:
        write_common(folder, changed_common)
    elif common.is_file():
        shutil.copyfile(common, folder / checkpoint.COMMON)
    else:
        write_common(folder, single_rank_common(dist_model.model, dist_model.folder.step, layout))
    description = {
        "kind": "relayout",
        "family": dist_model.model.family,
        "layout": {"keys": layout.keys, "layers": layout.layers},
        "import": conversion.import_behind(dist_model.folder.path),
    }
    conversion.write_manifest(folder, plan, description, dist_model.folder.described, done)
    write_last_file(folder, dist_model.model, dist_model.folder.step, dist_model.folder.marker)


def _changed_common(dist_model: megatron_model.DistModel, layout: megatron_model.KeyLayout) -> dict[str, Any] | None:
    common = dist_model.folder.path / checkpoint.COMMON
    if (dist_model.layout.layers == "hybrid") == (layout.layers == "hybrid") or not common.is_file():
        return None
    arguments = hybrid_args(dist_model.model)
    if layout.layers != "hybrid":
        native = model_args(dist_model.model)
        arguments = {name: getattr(native, name, None) for name in arguments}
    changed: dict[str, Any] = load_saved(common.read_bytes(), str(common))
    if isinstance(changed.get("args"), Namespace):
        vars(changed["args"]).update(arguments)
    return changed
