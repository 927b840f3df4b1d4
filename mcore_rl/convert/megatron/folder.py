"""A Megatron checkpoint (`torch_dist`) by its metadata: tensors, the parts that they are saved in, and files."""

from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from mcore_rl.errors import CheckpointError
from mcore_rl.families.weight_map import AxisRange, Region, Shape, covered_otherwise_than_once
from mcore_rl.storage import checkpoint
from mcore_rl.storage.archives import FileRange, check_descriptions, check_identity, file_sizes
from mcore_rl.storage.files import sizes_and_times
from mcore_rl.storage.folders import read_json, refuse_special_file
from mcore_rl.storage.foreign import StoredMetadata, StoredTensor, load_common, load_metadata

OPTIMIZER = ("optimizer.", "chained_")
"""Key prefixes of an optimizer's state: this program's, and Megatron-LM's for several optimizers."""


@dataclass(frozen=True, slots=True)
class DistPart:
    """A region of a tensor that was saved on its own."""

    where: Region
    saved: FileRange


@dataclass(frozen=True, slots=True)
class DistTensor:
    """A whole tensor and its parts."""

    shape: Shape
    dtype: torch.dtype
    parts: tuple[DistPart, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class DistFolder:
    """A complete checkpoint."""

    path: Path
    marker: checkpoint.Marker | None
    """The checkpoint's marker; None if this program did not write it."""
    step: int
    tensors: dict[str, DistTensor]
    """The tensors, including the base's; the parts of the base's tensors have absolute paths as file names."""
    base: "DistFolder | None"
    """Base checkpoint with the weights that this checkpoint of low-rank adapters leaves out; None if it has all."""
    objects: dict[str, FileRange]
    """File and offset of each object that is no tensor, by key."""
    files: dict[str, int]
    """Number of bytes of each file, by name."""
    digest: str
    """SHA-256 of `.metadata`, followed by the base's digest."""
    stamps: dict[Path, tuple[int, int]]
    """Size and time of each file, and of the files that describe them, from before they were read."""

    @property
    def described(self) -> dict[str, Any]:
        """The checkpoint as the source of a conversion, for its manifest."""
        return {"metadata_sha256": self.digest, "files": self.files}

    @property
    def own_tensors(self) -> dict[str, DistTensor]:
        """The tensors in the checkpoint's own files, by key."""
        return {
            key: tensor
            for key, tensor in self.tensors.items()
            if all(part.saved.file in self.files for part in tensor.parts)
        }

    @property
    def weights(self) -> dict[str, DistTensor]:
        """The tensors without the optimizer's state and a critic, by key."""
        return {
            key: tensor for key, tensor in self.tensors.items() if not key.startswith((*OPTIMIZER, checkpoint.CRITIC))
        }


def open_dist(path: Path) -> DistFolder:
    """Return the checkpoint that `path` is or has in it; CheckpointError when it is damaged, incomplete or foreign."""
    path = checkpoint.find_checkpoint(path)
    for name in (checkpoint.MARKER, checkpoint.METADATA, checkpoint.FORMAT_FILE):
        refuse_special_file(path / name)
    stamps = sizes_and_times(path.iterdir())
    marker = checkpoint.check(path) if (path / checkpoint.MARKER).exists() else None
    config = path / checkpoint.FORMAT_FILE
    if marker is None and (not config.is_file() or read_json(config).get("sharded_backend") != "torch_dist"):
        raise CheckpointError(
            f"{path} is not a complete checkpoint in Megatron's format torch_dist (by metadata.json). "
            "One in another format must be saved as torch_dist by Megatron-LM first."
        )
    if marker is not None:
        check_descriptions(path, marker)
    metadata = load_metadata(path)
    tensors, objects = _entries(path, metadata)
    files = file_sizes(path, (metadata.storage_data or {}).values())
    digest = sha256((path / checkpoint.METADATA).read_bytes()).hexdigest()
    stamps = {
        file: stamp
        for file, stamp in stamps.items()
        if file.name in (*files, checkpoint.METADATA, checkpoint.COMMON, checkpoint.FORMAT_FILE)
    }
    base_path = None if marker is None else checkpoint.base_of(path, marker)
    base = None if base_path is None else open_dist(base_path)
    if base is not None:
        for key in checkpoint.held_by_base(base.tensors, tensors):
            held = base.tensors[key]
            saved = (part.saved._replace(file=str(base.path / part.saved.file)) for part in held.parts)
            parts = (replace(part, saved=place) for part, place in zip(held.parts, saved, strict=True))
            tensors[key] = replace(held, parts=tuple(parts))
        digest, stamps = f"{digest} {base.digest}", stamps | base.stamps
    return DistFolder(
        path=path,
        marker=marker,
        step=marker.step if marker else _step(path),
        tensors=tensors,
        base=base,
        objects=objects,
        files=files,
        digest=digest,
        stamps=stamps,
    )


def check_files(folder: DistFolder) -> None:
    """Raise a CheckpointError for a changed file, by its small records; DistSource checks tensors when read."""
    if folder.base is not None:
        check_files(folder.base)
    if folder.marker is None:
        return
    archives: dict[str, list[FileRange]] = {name: [] for name in (*folder.files, *folder.marker.files)}
    parts = (part.saved for tensor in folder.own_tensors.values() for part in tensor.parts)
    for saved in (*parts, *folder.objects.values()):
        archives[saved.file].append(saved)
    for name, ranges in archives.items():
        check_identity(folder.path, folder.marker, name, ranges)


def _entries(path: Path, metadata: StoredMetadata) -> tuple[dict[str, DistTensor], dict[str, FileRange]]:
    tensors, objects = {}, {}
    places = {(index.fqn, tuple(index.offset or ())): info for index, info in (metadata.storage_data or {}).items()}
    for key, entry in sorted(metadata.state_dict_metadata.items()):
        if isinstance(entry, StoredTensor):
            parts = []
            for chunk in entry.chunks:
                info = places.get((key, tuple(chunk.offsets)))
                if info is None:
                    raise CheckpointError(f"{path}: {key} at {tuple(chunk.offsets)} is in no file. Take another copy.")
                spans = (AxisRange(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True))
                parts.append(DistPart(tuple(spans), _file_range(path, key, info)))
            shape = tuple(entry.size)
            if any(True for _ in covered_otherwise_than_once(shape, [part.where for part in parts])):
                raise CheckpointError(f"{path}: the parts of {key} {shape} do not make it up. Take another copy.")
            tensors[key] = DistTensor(shape, entry.properties.dtype, tuple(parts))
        elif (info := places.get((key, ()))) is not None:
            objects[key] = _file_range(path, key, info)
    return tensors, objects


def _file_range(path: Path, key: str, info: object) -> FileRange:
    file, offset, length = (getattr(info, name, None) for name in ("relative_path", "offset", "length"))
    if (
        not isinstance(file, str)
        or Path(file).name != file
        or not isinstance(offset, int)
        or not isinstance(length, int)
    ):
        raise CheckpointError(
            f"{path}: {key} has the file {file!r} in .metadata, which is not a file of the checkpoint."
        )
    if getattr(info, "transform_descriptors", None):
        raise CheckpointError(f"{path}: {key} is compressed, which is not read here. Save it without.")
    return FileRange(file, offset, length)


def _step(path: Path) -> int:
    if (named := checkpoint.step_of(path)) is not None:
        return named
    common = path / checkpoint.COMMON
    step = load_common(common.read_bytes(), str(common)).get("iteration", 0) if common.is_file() else 0
    return step if isinstance(step, int) else 0
