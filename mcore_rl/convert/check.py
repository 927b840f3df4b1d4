"""List a checkpoint's contents, check that its files are as written, and verify that two hold the same model."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from mcore_rl.checks.model import checked_model_from_hf
from mcore_rl.config.model import ModelConfig
from mcore_rl.convert.copying.tensors import TargetTensor, TensorSource, chunk_at, chunks_of, common_dtype, fill
from mcore_rl.convert.hf.folder import HfFolder, open_hf
from mcore_rl.convert.hf.model import HfModel, HfSource, MtpLayers, as_stored, open_hf_model
from mcore_rl.convert.megatron.folder import OPTIMIZER, open_dist
from mcore_rl.convert.megatron.model import DistModel, disagreements, open_dist_model
from mcore_rl.data.index_file import read_index, read_sidecar
from mcore_rl.errors import CheckpointError, ConfigError, DamagedCheckpointError, DataError
from mcore_rl.families import weight_map
from mcore_rl.families.weight_map import (
    Copies,
    RegionCopy,
    Shape,
    composed,
    copies_into_hf,
    copies_into_megatron,
    whole,
)
from mcore_rl.metrics.progress import ByteProgress, readable_bytes
from mcore_rl.storage.archives import FileRange, check_part
from mcore_rl.storage.checkpoint import (
    COMMON,
    CRITIC,
    FORMAT_FILE,
    MANIFEST,
    MARKER,
    METADATA,
    OWN_ENTRY,
    find_checkpoint,
    length_fault,
    read_marker,
)
from mcore_rl.storage.checksums import as_hex, crc32_of
from mcore_rl.storage.files import with_ending
from mcore_rl.storage.folders import is_hf, read_json
from mcore_rl.storage.foreign import load_common, load_metadata

NOT_READ = "names, shapes and sizes; the tensors are not read (mcore-rl check compares them with their checksums)"
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
    tensors: list[TensorEntry]

    def lines(self) -> list[str]:
        """Return the contents as lines of text."""
        width = max((len(tensor.name) for tensor in self.tensors), default=0)
        lines = [f"{name}: {value}" for name, value in self.properties.items()]
        for tensor in self.tensors:
            shape = "x".join(map(str, tensor.shape)) or "scalar"
            lines.append(f"  {tensor.name:<{width}}  {tensor.dtype:<9} {shape:<24} {readable_bytes(tensor.num_bytes)}")
        return lines


def contents(path: Path) -> CheckpointContents:
    """Return names, shapes, types and sizes of all tensors, and the marker's entries; CheckpointError if damaged."""
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
        TensorEntry(key, _dtype_name(tensor.dtype), tensor.shape, math.prod(tensor.shape) * tensor.dtype.itemsize)
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
    properties |= {"files": len(folder.files), "checked": NOT_READ, **_sums(tensors), "objects": len(folder.objects)}
    return CheckpointContents(path=folder.path, properties=properties, tensors=tensors)


def _sums(tensors: list[TensorEntry]) -> dict[str, str]:
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


AS_WRITTEN = "as written (CRC-32)"
NOTHING_RECORDED = "nothing was recorded when it was written"
MAX_LISTED = 3
DATASET_ENDINGS = (".bin", ".idx", ".json")


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedFile:
    """A file and the comparison that was made."""

    name: str
    num_bytes: int | None
    finding: str
    """The comparison that was made, the damage, or the part that could not be checked."""
    verdict: Literal["sound", "damaged", "not understood"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckPlan:
    """The files that a check will read."""

    title: str
    checks: Sequence[Callable[[], CheckedFile]]

    def run(self, workers: int) -> Iterator[CheckedFile]:
        """Yield the findings in the order of the files, reading `workers` files at a time."""
        # Threads suffice: reading and computing checksums release Python's lock.
        with ThreadPoolExecutor(workers) as pool:
            yield from pool.map(_read, self.checks)


def _read(check: Callable[[], CheckedFile]) -> CheckedFile:
    try:
        return check()
    except OSError as error:
        name = Path(str(error.filename or "a file")).name
        return CheckedFile(
            name=name, num_bytes=None, finding=f"DAMAGED: it cannot be read: {error.strerror}", verdict="damaged"
        )


def plan_check(path: Path) -> CheckPlan:
    """Plan the check of a checkpoint, the newest in a folder, a Hugging Face folder, or a .bin/.idx pair."""
    prefix = str(path)
    for ending in DATASET_ENDINGS:
        if path.is_file() and prefix.endswith(ending):
            prefix = prefix.removesuffix(ending)
    if any(with_ending(prefix, ending).is_file() for ending in (".bin", ".idx")):
        return _plan_dataset(prefix)
    # An import has a manifest too; an export that lost all its weights has nothing else.
    is_checkpoint = any((path / name).is_file() for name in (MARKER, METADATA))
    if is_hf(path) or ((path / MANIFEST).is_file() and not is_checkpoint):
        return _plan_hf(path)
    return _plan_checkpoint(find_checkpoint(path))


def _plan_checkpoint(path: Path) -> CheckPlan:
    parts: dict[str, list[tuple[str, FileRange]]] = {}
    try:
        for index, info in (load_metadata(path).storage_data or {}).items():
            place = FileRange(info.relative_path, info.offset, info.length)
            # A compressed part has no archive to look into.
            if Path(place.file).name == place.file and not getattr(info, "transform_descriptors", None):
                parts.setdefault(place.file, []).append((index.fqn, place))
    except CheckpointError:
        # Its own check reports it; without it, parts have no names.
        parts = {}
    present = [*parts, *(name for name in (METADATA, COMMON, FORMAT_FILE) if (path / name).is_file())]
    by_parts = [partial(_checked_by_parts, path, name, parts.get(name, ())) for name in sorted(present)]
    if not (path / MARKER).is_file():
        title = f"{path}: no {MARKER}, so that only the checksums inside of the archives are known"
        more = sorted(file.name for file in path.iterdir() if file.name not in present)
        unknown = [partial(_unknown, path / name) for name in more]
        lost = [partial(_missing, MARKER)] if _is_ours(path) else []
        return CheckPlan(title=title, checks=[*lost, *(by_parts or [partial(_missing, METADATA)]), *unknown])
    try:
        marker = read_marker(path)
    except DamagedCheckpointError as error:
        return CheckPlan(
            title=f"{path}: only the checksums inside of the archives are known",
            checks=[partial(_damaged, path / MARKER, str(error)), *by_parts],
        )
    later = sorted(
        name
        for file in path.rglob("*")
        if file.is_file() and (name := file.relative_to(path).as_posix()) not in (*marker.files, MARKER)
    )
    return CheckPlan(
        title=f"{path}: checkpoint of step {marker.step}, written {marker.time}",
        checks=[
            partial(_checked_by_marker, path, name, size, marker.crc32.get(name), parts.get(name, ()))
            for name, size in sorted(marker.files.items())
        ]
        + [partial(_unknown, path / name) for name in later],
    )


def _is_ours(path: Path) -> bool:
    """Return whether a checkpoint without a marker was written by this program, which writes a marker last."""
    try:
        common = load_common((path / COMMON).read_bytes(), COMMON) if (path / COMMON).is_file() else {}
    except CheckpointError:
        common = {}
    return OWN_ENTRY in common or (path / MANIFEST).is_file()


def _checked_by_marker(
    path: Path, name: str, size: int, crc: str | None, parts: Sequence[tuple[str, FileRange]]
) -> CheckedFile:
    fault = length_fault(path, name, size)
    if fault is not None:
        return _damaged(path / name, fault.removeprefix(f"{name} "))
    if crc is None:
        return _checked_by_parts(path, name, parts)
    if crc32_of(path / name) == crc:
        return _sound(path / name)
    faults = _part_faults(path, parts)
    return _damaged(
        path / name,
        "not the bytes that were written"
        + (f": {_some(faults)}" if faults else "; its parts are sound, so it may be of another step" * bool(parts)),
    )


def _checked_by_parts(path: Path, name: str, parts: Sequence[tuple[str, FileRange]]) -> CheckedFile:
    file = path / name
    if not file.is_file():
        return _missing(name)
    if name == COMMON:
        parts = [(COMMON, FileRange(COMMON, 0, file.stat().st_size))]
    faults = _part_faults(path, parts)
    if faults:
        return _damaged(file, f"not the bytes that were written: {_some(faults)}")
    if name == FORMAT_FILE:
        try:
            read_json(file)
        except CheckpointError:
            return _damaged(file, "it is not JSON")
    if name == METADATA:
        try:
            load_metadata(path)
        except DamagedCheckpointError as error:
            return _damaged(file, str(error))
        except CheckpointError as error:
            return CheckedFile(
                name=name, num_bytes=file.stat().st_size, finding=f"NOT UNDERSTOOD: {error}", verdict="not understood"
            )
    if not parts:
        return _sound(file, f"{NOTHING_RECORDED}; it can be read")
    return _sound(file, f"each of its {len(parts)} parts as written (CRC-32 inside); nothing was recorded of the file")


def _part_faults(path: Path, parts: Iterable[tuple[str, FileRange]]) -> list[str]:
    faults = []
    for key, part in parts:
        try:
            check_part(path, key, part)
        except CheckpointError:
            faults.append(key)
    return sorted(set(faults))


def _plan_hf(path: Path) -> CheckPlan:
    folder = path if path.is_dir() else path.parent
    manifest = folder / MANIFEST
    if not manifest.is_file():
        hf = open_hf(path)
        return CheckPlan(
            title=f"{path}: no {MANIFEST}, as downloaded folders have none: {NOTHING_RECORDED}, and only headers and "
            "lengths are looked at",
            checks=[
                partial(_sound, folder / name, f"{NOTHING_RECORDED}; header and length agree") for name in hf.files
            ],
        )
    try:
        recorded = read_json(manifest)
    except CheckpointError as error:
        return CheckPlan(title=f"{path}: an export", checks=[partial(_damaged, manifest, str(error))])
    files, tensors = recorded.get("files", {}), recorded.get("tensors", {})
    names = [path.name] if path.is_file() else sorted({*files, *(file.name for file in folder.glob("*.safetensors"))})
    later = (
        [] if path.is_file() else sorted(file.name for file in folder.iterdir() if file.name not in {*names, MANIFEST})
    )
    return CheckPlan(
        title=f"{path}: {recorded.get('kind')} of {recorded.get('program')}, step {recorded.get('step', 'unknown')}",
        checks=[partial(_checked_by_manifest, folder, name, files.get(name), tensors) for name in names]
        + [partial(_unknown, folder / name) for name in later],
    )


def _checked_by_manifest(
    folder: Path, name: str, entry: dict[str, object] | None, tensors: dict[str, dict[str, object]]
) -> CheckedFile:
    file = folder / name
    if not file.is_file():
        return _missing(name)
    size = file.stat().st_size
    if entry is not None:
        if size != entry["bytes"]:
            return _damaged(file, f"it has {size} bytes, {entry['bytes']} were written")
        if crc32_of(file) == entry["crc32"]:
            return _sound(file)
    if file.suffix != ".safetensors":
        return _damaged(file, "not the bytes that were written") if entry else _unknown(file)
    try:
        hf = open_hf(file)
    except CheckpointError as error:
        return _damaged(file, str(error))
    source = HfSource(hf)
    faults = [name for name in hf.tensors if as_hex(source.checksum(name)) != tensors.get(name, {}).get("crc32")]
    if faults or entry is not None:
        return _damaged(file, f"not the bytes that were written: {_some(faults or ['its header'])}")
    return _sound(file, f"each of its {len(hf.tensors)} tensors as written (CRC-32)")


def _plan_dataset(prefix: str) -> CheckPlan:
    try:
        sidecar = read_sidecar(prefix)
    except DataError as error:
        damaged = partial(_damaged, with_ending(prefix, ".json"), str(error))
        unknown = [partial(_checked_data, prefix, ending, None) for ending in (".bin", ".idx")]
        return CheckPlan(title=f"{prefix}: a dataset", checks=[*unknown, damaged])
    checksums = {".bin": sidecar.bin_crc32, ".idx": sidecar.idx_crc32} if sidecar else {}
    title = f"{prefix}: {NOTHING_RECORDED} ({prefix}.json is not there): only the index and the lengths are looked at"
    if sidecar is not None:
        title = f"{prefix}: {sidecar.documents} documents, {sidecar.tokens} tokens"
    return CheckPlan(
        title=title,
        checks=[partial(_checked_data, prefix, ending, checksums.get(ending)) for ending in (".bin", ".idx")],
    )


def _checked_data(prefix: str, ending: str, crc: str | None) -> CheckedFile:
    file = with_ending(prefix, ending)
    if not file.is_file():
        return _missing(file.name)
    if crc:
        return _sound(file) if crc32_of(file) == crc else _damaged(file, "not the bytes that were written")
    try:
        read_index(prefix)
    except DataError as error:
        return _damaged(file, str(error))
    return _sound(file, f"{NOTHING_RECORDED}; index and length agree")


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return f"{', '.join(names[:MAX_LISTED])}{more}"


def _sound(file: Path, finding: str = AS_WRITTEN) -> CheckedFile:
    return CheckedFile(name=file.name, num_bytes=file.stat().st_size, finding=finding, verdict="sound")


def _damaged(file: Path, finding: str) -> CheckedFile:
    size = file.stat().st_size if file.is_file() else None
    return CheckedFile(name=file.name, num_bytes=size, finding=f"DAMAGED: {finding}", verdict="damaged")


def _missing(name: str) -> CheckedFile:
    return CheckedFile(name=name, num_bytes=None, finding="DAMAGED: it is missing", verdict="damaged")


def _unknown(file: Path) -> CheckedFile:
    return _sound(file, f"not compared: {NOTHING_RECORDED}, or it came later")


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
    one: Path, other: Path, reference: Path | None, mtp: MtpLayers, progress: ByteProgress, family: str | None = None
) -> list[Difference]:
    """Return all differences between two checkpoints; `reference` tells the family where there is no marker."""
    if is_hf(one) and is_hf(other):
        plain = open_hf(one), open_hf(other)
        if plain[0].tensors.keys() == plain[1].tensors.keys():
            # The same names on both sides: no family is needed, and quantized tensors are compared as stored.
            first, second = (
                ComparedCheckpoint(
                    path=folder.path,
                    targets={name: as_stored(folder, name) for name in folder.tensors},
                    source=HfSource(folder),
                )
                for folder in plain
            )
            differences = _config_differences(*(_config_of(folder) for folder in plain))
            return [*differences, *_compared(first, second, progress)]
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


def open_model(path: Path, reference: Path | None, mtp: MtpLayers, family: str | None = None) -> HfModel | DistModel:
    """Return a checkpoint of either format; one of Megatron's without a family takes that of `reference`."""
    if is_hf(path):
        return open_hf_model(path, mtp=mtp, family=family)
    try:
        return open_dist_model(path, mtp=mtp)
    except CheckpointError:
        if reference is None:
            raise
        return open_dist_model(path, reference, mtp=mtp)


def _as_hf_tensors(found: HfModel | DistModel, repeated: Collection[str]) -> ComparedCheckpoint:
    """Return a model as Hugging Face's tensors, one for each expert, and those of `repeated` in any case."""
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
        targets[name] = TargetTensor(name=name, shape=shape, dtype=dtype, copies=copies[name])
    for copy in weights.copies:
        if copy.name in repeated:
            original = targets[copy.original]
            targets[copy.name] = replace(original, name=copy.name)
            if isinstance(found, HfModel) and copy.name in found.folder.tensors:
                stored = RegionCopy(whole(original.shape), copy.name, whole(original.shape))
                targets[copy.name] = replace(targets[copy.name], dtype=found.dtype(copy.name), copies=Copies([stored]))
    return ComparedCheckpoint(path=found.folder.path, targets=targets, source=found.source())


def _config_of(folder: HfFolder) -> ModelConfig | None:
    try:
        return checked_model_from_hf(folder.config or {})
    except ConfigError:
        return None


def _config_differences(one: ModelConfig | None, other: ModelConfig | None) -> Iterator[Difference]:
    if one is not None and other is not None:
        for line in disagreements(one, other):
            yield Difference("config", line)


def _compared(one: ComparedCheckpoint, other: ComparedCheckpoint, progress: ByteProgress) -> Iterator[Difference]:
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
