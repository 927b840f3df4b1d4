"""manifest.json beside the output: from what it was made, by which rules, and a checksum of every tensor."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mcore_rl import __version__
from mcore_rl.checksums import PartChecksum, as_hex, joined
from mcore_rl.convert.copying.conversion import RULES_VERSION, RecordedTask
from mcore_rl.convert.copying.plan import TargetTensor
from mcore_rl.files import write_atomically

MANIFEST = "manifest.json"


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
        sources: What was read.
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
