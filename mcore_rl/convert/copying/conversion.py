"""One conversion from plan to output: the same few steps whatever the formats."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from mcore_rl.convert.copying.manifest import RULES_VERSION
from mcore_rl.convert.copying.plan import Target, Task, digest
from mcore_rl.convert.copying.progress import ByteProgress, shown
from mcore_rl.convert.copying.sources import Source
from mcore_rl.convert.copying.work_folder import WorkFolder, complete, working
from mcore_rl.convert.copying.workers import Job, Record, records_of, run
from mcore_rl.convert.copying.writers import Writer
from mcore_rl.errors import CheckpointError

PARENT_BYTES = 700 << 20
"""What the program takes with torch, before it reads anything."""
WORKER_BYTES = 250 << 20
"""What a worker takes beside its chunks; most of its memory it shares with the parent."""
CHUNKS_AT_ONCE = 4
"""A chunk, the file's pages it comes from, and what casting or dequantising needs."""
TASK_BYTES = 512 << 20
"""A task is not larger, unless one chunk is; what a killed worker has begun is done again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How a conversion is run; of these only the sizes of tasks and shards change a byte of the output."""

    workers: int = 1
    max_ram_bytes: int = 0
    """0: whatever it takes."""
    overwrite: bool = False
    task_bytes: int = TASK_BYTES
    shard_bytes: int = 5 << 30
    """Of a safetensors file."""
    chunk_done: Callable[[int], None] | None = None
    """See Job."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversion:
    """A plan: what is written from what, and what is added at the end."""

    title: str
    final: Path
    targets: Sequence[Target]
    tasks: Sequence[Task]
    open_source: Callable[[], Source]
    writer: Writer
    identity: str
    """Of the source's files: a source that has changed is another conversion."""
    finish: Callable[[Path, str, Sequence[tuple[Task, list[Record]]]], None]
    """Adds the rest to the folder of files; is given the plan's digest and what is on record."""
    publish: Callable[[Path, Path], None]
    notes: Sequence[str] = ()
    """What the user should know."""

    @property
    def num_bytes(self) -> int:
        """Of all tensors."""
        return sum(target.num_bytes for target in self.targets)

    @property
    def largest_chunk_bytes(self) -> int:
        """Of all tasks."""
        return max((chunk.num_bytes for task in self.tasks for chunk in task.chunks), default=0)

    @property
    def plan(self) -> str:
        """SHA-256 of what is written from what."""
        return digest(self.tasks)

    @property
    def attempt(self) -> str:
        """What must be the same for an unfinished conversion to go on."""
        return sha256(f"{RULES_VERSION} {self.identity} {self.plan}".encode()).hexdigest()


def convert(conversion: Conversion, settings: Settings, progress: ByteProgress) -> Path:
    """Run a conversion, or go on with it; where the output is. What can be refused is refused before writing."""
    workers = workers_within(conversion, settings)
    for note in conversion.notes:
        progress.say(note)
    if workers < settings.workers:
        progress.say(
            f"{workers} of {settings.workers} workers, as --max-ram {shown(settings.max_ram_bytes)} holds no more"
        )
    attempt, room = conversion.attempt, conversion.num_bytes
    with working(conversion.final, attempt, room, overwrite=settings.overwrite) as work:
        run(_job(conversion, settings, work), workers, progress, conversion.title)
        conversion.finish(work.out, conversion.plan, list(records_of(work.records, conversion.tasks)))
        complete(work, conversion.publish)
    progress.event(
        "end", output=str(conversion.final), bytes=conversion.num_bytes, seconds=round(progress.seconds, 3)
    )
    size = f"{len(conversion.targets)} tensors, {shown(conversion.num_bytes)}"
    progress.say(f"{conversion.final}: {size}, {progress.seconds:.1f} s")
    return conversion.final


def memory_forecast(conversion: Conversion, workers: int) -> int:
    """Bytes that all processes together hold at most."""
    return PARENT_BYTES + workers * (WORKER_BYTES + CHUNKS_AT_ONCE * conversion.largest_chunk_bytes)


def workers_within(conversion: Conversion, settings: Settings) -> int:
    """As many workers as --max-ram holds, of those that were asked for."""
    if settings.workers < 1:
        raise CheckpointError(f"--workers {settings.workers}: wanted at least 1.")
    for workers in range(settings.workers, 0, -1):
        if not settings.max_ram_bytes or memory_forecast(conversion, workers) <= settings.max_ram_bytes:
            return workers
    raise CheckpointError(
        f"--max-ram {shown(settings.max_ram_bytes)} is too little: one worker needs "
        f"{shown(memory_forecast(conversion, 1))} (a chunk: {shown(conversion.largest_chunk_bytes)}). Allow so much."
    )


def files_identity(folder: Path, names: Sequence[str]) -> str:
    """Names, sizes and times of files."""
    stats = [(name, (folder / name).stat()) for name in names]
    return repr([(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats])


def _job(conversion: Conversion, settings: Settings, work: WorkFolder) -> Job:
    return Job(
        folder=work.out,
        records=work.records,
        tasks=conversion.tasks,
        open_source=conversion.open_source,
        writer=conversion.writer,
        chunk_done=settings.chunk_done,
    )
