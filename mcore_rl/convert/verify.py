"""Verify that two checkpoints of any formats hold the same model: equal bits, types and names."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from mcore_rl.checks.model import checked_model_from_hf
from mcore_rl.config.model import ModelConfig
from mcore_rl.convert.copying.content import fill
from mcore_rl.convert.copying.plan import TargetTensor, chunk_at, chunks_of, common_dtype
from mcore_rl.convert.copying.source import TensorSource
from mcore_rl.convert.hf.blocks import as_stored
from mcore_rl.convert.hf.folder import HfFolder, open_hf
from mcore_rl.convert.hf.model import HfModel, MtpLayers, open_hf_model
from mcore_rl.convert.hf.source import HfSource
from mcore_rl.convert.megatron.model import DistModel, disagreements, open_dist_model
from mcore_rl.errors import CheckpointError, ConfigError
from mcore_rl.families import weight_map
from mcore_rl.families.regions import (
    RegionCopy,
    composed,
    copies_into_hf,
    copies_into_megatron,
    whole,
)
from mcore_rl.metrics.progress import ByteProgress
from mcore_rl.storage.huggingface import is_hf

LOGITS_BYTES = 2 << 30
"""Largest model whose logits are compared by default, as transformers loads it: at most a minute on two cores."""
SAME = "the same values"


@dataclass(frozen=True, slots=True)
class Difference:
    """A difference between two checkpoints: in the tensor `name`, or in the models' configs (`config`)."""

    name: str
    what: str

    def __str__(self) -> str:
        return f"{self.name}: {self.what}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedCheckpoint:
    """A checkpoint of any format as Hugging Face's tensors."""

    path: Path
    targets: Mapping[str, TargetTensor]
    source: TensorSource


def compare(
    one: Path,
    other: Path,
    reference: Path | None,
    mtp: MtpLayers,
    progress: ByteProgress,
    family: str | None = None,
) -> list[Difference]:
    """Return all differences between the models of two checkpoints.

    Args:
        one: A checkpoint of either format.
        other: The checkpoint to compare with.
        reference: A Hugging Face folder of the same model, for Megatron checkpoints that do not name their family.
        mtp: Whether layers for multi-token prediction are compared or left out.
        progress: Where progress is shown.
        family: A family of the user's own, as `module:name`; None for the family that config.json names.

    Raises:
        CheckpointError: One of the two cannot be read completely.
    """
    if is_hf(one) and is_hf(other):
        plain = open_hf(one), open_hf(other)
        if plain[0].tensors.keys() == plain[1].tensors.keys():
            # The same names on both sides: no family is needed, and quantized tensors are compared as stored.
            first, second = map(_as_stored, plain)
            return [
                *_config_differences(*(_config_of(folder) for folder in plain)),
                *_compared(first, second, progress),
            ]
    models = [
        open_model(path, reference or (other if is_hf(other) else one if is_hf(one) else None), mtp, family)
        for path in (one, other)
    ]
    repeated = {
        copy.name
        for found in models
        if isinstance(found, HfModel)
        for copy in found.weights.copies
        if copy.name in found.folder.tensors
    }
    sides = [_as_hf_tensors(found, repeated) for found in models]
    found = list(_config_differences(models[0].model, models[1].model))
    return [*found, *_compared(sides[0], sides[1], progress)]


def open_model(
    path: Path, reference: Path | None, mtp: MtpLayers, family: str | None = None
) -> HfModel | DistModel:
    """Return a checkpoint of either format; a Megatron checkpoint that does not name its family takes the family of
    `reference`.
    """
    if is_hf(path):
        return open_hf_model(path, mtp=mtp, family=family)
    try:
        return open_dist_model(path, mtp=mtp)
    except CheckpointError:
        if reference is None:
            raise
        return open_dist_model(path, reference, mtp=mtp)


def _as_hf_tensors(found: HfModel | DistModel, repeated: Collection[str]) -> ComparedCheckpoint:
    """Return a model under names that both formats can be converted to: Hugging Face's, with a tensor for each expert.

    The tensors in `repeated`, such as a tied output, are compared too: a side without such a tensor uses the original.
    """
    weights = found.weights if isinstance(found, DistModel) else weight_map(found.model)
    copies, targets = copies_into_hf(weights.blocks), {}
    through = copies_into_megatron(found.weights.blocks)
    for name, shape in weights.hf_shapes.items():
        keeps_fp32 = any(copy.source in weights.fp32_keys for copy in copies[name])
        if isinstance(found, HfModel):
            # Through Megatron's tensors, back to the folder's own, in which experts may share a tensor.
            copies[name] = composed(copies[name], through)
        dtypes = {copy.source: found.dtype(copy.source) for copy in copies[name]}
        dtype = torch.float32 if keeps_fp32 else common_dtype(name, dtypes)
        targets[name] = TargetTensor(name=name, shape=shape, dtype=dtype, copies=tuple(copies[name]))
    for copy in weights.copies:
        if copy.name in repeated:
            original = targets[copy.original]
            targets[copy.name] = replace(original, name=copy.name)
            if isinstance(found, HfModel) and copy.name in found.folder.tensors:
                stored = RegionCopy(whole(original.shape), copy.name, whole(original.shape))
                targets[copy.name] = replace(
                    targets[copy.name], dtype=found.dtype(copy.name), copies=(stored,)
                )
    return ComparedCheckpoint(path=found.folder.path, targets=targets, source=found.source())


def _config_of(folder: HfFolder) -> ModelConfig | None:
    """Return the config of a folder; None for an unknown family, of which only tensors can be compared."""
    try:
        return checked_model_from_hf(folder.config or {})
    except ConfigError:
        return None


def _config_differences(one: ModelConfig | None, other: ModelConfig | None) -> Iterator[Difference]:
    """Yield differences in settings with which the same weights would give other results."""
    if one is not None and other is not None:
        for line in disagreements(one, other):
            yield Difference("config", line)


def _as_stored(folder: HfFolder) -> ComparedCheckpoint:
    """Return a folder's tensors as they are stored, for any model, quantized or not."""
    targets = {name: as_stored(folder, name) for name in folder.tensors}
    return ComparedCheckpoint(path=folder.path, targets=targets, source=HfSource(folder))


def _compared(
    one: ComparedCheckpoint, other: ComparedCheckpoint, progress: ByteProgress
) -> Iterator[Difference]:
    """Yield tensors that only one side has, and tensors with different shapes, types or values."""
    for name in sorted(one.targets.keys() - other.targets.keys()):
        yield Difference(name, f"only in {one.path}")
    for name in sorted(other.targets.keys() - one.targets.keys()):
        yield Difference(name, f"only in {other.path}")
    common = [name for name in one.targets if name in other.targets]
    progress.begin("verify", sum(one.targets[name].num_bytes for name in common), 0)
    for name in common:
        a, b = one.targets[name], other.targets[name]
        if a.shape != b.shape:
            yield Difference(name, f"shape {a.shape} and {b.shape}")
            continue
        if a.dtype != b.dtype:
            yield Difference(name, f"{a.dtype} and {b.dtype}, {_values(one.source, other.source, a, b)}")
        elif (values := _values(one.source, other.source, a, b)) != SAME:
            yield Difference(name, values)
        progress.add(a.num_bytes, {"tensor": name})


def _values(first: TensorSource, second: TensorSource, a: TargetTensor, b: TargetTensor) -> str:
    """Return how many elements differ, and by how much: bit for bit, or by value if the types differ."""
    count, largest = 0, 0.0
    same_type = a.dtype == b.dtype
    for chunk in chunks_of(a):
        x, y = fill(chunk, first), fill(chunk_at(b, chunk.where), second)
        if same_type and torch.equal(_bits(x), _bits(y)):
            continue
        differ = _bits(x) != _bits(y) if same_type else x.double() != y.double()
        count += int(differ.sum())
        if differ.any():
            apart = (x.double() - y.double()).abs()[differ]
            largest = max(largest, float(apart.nan_to_num(nan=float("inf")).max()))
    total = a.num_bytes // a.dtype.itemsize
    return f"{count} of {total} values differ, by at most {largest:.3g}" if count else SAME


def _bits(tensor: Tensor) -> Tensor:
    # As integers, minus zero differs from zero, and a NaN equals itself.
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(kinds[tensor.element_size()])
