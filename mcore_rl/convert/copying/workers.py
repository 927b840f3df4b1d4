"""Tasks done by processes that know nothing of each other; what is done is on record and not done again."""

import gc
import itertools
import json
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from mcore_rl.convert.copying.checksums import Part
from mcore_rl.convert.copying.content import Content, Scratch
from mcore_rl.convert.copying.plan import Task
from mcore_rl.convert.copying.progress import ByteProgress
from mcore_rl.convert.copying.sources import Source
from mcore_rl.convert.copying.writers import Placed, Writer
from mcore_rl.errors import CheckpointError, McoreRlError
from mcore_rl.files import checkpoint_errors_explained, flush_to_disk, write_atomically


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
    todo = _dealt([task for task in job.tasks if not record_file(job.records, task.index).exists()])
    with checkpoint_errors_explained(job.folder, "preparing the files in"):
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


def _dealt(tasks: Sequence[Task]) -> list[Task]:
    """A task of each file in turn: processes that write to one file wait for each other."""
    files: dict[str, list[Task]] = {}
    for task in tasks:
        files.setdefault(task.file, []).append(task)
    turns = itertools.zip_longest(*files.values())
    return [task for turn in turns for task in turn if task is not None]


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
    gc.freeze()  # the plan, which is there to stay
    try:
        with ThreadPoolExecutor(1) as disk:
            for task in _done(job, todo, turn, disk):
                sender.send(Event(task.index, task.num_bytes, _peak_rss_bytes(), number))
        sender.send(None)
    except McoreRlError as error:
        sender.send(error)
    except OSError as error:
        sender.send(CheckpointError(f"writing {job.folder} failed: {error.strerror or error}"))
    except BaseException:
        sender.send(RuntimeError(f"a worker failed:\n{traceback.format_exc()}"))
        raise


def _done(job: Job, todo: Sequence[Task], turn: Any, disk: ThreadPoolExecutor) -> Iterator[Task]:
    """The tasks that this worker did, each when it is on record. While the disk has one, the next is made."""
    source = job.open_source()
    parent = os.getppid()
    writing: Future[Task] | None = None
    while True:
        with turn.get_lock():
            index, turn.value = turn.value, turn.value + 1
        made = _make(job, todo[index], source, parent) if index < len(todo) else None
        if writing is not None:
            yield writing.result()
        if made is None:
            break
        writing = disk.submit(_record, job, todo[index], made)


def _make(job: Job, task: Task, source: Source, parent: int) -> list[Record]:
    """Write the chunks of a task."""
    found: list[Content] = []
    scratch = Scratch()

    def contents() -> Iterator[Content]:
        for number, chunk in enumerate(task.chunks):
            for pair in (pair for later in task.chunks[number + 1 : number + 2] for pair in later.pairs):
                source.prefetch(pair.source, pair.where)
            if os.getppid() != parent:
                os._exit(1)  # killed with nobody to tell
            found.append(Content(chunk, source, scratch))
            yield found[-1]
            if job.chunk_done:
                job.chunk_done(chunk.num_bytes)

    placed = job.writer.write(job.folder, task, contents())
    return [Record(place, content.crc, content.sources) for place, content in zip(placed, found, strict=True)]


def _record(job: Job, task: Task, made: Sequence[Record]) -> Task:
    """When the task's file is on the disk, its record is."""
    flush_to_disk(job.folder / task.file)
    entries = [[[record.placed.offset, record.placed.length], record.crc, record.sources] for record in made]
    write_atomically(record_file(job.records, task.index), json.dumps(entries))
    return task


def _peak_rss_bytes() -> int:
    """The most memory this process has held."""
    with open("/proc/self/status", encoding="utf-8") as status:
        line = next((line for line in status if line.startswith("VmHWM:")), "VmHWM: 0 kB")
    return int(line.split()[1]) * 1024
