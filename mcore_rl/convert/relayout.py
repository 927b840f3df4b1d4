"""The same checkpoint, with its optimizer state, under other keys."""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from mcore_rl.checkpoint.folder import COMMON, path_of_step
from mcore_rl.convert.copying.conversion import Conversion, Settings, files_identity
from mcore_rl.convert.copying.manifest import write_manifest
from mcore_rl.convert.copying.plan import Pair, Target, Task, chunks_of, one_dtype, tasks_of
from mcore_rl.convert.copying.sources import whole
from mcore_rl.convert.copying.workers import Record
from mcore_rl.convert.copying.writers import DistWriter
from mcore_rl.convert.importing import publish_checkpoint, single_rank_common
from mcore_rl.convert.megatron.files import finish, write_common, write_format, write_metadata
from mcore_rl.convert.megatron.layouts import Layout, Relaid, is_stacked, refuse_singletons
from mcore_rl.convert.megatron.model import EMBEDDING, DistModel, open_dist_model
from mcore_rl.errors import CheckpointError
from mcore_rl.families.weight_map import AxisRange, Shape, listed

EXTRA_STATE = "_extra_state"


def plan_relayout(
    source: Path, folder: Path, layout: Layout, reference: Path | None, settings: Settings
) -> Conversion:
    """A checkpoint's tensors, optimizer state and other objects to `folder/iter_<step>` under the keys of `layout`."""
    found = open_dist_model(source, reference)
    targets = list(relaid_targets(found, layout))
    if found.folder.path.resolve() == path_of_step(folder, found.folder.step).resolve():
        raise CheckpointError(f"{folder} is where the checkpoint is. Name another folder.")
    identity = files_identity(found.folder.path, sorted(found.folder.files))
    kept = [key for key in found.folder.objects if EXTRA_STATE not in key]
    return Conversion(
        title="relayout",
        final=path_of_step(folder, found.folder.step),
        targets=targets,
        tasks=tasks_of(
            (chunk for target in targets for chunk in chunks_of(target)), settings.task_bytes, "numbered"
        ),
        open_source=found.source,
        writer=DistWriter(),
        identity=f"relayout {layout} {found.folder.digest} {identity}",
        finish=partial(_finish, found, layout),
        publish=publish_checkpoint,
        notes=[
            f"{found.model.family}, step {found.folder.step}: {found.layout} -> {layout}",
            f"{len(targets)} tensors and {len(kept)} objects; {len(found.folder.objects) - len(kept)} empty or "
            "TransformerEngine's extra states are left out, as they belong to the old names",
        ],
    )


def relaid_targets(found: DistModel, layout: Layout) -> Iterator[Target]:
    """Each tensor of the checkpoint under its new key, for the weights and for each tensor that the optimizer has."""
    refuse_singletons(found.layout, found.folder.path)
    old, new = Relaid(found.model, found.layout), Relaid(found.model, layout)
    tensors = found.folder.tensors
    places = dict(_places(found.canonical.mcore_shapes, old, new))
    shapes = dict(new.shapes(found.canonical.mcore_shapes))
    names = {pair.source for pairs in places.values() for pair in pairs}
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
            f"{found.folder.path} has optimizer state that is not laid out like the weights:\n{listed(left)}\n"
            "Save it with distrib_optim_sharding_type fully_reshardable first."
        )
    for prefix in prefixes:
        for key, pairs in places.items():
            if all(prefix + pair.source in tensors for pair in pairs):
                moved = tuple(Pair(pair.into, prefix + pair.source, pair.where) for pair in pairs)
                dtype = one_dtype(prefix + key, {pair.source: tensors[pair.source].dtype for pair in moved})
                yield Target(name=prefix + key, shape=shapes[key], dtype=dtype, pairs=moved)


def _places(shapes: Mapping[str, Shape], old: Relaid, new: Relaid) -> Iterator[tuple[str, list[Pair]]]:
    """For each new key, where its layers are now."""
    found: dict[str, list[Pair]] = {}
    apart = "each" in (old.layout.layers, new.layout.layers)
    for key, shape in shapes.items():
        wheres = [whole(shape)]
        if apart and is_stacked(key):
            wheres = [(AxisRange(layer, layer + 1), *whole(shape[1:])) for layer in range(shape[0])]
        for where in wheres:
            source, source_where = old.place(key, where)
            target, target_where = new.place(key, where)
            found.setdefault(target, []).append(Pair(target_where, source, source_where))
    yield from found.items()


def _finish(
    found: DistModel, layout: Layout, folder: Path, plan: str, done: Sequence[tuple[Task, list[Record]]]
) -> None:
    source = found.source()
    objects = {
        key: source.object_bytes(saved)
        for key, saved in found.folder.objects.items()
        if EXTRA_STATE not in key
    }
    write_metadata(folder, done, objects)
    write_format(folder)
    common = found.folder.path / COMMON
    if common.is_file():
        shutil.copyfile(common, folder / COMMON)
    else:
        write_common(folder, single_rank_common(found.model, found.folder.step, {}))
    facts = {
        "kind": "relayout",
        "family": found.model.family,
        "layout": {"keys": layout.keys, "layers": layout.layers},
    }
    sources = {"metadata_sha256": found.folder.digest, "files": found.folder.files}
    write_manifest(folder, plan, facts, sources, done)
    finish(folder, found.model, found.folder.step, found.folder.marker)
