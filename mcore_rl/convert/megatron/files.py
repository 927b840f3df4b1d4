"""What makes a Megatron checkpoint of the files that the workers wrote: metadata, common state, marker."""

import json
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

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

from mcore_rl.backend.patches.table import megatron_version
from mcore_rl.checkpoint.folder import COMMON, METADATA, Marker, crc32_of, write_marker
from mcore_rl.checkpoint.write import FORMAT
from mcore_rl.config.model import ModelConfig
from mcore_rl.convert.copying.plan import Task
from mcore_rl.convert.copying.sources import sizes
from mcore_rl.convert.copying.workers import Record
from mcore_rl.files import flush_to_disk

ONE_RANK = {"tp": 1, "pp": 1, "cp": 1, "dp": 1, "ep": 1, "etp": 1, "vpp": 1}
OBJECTS = "__objects_0.distcp"
Done = Sequence[tuple[Task, list[Record]]]


def write_metadata(folder: Path, done: Done, objects: Mapping[str, bytes]) -> None:
    """`.metadata`: where each chunk is; `objects`, as torch.save wrote them, go into a file of their own."""
    chunks: dict[str, list[ChunkStorageMetadata]] = {}
    entries: dict[str, Any] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for task, records in done:
        for chunk, record in zip(task.chunks, records, strict=True):
            target = chunk.target
            offset = torch.Size([span.start for span in chunk.where])
            chunks.setdefault(target.name, []).append(
                ChunkStorageMetadata(offset, torch.Size(sizes(chunk.where)))
            )
            entries[target.name] = target
            storage[MetadataIndex(target.name, offset)] = _StorageInfo(
                task.file, record.placed.offset, record.placed.length
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
    """`metadata.json`, by which Megatron knows the format."""
    (folder / "metadata.json").write_text(json.dumps(asdict(FORMAT)), encoding="utf-8")


def write_common(folder: Path, common: dict[str, Any]) -> None:
    """`common.pt`: what is the same on all ranks."""
    # To an open file: given a path, torch would put the file's name into the archive.
    with (folder / COMMON).open("wb") as file:
        torch.save(common, file)
    flush_to_disk(folder / COMMON)


def finish(folder: Path, model: ModelConfig, step: int, before: Marker | None = None) -> None:
    """The marker, last: with it the folder is complete. `before`: of the checkpoint whose training state this has."""
    names = sorted(entry.name for entry in folder.iterdir())
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
            metadata_crc32=crc32_of(folder / METADATA),
        ),
    )
