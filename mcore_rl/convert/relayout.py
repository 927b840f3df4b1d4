"""Relayout: convert a Megatron checkpoint, with its optimizer state, to other keys."""

import shutil
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mcore_rl.convert.copying.conversion import Conversion, CopySettings, RecordedTask
from mcore_rl.convert.copying.manifest import import_behind, write_manifest
from mcore_rl.convert.copying.plan import NUMBERED, TargetTensor, common_dtype, tasks_of
from mcore_rl.convert.hf.small_files import copy_files, small_files
from mcore_rl.convert.megatron.layouts import KeyLayout, KeyTranslation, is_stacked, refuse_singletons
from mcore_rl.convert.megatron.model import EMBEDDING, DistModel, open_dist_model
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
from mcore_rl.families.regions import RegionCopy, whole
from mcore_rl.families.weight_map import AxisRange, Shape, listed
from mcore_rl.storage.checkpoint import COMMON, name_latest, path_of_step
from mcore_rl.storage.checkpoints.megatron_lm import hybrid_args, model_args
from mcore_rl.storage.checkpoints.read import EXTRA_STATE
from mcore_rl.storage.foreign.pickles import load_saved


def plan_relayout(
    source: Path, folder: Path, layout: KeyLayout, reference: Path | None, settings: CopySettings
) -> Conversion:
    """Plan to write a checkpoint to `folder/iter_<step>` under the keys of `layout`.

    Args:
        source: The checkpoint; its tensors, optimizer state and other objects are written.
        folder: Folder of the output.
        layout: The layout of the new keys.
        reference: A Hugging Face folder of the same model, for checkpoints that do not name their family.
        settings: How the conversion is run.

    Raises:
        CheckpointError: The checkpoint cannot be read, or has optimizer state that is not laid out like the weights.
    """
    dist_model = open_dist_model(source, reference)
    targets = list(_targets(dist_model, layout))
    step, objects = dist_model.folder.step, dist_model.folder.objects
    num_objects = sum(EXTRA_STATE not in key for key in objects)
    return Conversion(
        title="relayout",
        final=path_of_step(folder, step),
        sources=[
            ("the source", source),
            ("the checkpoint", dist_model.folder.path),
            *([("--reference", reference)] if reference is not None else []),
        ],
        targets=targets,
        tasks=tasks_of({NUMBERED: targets}, settings.task_bytes),
        open_source=dist_model.source,
        writer=DistWriter(),
        identity=f"relayout {layout} {dist_model.folder.digest}",
        read=dist_model.folder.stamps,
        finish=partial(_finish, dist_model, layout, _changed_common(dist_model, layout)),
        named=name_latest,
        notes=[
            f"{dist_model.model.family}, step {step}: {dist_model.layout} -> {layout}",
            f"{len(targets)} tensors and {num_objects} objects; {len(objects) - num_objects} extra states of the old "
            "names are replaced by empty ones of the new",
        ],
    )


def _targets(dist_model: DistModel, layout: KeyLayout) -> Iterator[TargetTensor]:
    """Yield each tensor under its new key: the weights, and the optimizer's tensors with the same layout."""
    folder = dist_model.folder
    refuse_singletons(dist_model.layout, folder.path)
    old = KeyTranslation(dist_model.model, dist_model.layout)
    new = KeyTranslation(dist_model.model, layout)
    tensors = folder.tensors
    copies = _copies_by_new_key(dist_model.canonical.mcore_shapes, old, new)
    shapes = dict(new.shapes(dist_model.canonical.mcore_shapes))
    names = {copy.source for group in copies.values() for copy in group}
    # The optimizer has each weight's moments under a prefix and the weight's name; the weights' prefix is "".
    prefixes = sorted({key.removesuffix(EMBEDDING) for key in tensors if key.endswith(EMBEDDING)})
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
                moved = tuple(RegionCopy(copy.into, prefix + copy.source, copy.where) for copy in group)
                dtype = common_dtype(
                    prefix + key, {copy.source: tensors[copy.source].dtype for copy in moved}
                )
                yield TargetTensor(name=prefix + key, shape=shapes[key], dtype=dtype, copies=moved)


def _copies_by_new_key(
    shapes: Mapping[str, Shape], old: KeyTranslation, new: KeyTranslation
) -> dict[str, list[RegionCopy]]:
    """Return, for each new key, the copies from old keys that fill it; `shapes` has the weight map's shapes."""
    copies: dict[str, list[RegionCopy]] = {}
    one_by_one = {old.layout.layers, new.layout.layers} != {"stacked"}
    for key, shape in shapes.items():
        regions = [whole(shape)]
        if one_by_one and is_stacked(key):
            regions = [(AxisRange(layer, layer + 1), *whole(shape[1:])) for layer in range(shape[0])]
        for region in regions:
            source, where = old.locate(key, region)
            target, into = new.locate(key, region)
            copies.setdefault(target, []).append(RegionCopy(into, source, where))
    return copies


def _finish(
    dist_model: DistModel,
    layout: KeyLayout,
    changed_common: dict[str, Any] | None,
    folder: Path,
    plan: str,
    done: Sequence[RecordedTask],
) -> None:
    """Add objects, metadata, common state, manifest and marker to the tensors' files."""
    source = dist_model.source()
    weights = KeyTranslation(dist_model.model, layout).weights(dist_model.canonical)
    objects = empty_extra_states(weights) | {
        key: source.object_bytes(key, saved)
        for key, saved in dist_model.folder.objects.items()
        if EXTRA_STATE not in key
    }
    if (dist_model.folder.path / "config.json").is_file():  # an import has the small files of its source
        copy_files(small_files(dist_model.folder.path), folder)
    write_metadata(folder, done, objects)
    write_format(folder)
    common = dist_model.folder.path / COMMON
    if changed_common is not None:
        write_common(folder, changed_common)
    elif common.is_file():
        shutil.copyfile(common, folder / COMMON)
    else:
        write_common(folder, single_rank_common(dist_model.model, dist_model.folder.step, layout))
    description = {
        "kind": "relayout",
        "family": dist_model.model.family,
        "layout": {"keys": layout.keys, "layers": layout.layers},
        "import": import_behind(dist_model.folder.path),
    }
    sources = {"metadata_sha256": dist_model.folder.digest, "files": dist_model.folder.files}
    write_manifest(folder, plan, description, sources, done)
    write_last_file(folder, dist_model.model, dist_model.folder.step, dist_model.folder.marker)


def _changed_common(dist_model: DistModel, layout: KeyLayout) -> dict[str, Any] | None:
    """Return the common state with the arguments that HybridModel's layers have, or GPTModel's; None without a change.

    CheckpointError if it has an object of a class that no state of Megatron has.
    """
    common = dist_model.folder.path / COMMON
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
