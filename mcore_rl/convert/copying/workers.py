"""Run tasks in processes that share nothing; finished tasks are recorded and not repeated."""

import gc
import itertools
import json
import multiprocessing
import os
import signal
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from mcore_rl.convert.copying.content import ChunkBytes, ScratchMemory
from mcore_rl.convert.copying.conversion import (
    ChunkRecord,
    Conversion,
    CopySettings,
    RecordedTask,
    WrittenRange,
)
from mcore_rl.convert.copying.plan import CopyTask
from mcore_rl.convert.copying.source import TensorSource
from mcore_rl.errors import CheckpointError, McoreRlError
from mcore_rl.metrics.progress import ByteProgress
from mcore_rl.storage.checksums import PartChecksum
from mcore_rl.storage.files import flush_to_disk, write_atomically


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyJob:
    """A conversion and where it is written."""

    conversion: Conversion
    settings: CopySettings
    out: Path
    """Folder of the output so far."""
    records: Path
    """Folder of the records of tasks that are done."""

    def record_file(self, task: CopyTask) -> Path:
        """Return the path of a task's record."""
        return self.records / f"{task.index}.json"

    def recorded_tasks(self) -> Iterator[RecordedTask]:
        """Yield each task with the records of its chunks."""
        for task in self.conversion.tasks:
            entries = json.loads(self.record_file(task).read_text(encoding="utf-8"))
            yield (
                task,
                [
                    ChunkRecord(
                        WrittenRange(*written),
                        crc,
                        tuple((name, PartChecksum(*part)) for name, part in sources),
                    )
                    for written, crc, sources in entries
                ],
            )


@dataclass(frozen=True, slots=True)
class TaskDone:
    """Message of a worker: the task it has finished, its size, and the worker's peak memory."""

    task: int
    num_bytes: int
    peak_rss_bytes: int
    worker: int


def run_tasks(job: CopyJob, workers: int, progress: ByteProgress) -> None:
    """Run every task that has no record. Raises CheckpointError, or the disk's OSError, if a worker fails; all other
    workers are then ended.
    """
    job.records.mkdir(exist_ok=True)
    tasks = job.conversion.tasks
    todo = _files_in_turn([task for task in tasks if not job.record_file(task).exists()])
    job.conversion.writer.prepare(job.out)
    total_bytes = sum(task.num_bytes for task in tasks)
    todo_bytes = sum(task.num_bytes for task in todo)
    context = multiprocessing.get_context("fork")
    # Workers take the next task from a shared counter, so fast workers take more tasks.
    next_index = context.Value("l", 0)
    processes: dict[Connection, Any] = {}
    # A worker ignores Ctrl-C from its first line on, and would show a traceback of one that comes sooner.
    unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        for worker in range(min(workers, len(todo))):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_work, args=(job, todo, next_index, sender, worker), daemon=True)
            process.start()
            # Only the worker's copy stays open: when the worker ends, the parent sees the end of the pipe.
            sender.close()
            processes[receiver] = process
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
    # Only now, as it starts a thread, which a process that forks must not have.
    progress.begin(job.conversion.title, total_bytes, total_bytes - todo_bytes)
    try:
        _listen(processes, progress)
    finally:
        for process in processes.values():
            process.terminate()
            process.join()


def _files_in_turn(tasks: Sequence[CopyTask]) -> list[CopyTask]:
    """Order tasks so that each file has a turn: processes that write to one file wait for each other."""
    files: dict[str, list[CopyTask]] = {}
    for task in tasks:
        files.setdefault(task.file, []).append(task)
    turns = itertools.zip_longest(*files.values())
    return [task for turn in turns for task in turn if task is not None]


def _listen(processes: dict[Connection, Any], progress: ByteProgress) -> None:
    """Report the workers' messages until all have ended; raise the first worker's error."""
    waiting = dict(processes)
    while waiting:
        for pipe in wait(list(waiting)):
            assert isinstance(pipe, Connection)
            try:
                message = pipe.recv()
            except EOFError:
                process = waiting.pop(pipe)
                process.join()
                raise CheckpointError(
                    f"a worker was ended by signal {-process.exitcode} (9: out of memory?). The same command resumes "
                    "it; with fewer --workers it takes less memory."
                ) from None
            if message is None:
                waiting.pop(pipe).join()
            elif isinstance(message, TaskDone):
                progress.add(message.num_bytes, asdict(message))
            else:
                raise message


def _work(job: CopyJob, todo: Sequence[CopyTask], next_index: Any, sender: Connection, worker: int) -> None:
    """Take the next task until none is left; send a TaskDone for each, then None, or an exception, also the disk's."""
    # Ctrl-C reaches all processes of the terminal: the parent handles it and ends the workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    # The collector would touch, and so copy, all pages of the plan that are shared with the parent.
    gc.freeze()
    try:
        with ThreadPoolExecutor(1) as disk:
            for task in _finished_tasks(job, todo, next_index, disk):
                sender.send(TaskDone(task.index, task.num_bytes, _peak_rss_bytes(), worker))
        sender.send(None)
    except (McoreRlError, OSError) as error:
        sender.send(error)
    except BaseException:
        sender.send(RuntimeError(f"a worker failed:\n{traceback.format_exc()}"))
        raise


def _finished_tasks(
    job: CopyJob, todo: Sequence[CopyTask], next_index: Any, disk: ThreadPoolExecutor
) -> Iterator[CopyTask]:
    """Yield the tasks of this worker once they are recorded. The next task is written while the disk syncs the last."""
    source = job.conversion.open_source()
    parent = os.getppid()
    flushing: Future[CopyTask] | None = None
    while True:
        with next_index.get_lock():
            index, next_index.value = next_index.value, next_index.value + 1
        records = _write(job, todo[index], source, parent) if index < len(todo) else None
        if flushing is not None:
            yield flushing.result()
        if records is None:
            break
        flushing = disk.submit(_record, job, todo[index], records)


def _write(job: CopyJob, task: CopyTask, source: TensorSource, parent: int) -> list[ChunkRecord]:
    """Write the chunks of a task."""
    written: list[ChunkBytes] = []
    scratch = ScratchMemory()

    def contents() -> Iterator[ChunkBytes]:
        for index, chunk in enumerate(task.chunks):
            for copy in (copy for later in task.chunks[index + 1 : index + 2] for copy in later.copies):
                source.prefetch(copy.source, copy.where)
            # If the parent is killed, its workers are reparented: they must end, so that the command can be run again.
            if os.getppid() != parent:
                os._exit(1)
            written.append(ChunkBytes(chunk, source, scratch))
            yield written[-1]
            if job.settings.chunk_done:
                job.settings.chunk_done(chunk.num_bytes)

    ranges = job.conversion.writer.write(job.out, task, contents())
    return [
        ChunkRecord(range_, content.crc, content.sources)
        for range_, content in zip(ranges, written, strict=True)
    ]


def _record(job: CopyJob, task: CopyTask, records: Sequence[ChunkRecord]) -> CopyTask:
    """Record a task as done, once its bytes are on disk: if only the record survived a crash, data would be missing."""
    flush_to_disk(job.out / task.file)
    entries = [
        [[record.written.offset, record.written.length], record.crc, record.sources] for record in records
    ]
    write_atomically(job.record_file(task), json.dumps(entries))
    return task


def _peak_rss_bytes() -> int:
    """Return the peak memory of this process in bytes."""
    with open("/proc/self/status", encoding="utf-8") as status:
        line = next((line for line in status if line.startswith("VmHWM:")), "VmHWM: 0 kB")
    return int(line.split()[1]) * 1024
