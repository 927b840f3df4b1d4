"""A Megatron checkpoint that a conversion writes: the workers' files, then metadata, common state and marker."""

import io
import json
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from mcore_rl.config.model import ModelConfig
from mcore_rl.convert.copying.content import ChunkBytes
from mcore_rl.convert.copying.conversion import RecordedTask, WrittenRange
from mcore_rl.convert.copying.plan import CopyTask
from mcore_rl.convert.megatron.layouts import KeyLayout, extra_state_keys
from mcore_rl.convert.megatron.saved_tensor import save
from mcore_rl.families.regions import sizes
from mcore_rl.families.weight_map import WeightMap
from mcore_rl.megatron.mesh import Mesh
from mcore_rl.megatron.patches.versions import megatron_version
from mcore_rl.storage.checkpoint import (
    COMMON,
    FORMAT_FILE,
    MARKER,
    METADATA,
    Marker,
    write_marker,
)
from mcore_rl.storage.checkpoints.megatron_lm import hybrid_args
from mcore_rl.storage.checkpoints.weights import common_state
from mcore_rl.storage.checkpoints.write import FORMAT
from mcore_rl.storage.files import flush_to_disk
from mcore_rl.storage.foreign.archives import FileRange, recorded_crc32
from mcore_rl.storage.foreign.pickles import load_metadata

ONE_RANK = {"tp": 1, "pp": 1, "cp": 1, "dp": 1, "ep": 1, "etp": 1, "vpp": 1}
OBJECTS = "__objects_0.distcp"
"""File of the objects that are not tensors."""


class DistWriter:
    """Writes a file per task, each chunk in the format of `torch.save`, which torch's FileSystemReader can read."""

    def prepare(self, folder: Path) -> None:
        """Do nothing: each task makes its file."""

    def write(self, folder: Path, task: CopyTask, contents: Iterator[ChunkBytes]) -> list[WrittenRange]:
        """Write a task's chunks one after another into its file."""
        ranges = []
        with io.FileIO(folder / task.file, "wb") as file:
            for content in contents:
                start = file.tell()
                save(file, content)
                ranges.append(WrittenRange(start, file.tell() - start))
        return ranges


def empty_extra_states(weights: WeightMap) -> dict[str, bytes]:
    """Return the extra states of a model without fp8, as `write_metadata` takes them.

    By default Megatron-LM demands of a checkpoint every extra state of its layers, though there is nothing in them.
    """
    file = io.BytesIO()
    # Megatron saves a list of the objects of a key.
    torch.save([None], file)
    return dict.fromkeys(extra_state_keys(weights), file.getvalue())


def write_metadata(folder: Path, done: Sequence[RecordedTask], objects: Mapping[str, bytes]) -> None:
    """Write `.metadata`, which names file and range of each chunk.

    Args:
        folder: The checkpoint so far.
        done: All tasks with their records.
        objects: Objects that are not tensors, as written by torch.save, by key; they go into a separate file.
    """
    chunks: dict[str, list[ChunkStorageMetadata]] = {}
    entries: dict[str, Any] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for task, records in done:
        for chunk, record in zip(task.chunks, records, strict=True):
            target = chunk.target
            offset = torch.Size([axis.start for axis in chunk.where])
            chunks.setdefault(target.name, []).append(
                ChunkStorageMetadata(offset, torch.Size(sizes(chunk.where)))
            )
            entries[target.name] = target
            storage[MetadataIndex(target.name, offset)] = _StorageInfo(
                task.file, record.written.offset, record.written.length
            )
    state: dict[str, Any] = {
        key: TensorStorageMetadata(
            TensorProperties(dtype=target.dtype), torch.Size(target.shape), chunks[key]
        )
        for key, target in entries.items()
    }
    if objects:
        with (folder / OBJECTS).open("wb") as file:
            for key, data in objects.items():
                state[key] = BytesStorageMetadata()
                storage[MetadataIndex(key)] = _StorageInfo(OBJECTS, file.tell(), len(data))
                file.write(data)
        flush_to_disk(folder / OBJECTS)
    with (folder / METADATA).open("wb") as file:
        pickle.dump(Metadata(state_dict_metadata=state, planner_data=None, storage_data=storage), file)
    flush_to_disk(folder / METADATA)


def write_format(folder: Path) -> None:
    """Write `metadata.json`, by which Megatron knows the format."""
    (folder / FORMAT_FILE).write_text(json.dumps(asdict(FORMAT)), encoding="utf-8")


def write_common(folder: Path, common: dict[str, Any]) -> None:
    """Write `common.pt`, which is the same for all ranks."""
    # To an open file: given a path, torch would put the file's name into the archive.
    with (folder / COMMON).open("wb") as file:
        torch.save(common, file)
    flush_to_disk(folder / COMMON)


def single_rank_common(model: ModelConfig, step: int, layout: KeyLayout) -> dict[str, Any]:
    """Return the common state that a run of one rank would write."""
    # common_state asks the mesh for sizes only, which need no process group.
    axis = SimpleNamespace(size=1)
    mesh = cast(Mesh, SimpleNamespace(tp=axis, pp=axis, dp=axis, world=axis))
    common = common_state(model, mesh, step, {})
    if layout.layers == "hybrid":
        vars(common["args"]).update(hybrid_args(model))
    return common


def write_last_file(folder: Path, model: ModelConfig, step: int, before: Marker | None = None) -> None:
    """Write the marker, with which the folder is complete.

    Args:
        folder: The checkpoint; all its other files are written.
        model: The model's config.
        step: The step that the weights are of.
        before: Marker of the checkpoint that the training state comes from; None if there are only weights.
    """
    # A marker already exists if the folder could not be renamed before, for example after comparing logits.
    files = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    names = sorted(name for name in files if name != MARKER)
    archives: dict[str, list[FileRange]] = {}
    for info in (load_metadata(folder).storage_data or {}).values():
        archives.setdefault(info.relative_path, []).append(
            FileRange(info.relative_path, info.offset, info.length)
        )
    write_marker(
        folder,
        Marker(
            step=step,
            time=datetime.now(UTC).isoformat(timespec="seconds"),
            world_size=before.world_size if before else 1,
            mesh=before.mesh if before else ONE_RANK,
            model=model.model_dump(mode="json"),
            megatron=megatron_version(),
            files={name: (folder / name).stat().st_size for name in names},
            program=before.program if before else "",
            settings=before.settings if before else {},
            inputs=before.inputs if before else {},
            numerics=before.numerics if before else 1,
            crc32={name: recorded_crc32(folder / name, archives.get(name, ())) for name in names},
        ),
    )
