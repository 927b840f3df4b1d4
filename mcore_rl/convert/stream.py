"""Tasks done by processes that know nothing of each other; what is done is on record and not done again."""

import json
import math
import multiprocessing
import os
import signal
import traceback
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcore_rl.convert.checksums import Part, as_bytes
from mcore_rl.convert.planning import Chunk, Task
from mcore_rl.convert.progress import ByteProgress
from mcore_rl.convert.sources import Source, sizes
from mcore_rl.convert.writers import Placed, Writer
from mcore_rl.errors import CheckpointError, McoreRlError
from mcore_rl.model.checkpoint.folder import naming, write_atomically
from mcore_rl.model.weight_map import Shape


@dataclass(frozen=True, slots=True)
class Record:
    """What became of a chunk: where it is, its checksum, and those of what it was made of."""

    placed: Placed
    crc: int
    sources: tuple[tuple[str, Part], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Everything that a worker needs."""

    folder: Path
    """Where the files are written."""
    records: Path
    """Where it is written down which tasks are done."""
    tasks: Sequence[Task]
    open_source: Callable[[], Source]
    """Called in each worker."""
    writer: Writer
    chunk_done: Callable[[int], None] | None = None
    """Called in the worker with the bytes of each chunk; tests hold a worker up with it."""


@dataclass(frozen=True, slots=True)
class Event:
    """A worker has finished a task: how large it is, and the most memory that the worker has held."""

    task: int
    num_bytes: int
    peak_rss_bytes: int
    worker: int


def run(job: Job, workers: int, progress: ByteProgress, title: str) -> None:
    """Do every task that has no record. CheckpointError when a worker fails; the others are stopped then."""
    job.records.mkdir(exist_ok=True)
    todo = [task for task in job.tasks if not record_file(job.records, task.index).exists()]
    with naming(job.folder, "preparing the files in"):
        job.writer.prepare(job.folder)
    total, left = (sum(task.num_bytes for task in tasks) for tasks in (job.tasks, todo))
    context = multiprocessing.get_context("fork")
    turn = context.Value("l", 0)
    pipes: dict[Connection, Any] = {}
    for number in range(min(workers, len(todo))):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_work, args=(job, todo, turn, sender, number), daemon=True)
        process.start()
        sender.close()
        pipes[receiver] = process
    # Only now, as it starts a thread, which a process that forks must not have.
    progress.begin(title, total, total - left)
    try:
        _listen(pipes, progress)
    finally:
        for process in pipes.values():
            process.terminate()
            process.join()


def records_of(folder: Path, tasks: Sequence[Task]) -> Iterator[tuple[Task, list[Record]]]:
    """Each task with the records of its chunks."""
    for task in tasks:
        saved = json.loads(record_file(folder, task.index).read_text(encoding="utf-8"))
        yield (
            task,
            [
                Record(Placed(*entry[0]), entry[1], tuple((name, Part(*part)) for name, part in entry[2]))
                for entry in saved
            ],
        )


def record_file(folder: Path, index: int) -> Path:
    """The record of a task."""
    return folder / f"{index}.json"


class Scratch:
    """Memory for one chunk after another: fresh pages for each would cost as much as the copy."""

    def __init__(self) -> None:
        self._memory = bytearray()

    def tensor(self, shape: Shape, dtype: torch.dtype) -> Tensor:
        """A tensor of anything, whose storage is no larger than itself; the one before must not be used any more."""
        count = math.prod(shape)
        if len(self._memory) < count * dtype.itemsize:
            self._memory = bytearray(count * dtype.itemsize)
        if not count:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self._memory, dtype=dtype, count=count).view(shape)


@torch.no_grad()
def fill(chunk: Chunk, source: Source, scratch: Scratch | None = None) -> Tensor:
    """The elements of a chunk."""
    made = (scratch or Scratch()).tensor(sizes(chunk.where), chunk.target.dtype)
    if sum(math.prod(sizes(pair.into)) for pair in chunk.pairs) < made.numel():
        made.zero_()
    for pair in chunk.pairs:
        out = made[tuple(slice(*span) for span in pair.into)]
        source.fill(out.mT if pair.transposed else out, pair.source, pair.where)
    return made


def _listen(pipes: dict[Connection, Any], progress: ByteProgress) -> None:
    waiting = dict(pipes)
    while waiting:
        for pipe in wait(list(waiting)):
            assert isinstance(pipe, Connection)
            try:
                message = pipe.recv()
            except EOFError:
                process = waiting.pop(pipe)
                process.join()
                raise CheckpointError(
                    f"a worker was ended by signal {-process.exitcode} (9: out of memory?). The same command goes on "
                    "where it was; with fewer --workers it takes less memory."
                ) from None
            if message is None:
                waiting.pop(pipe).join()
            elif isinstance(message, Event):
                progress.add(message.num_bytes, asdict(message))
            else:
                raise message


def _work(job: Job, todo: Sequence[Task], turn: Any, sender: Connection, number: int) -> None:
    """A worker: takes the next task until none is left."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's to handle
    torch.set_num_threads(1)
    parent = os.getppid()
    try:
        source = job.open_source()
        while True:
            with turn.get_lock():
                index, turn.value = turn.value, turn.value + 1
            if index >= len(todo):
                break
            _do(job, todo[index], source, parent)
            sender.send(Event(todo[index].index, todo[index].num_bytes, _peak_rss_bytes(), number))
        sender.send(None)
    except McoreRlError as error:
        sender.send(error)
    except OSError as error:
        sender.send(CheckpointError(f"writing {job.folder} failed: {error.strerror or error}"))
    except BaseException:
        sender.send(RuntimeError(f"a worker failed:\n{traceback.format_exc()}"))
        raise


def _do(job: Job, task: Task, source: Source, parent: int) -> None:
    found: list[tuple[int, list[tuple[str, Part]]]] = []
    scratch = Scratch()

    def tensors() -> Iterator[Tensor]:
        for number, chunk in enumerate(task.chunks):
            for pair in (pair for later in task.chunks[number + 1 : number + 2] for pair in later.pairs):
                source.prefetch(pair.source, pair.where)
            if os.getppid() != parent:
                os._exit(1)  # killed with nobody to tell
            parts = [(pair.source, source.checksum(pair.source, pair.where)) for pair in chunk.pairs]
            made = fill(chunk, source, scratch)
            found.append(
                (zlib.crc32(as_bytes(made)), [(name, part) for name, part in parts if part is not None])
            )
            yield made
            if job.chunk_done:
                job.chunk_done(chunk.num_bytes)

    placed = job.writer.write(job.folder, task, tensors())
    entries = [
        [[place.offset, place.length], crc, parts] for place, (crc, parts) in zip(placed, found, strict=True)
    ]
    write_atomically(record_file(job.records, task.index), json.dumps(entries))


def _peak_rss_bytes() -> int:
    """The most memory this process has held."""
    with open("/proc/self/status", encoding="utf-8") as status:
        line = next((line for line in status if line.startswith("VmHWM:")), "VmHWM: 0 kB")
    return int(line.split()[1]) * 1024
