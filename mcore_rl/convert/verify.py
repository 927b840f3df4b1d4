"""Whether two checkpoints, in whatever formats, hold the same model: bit for bit, type for type, name for name."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mcore_rl.checks.model import checked_model_from_hf
from mcore_rl.config.model import ModelConfig
from mcore_rl.convert.copying.content import fill
from mcore_rl.convert.copying.plan import (
    Pair,
    Target,
    chunk_at,
    chunks_of,
    composed,
    export_pairs,
    import_pairs,
    one_dtype,
)
from mcore_rl.convert.copying.progress import ByteProgress
from mcore_rl.convert.copying.sources import HfSource, Source, whole
from mcore_rl.convert.hf.folder import HfFolder, open_hf
from mcore_rl.convert.hf.model import HfModel, Mtp, open_hf_model
from mcore_rl.convert.megatron.model import DistModel, disagreements, open_dist_model
from mcore_rl.errors import CheckpointError, ConfigError
from mcore_rl.families import weight_map


@dataclass(frozen=True, slots=True)
class Difference:
    """What is not the same about one tensor."""

    name: str
    what: str

    def __str__(self) -> str:
        return f"{self.name}: {self.what}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """A checkpoint as Hugging Face's tensors."""

    path: Path
    targets: Mapping[str, Target]
    source: Source


def is_hf(path: Path) -> bool:
    """Whether a path is of Hugging Face's format: a safetensors file, or a folder that has some."""
    return path.suffix == ".safetensors" or (path.is_dir() and any(path.glob("*.safetensors*")))


def compare(
    one: Path, other: Path, reference: Path | None, mtp: Mtp, progress: ByteProgress
) -> list[Difference]:
    """All differences between the models in two folders. CheckpointError when one cannot be read as a whole."""
    if is_hf(one) and is_hf(other):
        plain = open_hf(one), open_hf(other)
        if plain[0].tensors.keys() == plain[1].tensors.keys():
            first, second = map(_plain_side, plain)
            return [
                *_config_differences(*(_config_of(folder) for folder in plain)),
                *_compared(first, second, progress),
            ]
    models = [
        open_model(path, reference or (other if is_hf(other) else one if is_hf(one) else None), mtp)
        for path in (one, other)
    ]
    sides = [_side(found) for found in models]
    found = list(_config_differences(models[0].model, models[1].model))
    return [*found, *_compared(sides[0], sides[1], progress)]


def open_model(path: Path, reference: Path | None, mtp: Mtp) -> HfModel | DistModel:
    """A checkpoint of either format; a Megatron one that does not say what it is takes the config of `reference`."""
    if is_hf(path):
        return open_hf_model(path, mtp=mtp)
    try:
        return open_dist_model(path, mtp=mtp)
    except CheckpointError:
        if reference is None:
            raise
        return open_dist_model(path, reference, mtp=mtp)


def _side(found: HfModel | DistModel) -> Side:
    """In names that both formats have: an expert each."""
    weights = found.weights if isinstance(found, DistModel) else weight_map(found.model)
    pairs, targets = export_pairs(weights.blocks), {}
    through = import_pairs(found.weights.blocks)
    for name, shape in weights.hf_shapes.items():
        keeps_fp32 = any(pair.source in weights.fp32_keys for pair in pairs[name])
        if isinstance(found, HfModel):
            pairs[name] = composed(pairs[name], through)
        dtypes = {pair.source: found.dtype(pair.source) for pair in pairs[name]}
        dtype = torch.float32 if keeps_fp32 else one_dtype(name, dtypes)
        targets[name] = Target(name=name, shape=shape, dtype=dtype, pairs=tuple(pairs[name]))
    return Side(path=found.folder.path, targets=targets, source=found.source())


def _config_of(folder: HfFolder) -> ModelConfig | None:
    """None: of a family that is not known here, whose tensors can be compared all the same."""
    try:
        return checked_model_from_hf(folder.config or {})
    except ConfigError:
        return None


def _config_differences(one: ModelConfig | None, other: ModelConfig | None) -> Iterator[Difference]:
    """Of what the same weights would compute."""
    if one is not None and other is not None:
        for line in disagreements(one, other):
            yield Difference("config", line)


def _plain_side(folder: HfFolder) -> Side:
    """A folder's tensors as they are: of any model, quantized or not."""
    targets = {
        name: Target(
            name=name, shape=t.shape, dtype=t.dtype, pairs=(Pair(whole(t.shape), name, whole(t.shape)),)
        )
        for name, t in folder.tensors.items()
    }
    return Side(path=folder.path, targets=targets, source=HfSource(folder))


def _compared(one: Side, other: Side, progress: ByteProgress) -> Iterator[Difference]:
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


SAME = "the same values"


def _values(first: Source, second: Source, a: Target, b: Target) -> str:
    """How many elements differ, and by how much; of one type, bit for bit."""
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
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(kinds[tensor.element_size()])
