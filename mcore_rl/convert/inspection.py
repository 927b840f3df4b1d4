"""What is in a checkpoint of either format, from its headers."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_rl.convert.copying.progress import shown
from mcore_rl.convert.hf.folder import open_hf
from mcore_rl.convert.megatron.folder import OPTIMIZER, open_dist
from mcore_rl.convert.verify import is_hf
from mcore_rl.families.weight_map import Shape


@dataclass(frozen=True, slots=True)
class Listed:
    """A tensor."""

    name: str
    dtype: str
    shape: Shape
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Contents:
    """A checkpoint as a list."""

    path: Path
    facts: dict[str, Any]
    tensors: list[Listed]

    def lines(self) -> list[str]:
        """For people."""
        width = max((len(tensor.name) for tensor in self.tensors), default=0)
        lines = [f"{name}: {value}" for name, value in self.facts.items()]
        for tensor in self.tensors:
            shape = "x".join(map(str, tensor.shape)) or "scalar"
            lines.append(f"  {tensor.name:<{width}}  {tensor.dtype:<9} {shape:<24} {shown(tensor.num_bytes)}")
        return lines


def contents(path: Path) -> Contents:
    """Names, shapes, types, bytes, and what the checkpoint says of itself. CheckpointError when it is damaged."""
    return _hf_contents(path) if is_hf(path) else _dist_contents(path)


def _hf_contents(path: Path) -> Contents:
    folder = open_hf(path)
    tensors = [
        Listed(name, _name(stored.dtype), stored.shape, stored.num_bytes)
        for name, stored in sorted(folder.tensors.items())
    ]
    facts = {
        "format": "Hugging Face safetensors",
        "family": (folder.config or {}).get("model_type", "not said: no config.json"),
        "files": len(folder.files),
        **_sums(tensors),
    }
    return Contents(path=folder.path, facts=facts, tensors=tensors)


def _dist_contents(path: Path) -> Contents:
    folder = open_dist(path)
    tensors = [
        Listed(key, _name(tensor.dtype), tensor.shape, math.prod(tensor.shape) * tensor.dtype.itemsize)
        for key, tensor in sorted(
            folder.tensors.items(), key=lambda item: (item[0].startswith(OPTIMIZER), item[0])
        )
    ]
    marker = folder.marker
    facts: dict[str, Any] = {
        "format": "Megatron torch_dist",
        "family": marker.model.get("family") if marker else "not said: not written by this program",
        "iteration": folder.step,
    }
    if marker:
        mesh = ", ".join(f"{name} {size}" for name, size in marker.mesh.items() if size > 1)
        facts |= {"saved": marker.time, "mesh": mesh or "1 rank", "megatron-core": marker.megatron}
    facts |= {"files": len(folder.files), **_sums(tensors), "objects": len(folder.objects)}
    return Contents(path=folder.path, facts=facts, tensors=tensors)


def _sums(tensors: list[Listed]) -> dict[str, str]:
    weights = [tensor for tensor in tensors if not tensor.name.startswith(OPTIMIZER)]
    elements = sum(math.prod(tensor.shape) for tensor in weights)
    sums = {
        "weights": f"{len(weights)} tensors, {elements:,} elements, {shown(sum(t.num_bytes for t in weights))}"
    }
    if len(weights) < len(tensors):
        state = sum(tensor.num_bytes for tensor in tensors) - sum(tensor.num_bytes for tensor in weights)
        sums["optimizer"] = f"{len(tensors) - len(weights)} tensors, {shown(state)}"
    return sums


def _name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
