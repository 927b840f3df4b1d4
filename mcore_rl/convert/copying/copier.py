"""Run a conversion: tasks in processes that share nothing; finished tasks are recorded and not repeated."""

import gc
import itertools
import json
import multiprocessing
import os
import shutil
import signal
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from mcore_rl.convert.copying.conversion import (
    ChunkRecord,
    Conversion,
    CopySettings,
    RecordedTask,
    WrittenRange,
    foreign_to,
)
from mcore_rl.convert.copying.tensors import ChunkBytes, CopyTask, ScratchMemory, TensorSource
from mcore_rl.errors import CheckpointError, McoreRlError
from mcore_rl.families.weight_map import listed
from mcore_rl.metrics.progress import ByteProgress, readable_bytes
from mcore_rl.storage import files
from mcore_rl.storage.checksums import PartChecksum

ORPHANS_S = 10.0
"""Seconds that the workers of a killed run may take to notice, after the chunk at hand."""
PLAN, REPLACED, STAMPS = "plan.json", "replaced", "replaced.json"
MARGIN_BYTES = 64 << 20
"""Free space that metadata and file systems take in addition to the tensors."""


def convert(conversion: Conversion, settings: CopySettings, progress: ByteProgress) -> Path:
    """Run a conversion, or resume it, and return the path of the output.

    Raises:
        ConfigError: Before anything is written, when the output overlaps a source, or exists and may not be
            replaced (files.refuse_replacing).
        CheckpointError: Before anything is written, when something else is being converted to the output, or memory or
            disk do not suffice; later, when a worker fails, a source has changed meanwhile, or the output does not pass
            its check.
        DataError: Another process is at work on the same output.
    """
    workers = conversion.workers_within(settings)
    for note in conversion.notes:
        progress.message(note)
    if workers < settings.workers and settings.max_ram_bytes is not None:
        progress.message(
            f"{workers} of {settings.workers} workers, as no more fit into --max-ram "
            f"{readable_bytes(settings.max_ram_bytes)}"
        )
    with _disk_explained(conversion.final), _work_folder(conversion, settings) as (work, replaced):
        job = CopyJob(conversion=conversion, settings=settings, out=work / "out", records=work / "done")
        refusal = run_tasks(job, workers, progress)
        if refusal is None:
            for scratch in job.out.glob(".*.tmp"):  # of a run that was killed while it wrote a small file
                scratch.unlink()
            conversion.finish(job.out, conversion.plan, list(job.recorded_tasks()))
        if refusal := _mixture(conversion) or refusal:
            # No resume can use these files: the next command has another source or other options.
            shutil.rmtree(job.out)
            _tidy(work)
            raise refusal
        if conversion.check is not None:
            conversion.check(job.out)
        files.flush_to_disk(job.out)
        files.write_atomically(work / STAMPS, json.dumps(dict(replaced)))
        files.replace_folder(job.out, conversion.final, work / REPLACED, replaced)
        conversion.named(conversion.final)
        _tidy(work)
    progress.event("end", output=str(conversion.final), bytes=conversion.num_bytes, seconds=round(progress.seconds, 3))
    size = f"{len(conversion.targets)} tensors, {readable_bytes(conversion.num_bytes)}"
    progress.message(f"{conversion.final}: {size}, {progress.seconds:.1f} s")
    return conversion.final


@contextmanager
def _disk_explained(output: Path) -> Iterator[None]:
    """Raise a CheckpointError in place of any OSError: the file, the reason, and on a full disk the free space."""
    try:
        yield
    except OSError as error:
        room = f" {files.room_at(output)}." if error.errno in files.FULL else ""
        raise CheckpointError(
            f"{error.filename or output}: {error.strerror or error}.{room} Mend that, or name another output, and give "
            "the command again: it goes on with what is written."
        ) from error


def _mixture(conversion: Conversion) -> CheckpointError | None:
    """Return the error where the source has changed since the conversion was planned."""
    if not (changed := conversion.changed):
        return None
    lines = [str(file) if file.exists() else f"{file} (gone)" for file in changed]
    return CheckpointError(
        f"the source changed while it was converted, so that {conversion.final} would be a mixture, and is not "
        f"written:\n{listed(lines)}\nGive the command again when nothing writes there."
    )


@contextmanager
def _work_folder(conversion: Conversion, settings: CopySettings) -> Iterator[tuple[Path, files.Stamps]]:
    """Lock the folder in which the output grows, new or as a killed run of the same conversion left it.

    Yields:
        The folder, and the stamps of the earlier output that will be replaced.

    Raises:
        ConfigError, CheckpointError, DataError: As of `convert`, before anything is written.
    """
    final, attempt = conversion.final, conversion.attempt
    files.refuse_overlap(final, conversion.sources)
    # "." has no name, and ".." not its own.
    named = final if final.name not in ("", "..") else Path(os.path.abspath(final))
    work = named.with_name(f"{named.name}.converting")
    lock = partial(files.sole_writer, work / "lock", wait_s=ORPHANS_S, remedy="Wait for it, or end it.")
    # Before the output is looked at: it is not there between the two renames of a run that was killed.
    if os.path.lexists(work):
        known = _known_attempt(work)
        with lock():
            _finish_naming(work, conversion)
    known = _known_attempt(work)
    replaced = files.refuse_replacing(
        final,
        conversion.sources,
        overwrite=settings.overwrite,
        foreign=partial(foreign_to, conversion.title),
        folder=True,
    )
    is_another = known is not None and known != attempt
    if is_another and not settings.overwrite:
        raise CheckpointError(
            f"{work} is an unfinished conversion of something else, or with other options. Give its command again "
            "to resume it, or add --overwrite to drop it."
        )
    _check_room(work, conversion)
    (work / "out").mkdir(parents=True, exist_ok=True)
    with lock():
        if is_another:
            # Under the lock, which a killed run's workers hold until they end: they might write into deleted folders.
            for folder in (work / "out", work / "done"):
                if folder.exists():
                    shutil.rmtree(folder)
            (work / "out").mkdir()
        files.write_atomically(work / PLAN, json.dumps({"plan": attempt}) + "\n")
        yield work, replaced


def _known_attempt(work: Path) -> str | None:
    """Return the digest of the conversion that a killed run left in `work`; None if it has left nothing yet.

    Raises CheckpointError if the folder is the user's, because it would be deleted in the end.
    """
    try:
        known = json.loads((work / PLAN).read_text(encoding="utf-8"))["plan"]
    except FileNotFoundError:
        # A run that was killed before it wrote the plan has made these.
        names = {entry.name for entry in work.iterdir()} if work.is_dir() else set()
        is_new = work.is_dir() and names <= {"out", "lock"} and not any(work.glob("out/*"))
        known = None if is_new or not os.path.lexists(work) else ""
    except (OSError, ValueError, LookupError, TypeError):
        known = ""
    if known == "" or work.is_symlink():
        raise CheckpointError(
            f"{work} is in the way: the output grows there, and no conversion has made it. Move it away, or name "
            "another output."
        )
    return str(known) if known is not None else None


def _finish_naming(work: Path, conversion: Conversion) -> None:
    """Finish or undo the work of a run that was killed while it named its output."""
    if (work / REPLACED).is_dir() and not os.path.lexists(conversion.final):
        files.move_into_place(work / REPLACED, conversion.final)
    if not (work / "out").exists() and (work / PLAN).exists():
        if conversion.final.is_dir():
            conversion.named(conversion.final)
        _tidy(work)


def _tidy(work: Path) -> None:
    """Delete the leftovers when the output has its name; the user's files, should there be any, stay.

    A record that stayed would pass for a task that is done: the next output would be made of holes.
    """
    if (work / REPLACED).is_dir():
        files.delete_files(work / REPLACED, json.loads((work / STAMPS).read_text(encoding="utf-8")))
    if (work / "done").is_dir():
        shutil.rmtree(work / "done")
    # The plan last: it proves that the remaining files belong to a conversion.
    for name in (STAMPS, PLAN, "lock"):
        (work / name).unlink(missing_ok=True)
    with suppress(OSError):
        work.rmdir()


def _check_room(work: Path, conversion: Conversion) -> None:
    existing = files.existing_part(work)
    # st_blocks counts allocated space in units of 512 bytes on any file system, unlike the length of a sparse file.
    taken = sum(file.stat().st_blocks * 512 for file in (work / "out").glob("*"))
    free = shutil.disk_usage(existing).free
    if free + taken < conversion.num_bytes + MARGIN_BYTES:
        raise CheckpointError(
            f"{conversion.final} takes {readable_bytes(conversion.num_bytes)}, with {readable_bytes(MARGIN_BYTES)} to "
            f"spare for the rest, but only {readable_bytes(free)} are free at {existing}. Make room, or name an output "
            "on another disk."
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyJob:
    """A conversion and where it is written."""

    conversion: Conversion
    settings: CopySettings
    out: Path
    records: Path

    def record_file(self, task: CopyTask) -> Path:
        """Return the path of a task's record."""
        return self.records / f"{task.index}.json"

    def recorded_tasks(self) -> Iterator[RecordedTask]:
        """Yield each task with the records of its chunks."""
        for task in self.conversion.tasks:
            records = []
            for written, crc, sources in json.loads(self.record_file(task).read_text(encoding="utf-8")):
                checksums = tuple((name, PartChecksum(*part)) for name, part in sources)
                records.append(ChunkRecord(WrittenRange(*written), crc, checksums))
            yield task, records


@dataclass(frozen=True, slots=True)
class TaskDone:
    """Message of a worker: the task it has finished, its size, and the worker's peak memory."""

    task: int
    num_bytes: int
    peak_rss_bytes: int
    worker: int


def run_tasks(job: CopyJob, workers: int, progress: ByteProgress) -> McoreRlError | None:
    """Run every task that has no record, and return the error of a worker that refuses its source, if any. Raises
    CheckpointError, or the disk's OSError, if a worker fails. All other workers are ended in both cases.
    """
    job.records.mkdir(exist_ok=True)
    by_file: dict[str, list[CopyTask]] = {}
    for task in job.conversion.tasks:
        if not job.record_file(task).exists():
            by_file.setdefault(task.file, []).append(task)
    # A task of each file in turn: processes that write to the same file wait for each other.
    todo = [task for turn in itertools.zip_longest(*by_file.values()) for task in turn if task is not None]
    job.conversion.writer.prepare(job.out)
    total_bytes = sum(task.num_bytes for task in job.conversion.tasks)
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
        return _listen(processes, progress)
    finally:
        for process in processes.values():
            process.terminate()
            process.join()


def _listen(processes: dict[Connection, Any], progress: ByteProgress) -> McoreRlError | None:
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
            elif isinstance(message, McoreRlError):
                return message
            else:
                raise message
    return None


def _work(job: CopyJob, todo: Sequence[CopyTask], next_index: Any, sender: Connection, worker: int) -> None:
    """Take the next task until none is left; send a TaskDone for each, then None, or an exception, also the disk's."""
    # Ctrl-C reaches all processes of the terminal: the parent handles it and ends the workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    # The collector would touch, and so copy, all pages of the plan that are shared with the parent.
    gc.freeze()
    try:
        source, parent = job.conversion.open_source(), os.getppid()
        flushing: Future[CopyTask] | None = None
        with ThreadPoolExecutor(1) as disk:
            while True:
                with next_index.get_lock():
                    index, next_index.value = next_index.value, next_index.value + 1
                # The next task is written while the disk syncs the last.
                records = _write(job, todo[index], source, parent) if index < len(todo) else None
                if flushing is not None:
                    task = flushing.result()
                    sender.send(TaskDone(task.index, task.num_bytes, _peak_rss_bytes(), worker))
                if records is None:
                    break
                flushing = disk.submit(_record, job, todo[index], records)
        sender.send(None)
    except (McoreRlError, OSError) as error:
        sender.send(error)
    except BaseException:
        sender.send(RuntimeError(f"a worker failed:\n{traceback.format_exc()}"))
        raise


def _write(job: CopyJob, task: CopyTask, source: TensorSource, parent: int) -> list[ChunkRecord]:
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
    return [ChunkRecord(range_, content.crc, content.sources) for range_, content in zip(ranges, written, strict=True)]


def _record(job: CopyJob, task: CopyTask, records: Sequence[ChunkRecord]) -> CopyTask:
    """Record a task as done, once its bytes are on disk: if only the record survived a crash, data would be missing."""
    files.flush_to_disk(job.out / task.file)
    entries = [[[record.written.offset, record.written.length], record.crc, record.sources] for record in records]
    files.write_atomically(job.record_file(task), json.dumps(entries))
    return task


def _peak_rss_bytes() -> int:
    with open("/proc/self/status", encoding="utf-8") as status:
        line = next((line for line in status if line.startswith("VmHWM:")), "VmHWM: 0 kB")
    return int(line.split()[1]) * 1024
