"""The contents of a checkpoint of either format, from its headers only."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_rl.convert.hf.folder import open_hf
from mcore_rl.convert.megatron.folder import OPTIMIZER, open_dist
from mcore_rl.families.weight_map import Shape
from mcore_rl.metrics.progress import readable_bytes
from mcore_rl.storage.checkpoints.read import CRITIC
from mcore_rl.storage.huggingface import is_hf

NOT_READ = (
    "names, shapes and sizes; the tensors are not read (mcore-rl check compares them with their checksums)"
)
"""The entry `checked`, so that a list of tensors is not mistaken for a check of their values."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor in the list."""

    name: str
    dtype: str
    shape: Shape
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointContents:
    """Properties and tensors of a checkpoint."""

    path: Path
    properties: dict[str, Any]
    """Format, family, step and sums, in the order in which they are printed."""
    tensors: list[TensorEntry]

    def lines(self) -> list[str]:
        """Return the contents as lines of text."""
        width = max((len(tensor.name) for tensor in self.tensors), default=0)
        lines = [f"{name}: {value}" for name, value in self.properties.items()]
        for tensor in self.tensors:
            shape = "x".join(map(str, tensor.shape)) or "scalar"
            lines.append(
                f"  {tensor.name:<{width}}  {tensor.dtype:<9} {shape:<24} {readable_bytes(tensor.num_bytes)}"
            )
        return lines


def contents(path: Path) -> CheckpointContents:
    """Return names, shapes, types and sizes of all tensors, and the marker's entries.

    Raises CheckpointError if the checkpoint is damaged.
    """
    return _hf_contents(path) if is_hf(path) else _dist_contents(path)


def _hf_contents(path: Path) -> CheckpointContents:
    folder = open_hf(path)
    tensors = [
        TensorEntry(name, _dtype_name(tensor.dtype), tensor.shape, tensor.num_bytes)
        for name, tensor in sorted(folder.tensors.items())
    ]
    properties = {
        "format": "Hugging Face safetensors",
        "family": (folder.config or {}).get("model_type", "unknown: no config.json"),
        "files": len(folder.files),
        "checked": NOT_READ,
        **_sums(tensors),
    }
    return CheckpointContents(path=folder.path, properties=properties, tensors=tensors)


def _dist_contents(path: Path) -> CheckpointContents:
    folder = open_dist(path)
    tensors = [
        TensorEntry(
            key, _dtype_name(tensor.dtype), tensor.shape, math.prod(tensor.shape) * tensor.dtype.itemsize
        )
        for key, tensor in sorted(
            folder.own_tensors.items(), key=lambda item: (item[0].startswith((*OPTIMIZER, CRITIC)), item[0])
        )
    ]
    marker = folder.marker
    properties: dict[str, Any] = {
        "format": "Megatron torch_dist",
        "family": marker.model.get("family") if marker else "unknown: not written by this program",
        "iteration": folder.step,
    }
    if marker:
        mesh = ", ".join(f"{name} {size}" for name, size in marker.mesh.items() if size > 1)
        properties |= {"saved": marker.time, "mesh": mesh or "1 rank", "megatron-core": marker.megatron}
    if folder.base is not None:
        properties["adapters of"] = f"{folder.base.path}, which has the weights"
    properties |= {
        "files": len(folder.files),
        "checked": NOT_READ,
        **_sums(tensors),
        "objects": len(folder.objects),
    }
    return CheckpointContents(path=folder.path, properties=properties, tensors=tensors)


def _sums(tensors: list[TensorEntry]) -> dict[str, str]:
    """Return numbers of tensors, elements and bytes: of the weights and, where they exist, of the optimizer and of the
    critic with its own.
    """
    weights = [tensor for tensor in tensors if not tensor.name.startswith((*OPTIMIZER, CRITIC))]
    elements = sum(math.prod(tensor.shape) for tensor in weights)
    sums = {
        "weights": f"{len(weights)} tensors, {elements:,} elements, {readable_bytes(sum(t.num_bytes for t in weights))}"
    }
    for name, beginnings in (("optimizer", OPTIMIZER), ("critic", CRITIC)):
        if others := [tensor for tensor in tensors if tensor.name.startswith(beginnings)]:
            num_bytes = sum(tensor.num_bytes for tensor in others)
            sums[name] = f"{len(others)} tensors, {readable_bytes(num_bytes)}"
    return sums


def _dtype_name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
