"""manifest.json in the output: its sources, its rules, and a checksum of every tensor."""

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from mcore_rl import __version__
from mcore_rl.config.model import ModelConfig
from mcore_rl.convert.copying.conversion import RULES_VERSION, RecordedTask
from mcore_rl.convert.copying.plan import TargetTensor
from mcore_rl.errors import CheckpointError, DamagedCheckpointError
from mcore_rl.storage.checkpoint import MANIFEST, MARKER, find_checkpoint, read_marker
from mcore_rl.storage.checksums import PartChecksum, as_hex, crc32_of, joined
from mcore_rl.storage.files import foreign_files, write_atomically
from mcore_rl.storage.foreign.archives import FilePart
from mcore_rl.storage.huggingface import read_json
from mcore_rl.workers.imports import checkpoint_of


def foreign_to(kind: str, folder: Path) -> str | None:
    """Return the end of a sentence about files in `folder` that no conversion of this kind wrote; None if all are ours.

    Every byte is read: weights that somebody has trained or edited in place have the same names and lengths as ours.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        written = str(manifest["kind"])
        files = {name: (entry["bytes"], entry["crc32"]) for name, entry in manifest.get("files", {}).items()}
        if (folder / MARKER).is_file():
            marker = read_marker(folder)
            files = {name: (size, marker.crc32.get(name, "")) for name, size in marker.files.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, DamagedCheckpointError):
        return f"was not written by `convert {kind}`: it has no {MANIFEST} of one"
    if written != kind:
        return f"was written by `convert {written}`, not by `convert {kind}`"

    def recorded(name: str) -> str | None:
        if name in (MANIFEST, MARKER) and name not in files:
            return None
        if name not in files:
            return "not in the manifest"
        size, crc = files[name]
        if (folder / name).stat().st_size != size or crc32_of(folder / name) != crc:
            return "changed since"
        return None

    return foreign_files(folder, recorded)


def import_behind(checkpoint: Path) -> dict[str, Any]:
    """Return the entry `sources` in the manifest of the import that a checkpoint began as, be it by way of relayouts
    and runs; empty where that import is not there any more, or there was none.
    """
    path, seen = checkpoint, set[Path]()
    while path not in seen:
        seen.add(path)
        manifest = read_json(path / MANIFEST) if (path / MANIFEST).is_file() else {}
        if found := manifest["sources"] if manifest.get("kind") == "import" else manifest.get("import"):
            return dict(found)
        settings = read_marker(path).settings if (path / MARKER).is_file() else {}
        if load := settings.get("checkpoint", {}).get("load"):
            model = ModelConfig.model_validate(settings["model"])
            with suppress(CheckpointError):
                path = find_checkpoint(checkpoint_of(load, model, Path(settings["run_dir"])))
    return {}


def write_manifest(
    folder: Path,
    plan: str,
    description: Mapping[str, Any],
    sources: Mapping[str, Any],
    done: Sequence[RecordedTask],
) -> None:
    """Write the manifest into the output.

    Args:
        folder: The output so far.
        plan: Digest of the conversion's tasks.
        description: Entries of this kind of conversion, such as its kind, the family and the layout.
        sources: Description of the sources that were read.
        done: All tasks with their records.
    """
    manifest = {
        "program": f"mcore_rl {__version__}",
        "rules_version": RULES_VERSION,
        "plan_sha256": plan,
        **description,
        "sources": sources,
        "tensors": _tensor_checksums(done),
    }
    write_atomically(folder / MANIFEST, json.dumps(manifest, indent=1) + "\n")


def file_checksums(folder: Path, done: Iterable[RecordedTask]) -> dict[str, dict[str, Any]]:
    """Return length and CRC-32 of each file of the output so far; the tasks' output is not read again."""
    parts: dict[str, list[PartChecksum]] = {}
    for task, records in done:
        for record in records:
            written = PartChecksum(record.written.offset, record.written.length, record.crc)
            parts.setdefault(task.file, []).append(written)
    checksums = {}
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = file.relative_to(folder).as_posix()
        if name == MANIFEST:  # of a run that was killed after it had written it
            continue
        size, known = file.stat().st_size, parts.get(name, [])
        header_bytes = min((part.start for part in known), default=0)
        with file.open("rb") as opened:
            header = PartChecksum(
                0, header_bytes, FilePart(opened.fileno(), 0, header_bytes).crc32(0, header_bytes)
            )
        crc = joined([header, *known], size) if known else None
        checksums[name] = {"bytes": size, "crc32": crc32_of(file) if crc is None else as_hex(crc)}
    return checksums


def _tensor_checksums(done: Iterable[RecordedTask]) -> dict[str, Any]:
    """Return shape, type and the CRC-32 of the bytes of each tensor, however it was cut into chunks."""
    parts: dict[str, list[PartChecksum]] = {}
    targets: dict[str, TargetTensor] = {}
    for task, records in done:
        for chunk, record in zip(task.chunks, records, strict=True):
            targets[chunk.target.name] = chunk.target
            parts.setdefault(chunk.target.name, []).append(
                PartChecksum(chunk.start, chunk.num_bytes, record.crc)
            )
    checksums = {}
    for name, target in targets.items():
        crc = joined(parts[name], target.num_bytes)
        assert crc is not None, f"the chunks of {name} do not make it up"
        checksums[name] = {
            "shape": list(target.shape),
            "dtype": str(target.dtype).removeprefix("torch."),
            "crc32": as_hex(crc),
        }
    return checksums
