"""A conversion as a plan (targets and tasks, source and writer, a forecast of its memory), and its manifest.json."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

from mcore_rl import __version__
from mcore_rl.config.model import ModelConfig
from mcore_rl.convert.copying.tensors import ChunkBytes, CopyTask, TargetTensor, TensorSource, digest
from mcore_rl.errors import CheckpointError, DamagedCheckpointError
from mcore_rl.metrics.progress import readable_bytes
from mcore_rl.storage.archives import FilePart
from mcore_rl.storage.checkpoint import MANIFEST, MARKER, find_checkpoint, read_marker
from mcore_rl.storage.checksums import PartChecksum, as_hex, crc32_of, joined
from mcore_rl.storage.files import foreign_files, sizes_and_times, write_atomically
from mcore_rl.storage.folders import read_json
from mcore_rl.workers.imports import checkpoint_of

RULES_VERSION = 3
"""Counts the changes after which the same input gives other bytes."""
PARENT_BYTES = 700 << 20
"""Memory of the program with torch, before it reads anything."""
WORKER_BYTES = 250 << 20
"""Memory of a worker apart from its chunks; most of it is shared with the parent."""
CHUNKS_AT_ONCE = 4
"""A chunk, the file's pages it comes from, and memory for casting or dequantizing."""
TASK_BYTES = 512 << 20
"""Largest size in bytes of a task, unless a single chunk is larger; a killed worker's unfinished task is repeated."""


@dataclass(frozen=True, slots=True)
class WrittenRange:
    """The bytes of a file that a chunk was written to."""

    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class ChunkRecord:
    """The result of writing a chunk: its bytes in the file, its checksum, and those of the bytes it was made of."""

    written: WrittenRange
    crc: int
    sources: tuple[tuple[str, PartChecksum], ...]


RecordedTask = tuple[CopyTask, list[ChunkRecord]]
"""A task that is done, with a record of each of its chunks."""


class TensorWriter(Protocol):
    """Writes the files of a conversion; used by many processes at once."""

    def prepare(self, folder: Path) -> None:
        """Prepare the output before any task; called once, in the parent."""

    def write(self, folder: Path, task: CopyTask, contents: Iterator[ChunkBytes]) -> list[WrittenRange]:
        """Write a task's chunks, one after another; they need not be on the disk when this returns."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CopySettings:
    """Settings of running a conversion; only the sizes of tasks and shards change a byte of the output."""

    workers: int = 1
    max_ram_bytes: int | None = None
    """Largest memory of all processes together; None for no limit."""
    overwrite: bool = False
    task_bytes: int = TASK_BYTES
    shard_bytes: int = 5 << 30
    """Largest size in bytes of a safetensors file, unless a single tensor is larger."""
    chunk_done: Callable[[int], None] | None = None
    """Called in the worker with the number of bytes of each chunk; tests stop a worker with it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversion:
    """A plan of one conversion: its tensors and their sources, and the steps that complete the output."""

    title: str
    """Name of the command, and kind of the output in its manifest."""
    final: Path
    sources: Sequence[tuple[str, Path]]
    """Files and folders that are read, as (name for messages, path); the output must not overlap them."""
    targets: Sequence[TargetTensor]
    tasks: Sequence[CopyTask]
    open_source: Callable[[], TensorSource]
    """Called in each worker."""
    writer: TensorWriter
    identity: str
    """Options, model and everything else that decides the output, except the tasks and the source files."""
    read: Mapping[Path, tuple[int, int]]
    """Size and time of each file that is read, from before it was (`sizes_and_times`): a source that has changed is
    another conversion."""
    finish: Callable[[Path, str, Sequence[RecordedTask]], None]
    """Adds the rest to the folder of files, given the plan's digest and the records of all tasks."""
    named: Callable[[Path], None] = lambda _: None
    """Called with the output's path once it has its name; again after a kill."""
    notes: Sequence[str] = ()
    check: Callable[[Path], None] | None = None
    """Raises a CheckpointError when the complete folder, before it has its final name, differs from the plan."""

    @property
    def num_bytes(self) -> int:
        """Number of bytes of all tensors."""
        return sum(target.num_bytes for target in self.targets)

    @property
    def largest_chunk_bytes(self) -> int:
        """Number of bytes of the largest chunk."""
        return max((chunk.num_bytes for task in self.tasks for chunk in task.chunks), default=0)

    @property
    def plan(self) -> str:
        """SHA-256 of the outputs and their sources."""
        return digest(self.tasks)

    @property
    def attempt(self) -> str:
        """Digest that must be the same for an unfinished conversion to be resumed."""
        read = sorted((file.name, *stamp) for file, stamp in self.read.items())
        return sha256(f"{RULES_VERSION} {self.identity} {read} {self.plan}".encode()).hexdigest()

    @property
    def changed(self) -> list[Path]:
        """Files that no longer exist, or have another size or time than when the conversion was planned."""
        now = sizes_and_times(self.read)
        return [file for file, stamp in self.read.items() if now.get(file) != stamp]

    def memory_forecast(self, workers: int) -> int:
        """Return the largest memory of all processes together, in bytes."""
        return PARENT_BYTES + workers * (WORKER_BYTES + CHUNKS_AT_ONCE * self.largest_chunk_bytes)

    def workers_within(self, settings: CopySettings) -> int:
        """Return how many of the requested workers fit into `max_ram_bytes`. Raises CheckpointError if none does."""
        if settings.workers < 1:
            raise CheckpointError(f"--workers {settings.workers}: wanted at least 1.")
        if settings.max_ram_bytes is None:
            return settings.workers
        for workers in range(settings.workers, 0, -1):
            if self.memory_forecast(workers) <= settings.max_ram_bytes:
                return workers
        raise CheckpointError(
            f"--max-ram {readable_bytes(settings.max_ram_bytes)} is too little: one worker needs "
            f"{readable_bytes(self.memory_forecast(1))} (a chunk: {readable_bytes(self.largest_chunk_bytes)}). Allow "
            "so much."
        )

    def lines(self, settings: CopySettings) -> Iterator[str]:
        """Yield the lines of the conversion's plan, for `convert plan`."""
        width = max((len(target.name) for target in self.targets), default=0)
        for target in self.targets:
            shape = "x".join(map(str, target.shape)) or "scalar"
            dtype = str(target.dtype).removeprefix("torch.")
            size = readable_bytes(target.num_bytes)
            names = list(dict.fromkeys(copy.source for copy in target.copies))
            origin = names[0] + (f" and {len(names) - 1} more, to {names[-1]}" if len(names) > 1 else "")
            yield f"{target.name:<{width}}  {dtype:<8} {shape:<22} {size:>11}  <- {origin}"
        workers = self.workers_within(settings)
        yield f"output: {self.final}, {len(self.targets)} tensors, {readable_bytes(self.num_bytes)} on disk"
        yield (
            f"memory: at most {readable_bytes(self.memory_forecast(workers))} with {workers} worker(s); the largest "
            f"chunk is {readable_bytes(self.largest_chunk_bytes)}"
        )


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
    path = checkpoint
    seen: set[Path] = set()
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
    folder: Path, plan: str, description: Mapping[str, Any], sources: Mapping[str, Any], done: Sequence[RecordedTask]
) -> None:
    """Write the manifest into the output.

    Args:
        folder: The output so far.
        plan: Digest of the conversion's tasks.
        description: Entries of this kind of conversion, such as its kind, the family and the layout.
        sources: Description of the sources that were read.
        done: All tasks with their records.
    """
    parts: dict[str, list[PartChecksum]] = {}
    targets: dict[str, TargetTensor] = {}
    for task, records in done:
        for chunk, record in zip(task.chunks, records, strict=True):
            targets[chunk.target.name] = chunk.target
            parts.setdefault(chunk.target.name, []).append(PartChecksum(chunk.start, chunk.num_bytes, record.crc))
    tensors: dict[str, Any] = {}
    for name, target in targets.items():
        # The same however the tensor was cut into chunks.
        crc = joined(parts[name], target.num_bytes)
        assert crc is not None, f"the chunks of {name} do not make it up"
        dtype = str(target.dtype).removeprefix("torch.")
        tensors[name] = {"shape": list(target.shape), "dtype": dtype, "crc32": as_hex(crc)}
    manifest = {
        "program": f"mcore_rl {__version__}",
        "rules_version": RULES_VERSION,
        "plan_sha256": plan,
        **description,
        "sources": sources,
        "tensors": tensors,
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
            header = PartChecksum(0, header_bytes, FilePart(opened.fileno(), 0, header_bytes).crc32(0, header_bytes))
        crc = joined([header, *known], size) if known else None
        checksums[name] = {"bytes": size, "crc32": crc32_of(file) if crc is None else as_hex(crc)}
    return checksums
