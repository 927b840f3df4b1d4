"""Low-rank adapters of a checkpoint: added to its weights as they are read."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_rl.config.lora import LoraConfig
from mcore_rl.config.model import ModelConfig
from mcore_rl.convert.copying.source import ByteRun
from mcore_rl.convert.megatron.folder import DistFolder
from mcore_rl.convert.megatron.source import DistSource
from mcore_rl.errors import CheckpointError
from mcore_rl.families.packed_rows import packed_rows
from mcore_rl.families.regions import sizes
from mcore_rl.families.weight_map import AxisRange, Region
from mcore_rl.storage.checkpoints.read import ADAPTER
from mcore_rl.storage.model import lora_of

WEIGHT = "weight"
"""Key suffix of a weight with an adapter; the keys of A and B end in "adapter.A" and "adapter.B" instead."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredAdapter:
    """The adapter of a weight in a checkpoint, or of a tensor with the weights of all layers or experts."""

    key_a: str
    key_b: str
    rank: int
    num_inputs: int
    num_blocks: int
    """Number of row blocks of A: one per projection, or 1 if all projections share a block."""
    scale: float
    projection_of_row: tuple[int, ...]
    """Index of the projection that each row of B belongs to."""

    def block(self, projection: int) -> AxisRange:
        """Return the rows of A for a projection."""
        index = projection if self.num_blocks > 1 else 0
        return AxisRange(index * self.rank, (index + 1) * self.rank)


def stored_lora(folder: DistFolder) -> LoraConfig | None:
    """Return the section `lora` of the run that wrote a checkpoint; None if it has no adapters.

    Raises CheckpointError if it has adapters but no such section, which gives their scale.
    """
    if not any(ADAPTER in key for key in folder.weights):
        return None
    lora = lora_of(folder.marker)
    if not lora.is_on:
        raise CheckpointError(
            f"{folder.path} has low-rank adapters, as the reference policy of a run, and does not say their scale. "
            "Name a checkpoint of that run."
        )
    return lora


def stored_adapters(folder: DistFolder, lora: LoraConfig, model: ModelConfig) -> dict[str, StoredAdapter]:
    """Return the adapters by the keys of their weights."""
    found = {}
    for key_a in folder.weights:
        if not key_a.endswith(f"{ADAPTER}A"):
            continue
        module = key_a.removesuffix("adapter.A")
        *_, rows_a, num_inputs = folder.tensors[key_a].shape
        *_, num_rows, rank = folder.tensors[f"{module}adapter.B"].shape
        rows = packed_rows(module.rstrip(".").rpartition(".")[2], num_rows, model)
        group = [index for index, size in enumerate(rows.sizes) for _ in range(size)]
        found[module + WEIGHT] = StoredAdapter(
            key_a=key_a,
            key_b=f"{module}adapter.B",
            rank=rank,
            num_inputs=num_inputs,
            num_blocks=rows_a // rank,
            scale=lora.scale_of(rank),
            projection_of_row=tuple(group * rows.groups),
        )
    return found


class MergedSource(DistSource):
    """Tensors of a checkpoint with the adapters added to the weights, in fp32, and rounded once."""

    def __init__(self, folder: DistFolder, adapters: Mapping[str, StoredAdapter]) -> None:
        super().__init__(folder)
        self._adapters = adapters

    def run(self, name: str, where: Region) -> ByteRun | None:
        """Return where a region is stored; None if it is computed (see TensorSource)."""
        return None if name in self._adapters else super().run(name, where)

    def fill(self, out: Tensor, name: str, where: Region) -> None:
        """Copy a region to `out` (see TensorSource)."""
        if name not in self._adapters:
            super().fill(out, name, where)
            return
        weight, product = self.parts(name, where)
        out.copy_((weight + product).view(out.shape))

    def parts(self, name: str, where: Region) -> tuple[Tensor, Tensor]:
        """Return a region of a weight without its adapter, and of scale * B A, both fp32."""
        adapter = self._adapters[name]
        *lead, rows, columns = where
        weight = torch.empty(sizes(where))
        super().fill(weight, name, where)
        all_rows = AxisRange(0, adapter.num_blocks * adapter.rank)
        weight_a = self._read(adapter.key_a, (*lead, all_rows, columns))
        weight_b = self._read(adapter.key_b, (*lead, rows, AxisRange(0, adapter.rank)))
        projections = torch.tensor(adapter.projection_of_row[rows.start : rows.stop])
        product = torch.empty_like(weight)
        for projection in projections.unique().tolist():
            chosen = projections == projection
            block = adapter.block(projection)
            product[..., chosen, :] = weight_b[..., chosen, :] @ weight_a[..., block.start : block.stop, :]
        return weight, adapter.scale * product

    def notes(self, dtype: torch.dtype | None) -> Iterator[str]:
        """Yield, for a matrix of each kind, how large its adapter is, and the loss from rounding it to `dtype`.

        None keeps the type of each weight.
        """
        seen = set()
        for key, adapter in sorted(self._adapters.items()):
            kind = key.split(".layers.", 1)[1].lstrip("0123456789.")
            if kind in seen:
                continue
            seen.add(kind)
            stored = self._tensors[key]
            one, matrix = AxisRange(0, 1), (len(adapter.projection_of_row), adapter.num_inputs)
            where = (*(one,) * (len(stored.shape) - 2), *(AxisRange(0, size) for size in matrix))
            weight, product = self.parts(key, where)
            loss = (weight + product).to(dtype or stored.dtype).float() - weight - product
            lost = _rms(loss) / _rms(product) if product.any() else 0.0
            yield (
                f"{key}: the adapter of the first matrix is {_rms(product) / _rms(weight):.2g} of it (rms), and "
                f"rounding loses {lost:.2%} of the adapter"
            )

    def _read(self, key: str, where: Region) -> Tensor:
        found = torch.empty(sizes(where))
        super().fill(found, key, where)
        return found


def _rms(tensor: Tensor) -> float:
    return math.sqrt(tensor.double().square().mean().item())
