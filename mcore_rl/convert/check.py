"""Check that the files of a checkpoint, an export or a dataset are as they were written, without a second copy."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from mcore_rl.convert.hf.folder import open_hf
from mcore_rl.convert.hf.source import HfSource
from mcore_rl.data.index_file import read_index
from mcore_rl.data.sidecar import read_sidecar
from mcore_rl.errors import CheckpointError, DamagedCheckpointError, DataError
from mcore_rl.storage.checkpoint import (
    COMMON,
    FORMAT_FILE,
    MANIFEST,
    MARKER,
    METADATA,
    find_checkpoint,
    length_fault,
    read_marker,
)
from mcore_rl.storage.checkpoints.integrity import check_part
from mcore_rl.storage.checksums import as_hex, crc32_of
from mcore_rl.storage.files import with_ending
from mcore_rl.storage.foreign.archives import FileRange
from mcore_rl.storage.foreign.pickles import load_metadata
from mcore_rl.storage.huggingface import is_hf, read_json

AS_WRITTEN = "as written (CRC-32)"
NOTHING_RECORDED = "nothing was recorded when it was written"
MAX_LISTED = 3
"""Largest number of names listed in a finding."""
DATASET_ENDINGS = (".bin", ".idx", ".json")


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedFile:
    """A file and the comparison that was made."""

    name: str
    num_bytes: int | None
    """Length of the file; None if it is missing."""
    finding: str
    """The comparison that was made, the damage, or the part that could not be checked."""
    verdict: Literal["sound", "damaged", "not understood"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckPlan:
    """The files that a check will read."""

    title: str
    """The checked path, and its kind."""
    checks: Sequence[Callable[[], CheckedFile]]
    """A check for each file."""

    def run(self, workers: int) -> Iterator[CheckedFile]:
        """Yield the findings in the order of the files, reading `workers` files at a time."""
        # Threads suffice: reading and computing checksums release Python's lock.
        with ThreadPoolExecutor(workers) as pool:
            yield from pool.map(_read, self.checks)


def _read(check: Callable[[], CheckedFile]) -> CheckedFile:
    """Return the finding of a check; a disk that cannot be read is damage too."""
    try:
        return check()
    except OSError as error:
        name = Path(str(error.filename or "a file")).name
        return CheckedFile(
            name=name,
            num_bytes=None,
            finding=f"DAMAGED: it cannot be read: {error.strerror}",
            verdict="damaged",
        )


def plan_check(path: Path) -> CheckPlan:
    """Plan the check of a checkpoint, of the newest in a folder, of a Hugging Face folder, or of a .bin/.idx pair.

    Raises:
        CheckpointError: There is nothing to check at `path`.
    """
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
    """Plan the check of a checkpoint by its marker, or if it has no marker, by the checksums inside its archives."""
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
        return CheckPlan(title=title, checks=[*(by_parts or [partial(_missing, METADATA)]), *unknown])
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
        + (
            f": {_some(faults)}"
            if faults
            else "; its parts are sound, so it may be of another step" * bool(parts)
        ),
    )


def _checked_by_parts(path: Path, name: str, parts: Sequence[tuple[str, FileRange]]) -> CheckedFile:
    """Check a file by the checksums in its archives only."""
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
                name=name,
                num_bytes=file.stat().st_size,
                finding=f"NOT UNDERSTOOD: {error}",
                verdict="not understood",
            )
    if not parts:
        return _sound(file, f"{NOTHING_RECORDED}; it can be read")
    return _sound(
        file, f"each of its {len(parts)} parts as written (CRC-32 inside); nothing was recorded of the file"
    )


def _part_faults(path: Path, parts: Iterable[tuple[str, FileRange]]) -> list[str]:
    """Return the keys of the parts with bytes that have changed since they were written."""
    faults = []
    for key, part in parts:
        try:
            check_part(path, key, part)
        except CheckpointError:
            faults.append(key)
    return sorted(set(faults))


def _plan_hf(path: Path) -> CheckPlan:
    """Plan the check of a Hugging Face folder by the manifest of its export, or without a manifest, by its headers."""
    folder = path if path.is_dir() else path.parent
    manifest = folder / MANIFEST
    if not manifest.is_file():
        hf = open_hf(path)
        return CheckPlan(
            title=f"{path}: no {MANIFEST}, as downloaded folders have none: {NOTHING_RECORDED}, and only headers and "
            "lengths are looked at",
            checks=[
                partial(_sound, folder / name, f"{NOTHING_RECORDED}; header and length agree")
                for name in hf.files
            ],
        )
    try:
        recorded = read_json(manifest)
    except CheckpointError as error:
        return CheckPlan(title=f"{path}: an export", checks=[partial(_damaged, manifest, str(error))])
    files, tensors = recorded.get("files", {}), recorded.get("tensors", {})
    names = [path.name] if path.is_file() else sorted({*files, *_shards(folder)})
    later = (
        []
        if path.is_file()
        else sorted(file.name for file in folder.iterdir() if file.name not in {*names, MANIFEST})
    )
    return CheckPlan(
        title=f"{path}: {recorded.get('kind')} of {recorded.get('program')}, step {recorded.get('step', 'unknown')}",
        checks=[partial(_checked_by_manifest, folder, name, files.get(name), tensors) for name in names]
        + [partial(_unknown, folder / name) for name in later],
    )


def _shards(folder: Path) -> Iterator[str]:
    yield from (file.name for file in folder.glob("*.safetensors"))


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
    faults = [
        name for name in hf.tensors if as_hex(source.checksum(name)) != tensors.get(name, {}).get("crc32")
    ]
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
    if any(checksums.values()) and sidecar is not None:
        title = f"{prefix}: {sidecar.documents} documents, {sidecar.tokens} tokens"
    else:
        title = (
            f"{prefix}: {NOTHING_RECORDED} ({prefix}.json "
            f"{'has no checksums' if sidecar else 'is not there'}): only the index and the lengths are looked at"
        )
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
    """Return the first MAX_LISTED names and the number of further names."""
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
