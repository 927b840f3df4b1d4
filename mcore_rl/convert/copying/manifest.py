"""manifest.json beside the output: from what, by which rules, and a checksum of every tensor."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mcore_rl import __version__
from mcore_rl.convert.copying.checksums import Part, joined
from mcore_rl.convert.copying.plan import Target, Task
from mcore_rl.convert.copying.sources import HfSource, Run
from mcore_rl.convert.copying.workers import Record
from mcore_rl.convert.hf.folder import HfFolder
from mcore_rl.files import write_atomically

MANIFEST = "manifest.json"
RULES_VERSION = 2
"""Counts the changes after which the same input gives other bytes."""


def write_manifest(
    folder: Path,
    plan: str,
    facts: Mapping[str, Any],
    sources: Mapping[str, Any],
    done: Sequence[tuple[Task, list[Record]]],
) -> None:
    """`facts` is what the kind of conversion has to say, `sources` what it read."""
    manifest = {
        "program": f"mcore_rl {__version__}",
        "rules_version": RULES_VERSION,
        "plan_sha256": plan,
        **facts,
        "sources": sources,
        "tensors": tensor_checksums(done),
    }
    write_atomically(folder / MANIFEST, json.dumps(manifest, indent=1) + "\n")


def tensor_checksums(done: Iterable[tuple[Task, list[Record]]]) -> dict[str, Any]:
    """Shape, type and the CRC-32 of the bytes of each tensor, however it was cut."""
    parts: dict[str, list[Part]] = {}
    targets: dict[str, Target] = {}
    for task, records in done:
        for chunk, record in zip(task.chunks, records, strict=True):
            targets[chunk.target.name] = chunk.target
            parts.setdefault(chunk.target.name, []).append(Part(chunk.start, chunk.num_bytes, record.crc))
    return {
        name: {
            "shape": list(target.shape),
            "dtype": str(target.dtype).removeprefix("torch."),
            "crc32": _hex(joined(parts[name], target.num_bytes)),
        }
        for name, target in targets.items()
    }


def hf_sources(folder: HfFolder, done: Iterable[tuple[Task, list[Record]]]) -> dict[str, Any]:
    """The files that were read, and the CRC-32 of each tensor; those that were not read by rows are read once more."""
    parts: dict[str, list[Part]] = {}
    for _, records in done:
        for record in records:
            for name, part in record.sources:
                parts.setdefault(name, []).append(part)
    source = HfSource(folder)
    checksums = {}
    for name, stored in sorted(folder.tensors.items()):
        crc = joined(parts.get(name, ()), stored.num_bytes)
        if crc is None:
            crc = source.checksum(Run(stored.file, stored.start, stored.num_bytes, stored.dtype, 0))
        checksums[name] = _hex(crc)
    files = {
        name: {"bytes": size, "header_sha256": folder.headers[name]} for name, size in folder.files.items()
    }
    return {"files": files, "config": folder.config, "tensors": checksums}


def _hex(crc: int | None) -> str | None:
    return None if crc is None else f"{crc:08x}"
