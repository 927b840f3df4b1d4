"""A conversion as a plan: targets and tasks, source and writer, and a forecast of its memory."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from typing import Protocol

from mcore_rl.convert.copying.content import ChunkBytes
from mcore_rl.convert.copying.plan import CopyTask, TargetTensor, digest
from mcore_rl.convert.copying.source import TensorSource
from mcore_rl.errors import CheckpointError
from mcore_rl.metrics.progress import readable_bytes
from mcore_rl.storage.checksums import PartChecksum
from mcore_rl.storage.files import sizes_and_times

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
    """The result of writing a chunk: its bytes in the file, its checksum, and the checksums of the bytes it was made
    of.
    """

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
    """Sentences for the user."""
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
            yield f"{target.name:<{width}}  {dtype:<8} {shape:<22} {size:>11}  <- {_origin(target)}"
        workers = self.workers_within(settings)
        yield f"output: {self.final}, {len(self.targets)} tensors, {readable_bytes(self.num_bytes)} on disk"
        yield (
            f"memory: at most {readable_bytes(self.memory_forecast(workers))} with {workers} worker(s); the largest "
            f"chunk is {readable_bytes(self.largest_chunk_bytes)}"
        )


def _origin(target: TargetTensor) -> str:
    """Return the first source of a target, and how many more there are."""
    names = [name for name, _ in groupby(copy.source for copy in target.copies)]
    unique = list(dict.fromkeys(names))
    return unique[0] + (f" and {len(unique) - 1} more, to {unique[-1]}" if len(unique) > 1 else "")
