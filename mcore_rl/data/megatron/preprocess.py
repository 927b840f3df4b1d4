"""Text files to a Megatron .bin/.idx pair: in parallel, resumable, and renamed to its prefix only when complete.

PREFIX.partial/plan.json       the plan; a run with the same plan resumes from this folder
PREFIX.partial/shard-*.done    a finished part (its .bin and .idx are on the disk)
PREFIX.partial/merged.json     all is done, except for moving merged.* to PREFIX.*
PREFIX.partial/replaced.*      an earlier dataset, until the new dataset has its names; replaced.stamps has its stamps
PREFIX.bin .idx .json          the dataset and its sidecar
PREFIX.log.jsonl               what happened when
"""

import functools
import json
import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
from rich.console import Console

from mcore_rl.config.data import TokenizerConfig
from mcore_rl.data.documents import DocumentFormat, DocumentReader, FileSlice, InputFile, find_input_files
from mcore_rl.data.index_file import Sidecar, SourceFile, read_index, sidecar_from
from mcore_rl.data.records import MAX_BAD, refuse_bad_share
from mcore_rl.data.tokenizer import Tokenizer, load_tokenizer
from mcore_rl.errors import DataError
from mcore_rl.metrics.progress import ByteProgress
from mcore_rl.storage import files
from mcore_rl.storage.checksums import PartChecksum, as_hex, crc32_of, joined
from mcore_rl.storage.files import flush_to_disk, move_into_place, with_ending, write_atomically

MIN_SHARD_BYTES = 256 << 10
MAX_SHARD_BYTES = 32 << 20
WANTED_SHARDS = 64
MAX_RECORDED_BAD_LINES = 1000
"""Number of bad lines of one shard that are recorded singly; further lines are counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """The `index`-th part of the input."""

    index: int
    file_slices: tuple[FileSlice, ...]

    @property
    def num_bytes(self) -> int:
        """Number of input bytes."""
        return sum(file_slice.end - file_slice.start for file_slice in self.file_slices)

    def prefix(self, folder: Path) -> Path:
        """Return the prefix of its files; PREFIX.done is the marker."""
        return folder / f"shard-{self.index:06d}"


@dataclass(frozen=True, kw_only=True, slots=True)
class BadLine:
    """A line that is not a document; `line` 1 is the first line of the shard's slice with index `file_slice`."""

    file_slice: int
    line: int
    problem: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardReport:
    """Result of one shard; the content of its marker."""

    index: int
    documents: int
    tokens: int
    max_token_id: int
    num_bytes: int
    lines: tuple[int, ...]
    num_bad: int
    bad: tuple[BadLine, ...]
    bin_crc32: str


def plan_shards(sources: Sequence[InputFile], document_format: DocumentFormat) -> tuple[Shard, ...]:
    """Split or join the files, in order, into shards of about equal size; the plan depends only on their sizes."""
    total = sum(source.num_bytes for source in sources)
    size = min(max(total // WANTED_SHARDS, MIN_SHARD_BYTES), MAX_SHARD_BYTES)
    shards: list[Shard] = []
    file_slices: list[FileSlice] = []
    filled = 0
    for source in sources:
        step = size if document_format.is_splittable_in(source.path) else max(source.num_bytes, 1)
        for start in range(0, max(source.num_bytes, 1), step):
            end = min(start + step, source.num_bytes)
            file_slices.append(FileSlice(path=source.path, start=start, end=end))
            filled += end - start
            if filled >= size:
                shards.append(Shard(index=len(shards), file_slices=tuple(file_slices)))
                file_slices, filled = [], 0
    if file_slices:
        shards.append(Shard(index=len(shards), file_slices=tuple(file_slices)))
    return tuple(shards)


def token_dtype(vocab_size: int) -> type[numpy.number]:
    """Return Megatron's choice of type for ids below `vocab_size`."""
    dtype: type[numpy.number] = DType.optimal_dtype(vocab_size)
    return dtype


def tokenize_shard(shard: Shard, document_format: DocumentFormat, tokenizer: Tokenizer, folder: Path) -> ShardReport:
    """Write the shard's .bin, .idx and, once these are on the disk, its marker."""
    prefix = shard.prefix(folder)
    # A process of an earlier, killed run may still be at this shard; each writes under its own name.
    scratch = with_ending(prefix, f".{os.getpid()}.tmp")
    builder = IndexedDatasetBuilder(str(with_ending(scratch, ".bin")), dtype=token_dtype(tokenizer.vocab_size))
    documents, tokens, largest, num_bad = 0, 0, -1, 0
    bad: list[BadLine] = []
    lines: list[int] = []
    for index, file_slice in enumerate(shard.file_slices):
        reader = DocumentReader(file_slice, document_format)
        for record in reader:
            ids = [] if record.problem else tokenizer.encode(record.text)
            if ids:
                ids.append(tokenizer.eod_id)
                builder.add_document(ids, [len(ids)])
                documents, tokens, largest = documents + 1, tokens + len(ids), max(largest, *ids)
                continue
            num_bad += 1
            if len(bad) < MAX_RECORDED_BAD_LINES:
                bad.append(BadLine(file_slice=index, line=record.line, problem=record.problem or "no token"))
        lines.append(reader.num_lines)
    builder.finalize(str(with_ending(scratch, ".idx")))
    for ending in (".bin", ".idx"):
        move_into_place(with_ending(scratch, ending), with_ending(prefix, ending))
    report = ShardReport(
        index=shard.index,
        documents=documents,
        tokens=tokens,
        max_token_id=largest,
        num_bytes=shard.num_bytes,
        lines=tuple(lines),
        num_bad=num_bad,
        bad=tuple(bad),
        bin_crc32=crc32_of(with_ending(prefix, ".bin")),
    )
    write_atomically(with_ending(prefix, ".done"), json.dumps(asdict(report)))
    return report


def finished_shards(shards: Sequence[Shard], folder: Path) -> dict[int, ShardReport]:
    """Return the reports of the shards with a marker in `folder`."""
    reports = {}
    for shard in shards:
        marker = with_ending(shard.prefix(folder), ".done")
        if marker.is_file():
            entries = json.loads(marker.read_bytes())
            bad = tuple(BadLine(**line) for line in entries.pop("bad"))
            reports[shard.index] = ShardReport(**entries | {"lines": tuple(entries["lines"]), "bad": bad})
    return reports


def merge_shards(
    shards: Sequence[Shard], reports: dict[int, ShardReport], folder: Path, merged: Path, vocab: int
) -> tuple[str, str]:
    """Write MERGED.bin and .idx, the documents of all shards in order; return the CRC-32 of each."""
    parts: list[PartChecksum] = []
    position = 0
    builder = IndexedDatasetBuilder(str(with_ending(merged, ".bin")), dtype=token_dtype(vocab))
    for shard in shards:
        if not reports[shard.index].documents:
            continue
        written = with_ending(shard.prefix(folder), ".bin")
        # Megatron's `add_index` without its garbage collection, which takes 0.15 s per shard and grows with the lists.
        lengths = read_index(str(shard.prefix(folder))).lengths_N.tolist()
        before = len(builder.sequence_lengths)
        builder.sequence_lengths.extend(lengths)
        builder.document_indices.extend(range(before + 1, before + len(lengths) + 1))
        with open(written, "rb") as content:
            shutil.copyfileobj(content, builder.data_file)
        if crc32_of(written) != reports[shard.index].bin_crc32:
            raise DataError(f"{written} is not as it was written. Delete {folder}, and run the command again.")
        size = written.stat().st_size
        parts.append(PartChecksum(position, size, int(reports[shard.index].bin_crc32, 16)))
        position += size
    builder.finalize(str(with_ending(merged, ".idx")))
    for ending in (".bin", ".idx"):
        flush_to_disk(with_ending(merged, ending))
    bin_crc32 = joined(parts, position)
    assert bin_crc32 is not None, f"{parts} leave a gap"
    return as_hex(bin_crc32), crc32_of(with_ending(merged, ".idx"))


@contextmanager
def tokenizing(
    shards: Sequence[Shard], document_format: DocumentFormat, tokenizer: TokenizerConfig, folder: Path, workers: int
) -> Iterator[Iterator[ShardReport]]:
    """Fork `workers` processes, before other threads start; iterating gives shards' reports in any order."""
    if workers < 1:
        raise DataError(f"{workers} workers: wanted at least 1.")
    executor = ProcessPoolExecutor(
        max_workers=workers, mp_context=multiprocessing.get_context("fork"), initializer=_follow_parent
    )
    try:
        futures = [executor.submit(_tokenize, shard, document_format, tokenizer, folder) for shard in shards]
        yield (future.result() for future in as_completed(futures))
    except BrokenProcessPool as error:
        raise DataError(
            f"a process that tokenized parts of {folder} was killed (out of memory?). Run the same command "
            "again, perhaps with fewer --workers: it resumes."
        ) from error
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


_load_once = functools.cache(load_tokenizer)


def _tokenize(shard: Shard, document_format: DocumentFormat, config: TokenizerConfig, folder: Path) -> ShardReport:
    return tokenize_shard(shard, document_format, _load_once(config), folder)


def _follow_parent() -> None:
    """End this worker when its parent ends, so that it does not wait for work forever. The parent handles Ctrl-C."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def exit_after_it() -> None:
        parent.join()
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=exit_after_it, daemon=True).start()


PLAN_VERSION = 5
"""Version of plan.json and of the shards' markers: an unfinished run of another version is not resumed."""
ENDINGS = (".bin", ".idx", ".json")
LOG = ".log.jsonl"
PLAN, STAMPS = "plan.json", "replaced.stamps"
OWN_NAMES = ("lock", PLAN, "shard-", "merged.", "replaced.")
"""Beginnings of the names in the folder of an unfinished dataset, hidden too while they are written."""
SHOWN_BAD_LINES = 10
LOCK_WAIT_S = 3.0
"""Seconds to wait for the lock: workers of a killed run need a moment to end."""
RUN_AGAIN = "Make room (or give write access) there, and run the same command again: it resumes."


@dataclass(frozen=True, kw_only=True, slots=True)
class PreprocessOptions:
    """Inputs, output and settings of a preprocessing."""

    inputs: tuple[Path, ...]
    output: Path
    tokenizer: TokenizerConfig
    document_format: DocumentFormat
    workers: int = 1
    max_bad: float = MAX_BAD
    """Share of the documents that may be bad: they are reported and left out. With more, the run ends."""
    overwrite: bool = False
    """Replace an existing dataset with this prefix, and delete an unfinished dataset with another plan."""


def preprocess(options: PreprocessOptions, console: Console) -> Sidecar:
    """Make the dataset and return its sidecar; its bytes depend neither on the workers nor on interruptions."""
    if options.output.name in ("", ".."):
        # Path("data/") is Path("data"), so its files would be next to the folder; "." and ".." would be hidden files.
        raise DataError(
            f"output {options.output} is a folder and no prefix of files. Give one with a name, such as "
            f"{options.output / 'train'}."
        )
    sources = find_input_files(options.inputs)
    tokenizer = load_tokenizer(options.tokenizer)
    folder = files.with_ending(options.output, ".partial")
    merged = folder / "merged"
    _refuse_foreign_folder(folder)
    plan = {
        "version": PLAN_VERSION,
        "layout": asdict(options.document_format),
        "tokenizer": {"digest": tokenizer.digest, "eod_id": tokenizer.eod_id, "vocab_size": tokenizer.vocab_size},
        "sources": [asdict(source) for source in sources],
    }
    stamps = {} if files.with_ending(merged, ".json").exists() else _refuse_replacing(options)
    files.make_folder(folder, f"{RUN_AGAIN} Or give another output.")
    with files.disk_errors_explained(options.output.parent, RUN_AGAIN):
        rivals = f"Wait for it to end, or give another output than {options.output}."
        with files.sole_writer(folder / "lock", wait_s=LOCK_WAIT_S, remedy=rivals):
            differing = _differing(folder, plan, options.overwrite)
            if differing and files.with_ending(merged, ".json").exists():
                # Another run was killed while renaming its dataset: finish this, and replace that dataset.
                _publish(folder, options.output)
                stamps = _refuse_replacing(options)
            # A killed run's half-written files are of no use, and nothing is where it was another run.
            for leftover in filter(_is_own, list(folder.iterdir())):
                if leftover.name != "lock" and (differing or ".tmp" in leftover.name):
                    leftover.unlink()
            files.write_atomically(folder / PLAN, json.dumps(plan))
            if not files.with_ending(merged, ".json").exists():
                files.write_atomically(folder / STAMPS, json.dumps(stamps))
                _make(options, sources, tokenizer, folder, console)
            sidecar = sidecar_from(files.with_ending(merged, ".json"))
            _publish(folder, options.output)
            _log(options.output, "finished", documents=sidecar.documents, tokens=sidecar.tokens)
            for path in filter(_is_own, list(folder.iterdir())):
                path.unlink()
    with suppress(OSError):
        folder.rmdir()
    return sidecar


def _make(
    options: PreprocessOptions, sources: Sequence[InputFile], tokenizer: Tokenizer, folder: Path, console: Console
) -> None:
    shards = plan_shards(sources, options.document_format)
    reports = finished_shards(shards, folder)
    missing = [shard for shard in shards if shard.index not in reports]
    _log(options.output, "tokenizing", shards=len(shards), finished=len(reports), workers=options.workers)
    workers = tokenizing(missing, options.document_format, options.tokenizer, folder, options.workers)
    with workers as done, ByteProgress(console) as progress:
        progress.begin(
            options.output.name, sum(s.num_bytes for s in shards), sum(r.num_bytes for r in reports.values())
        )
        for report in done:
            reports[report.index] = report
            progress.add(report.num_bytes)
            _log(options.output, "shard", index=report.index, documents=report.documents, tokens=report.tokens)
        speed = f"{progress.bytes_per_s / 2**20:.2f} MiB/s" if missing else "tokenized by an earlier run"
    if find_input_files(options.inputs) != tuple(sources):
        raise DataError(f"the inputs of {options.output} changed while they were read. Run again with --overwrite.")
    sidecar = _sidecar(options, sources, tokenizer, list(reports.values()))
    bad_lines = _bad_lines(shards, reports)
    lines = [f"\n  {path}:{line}: {problem}" for path, line, problem in bad_lines[:SHOWN_BAD_LINES]]
    num_more = sidecar.bad_lines - len(lines)
    shown = "".join(lines) + (f"\n  and {num_more} more" if num_more else "")
    refuse_bad_share(sidecar.bad_lines, sidecar.documents, options.max_bad, shown)
    for path, line, problem in bad_lines:
        _log(options.output, "bad line", path=path, line=line, problem=problem)
    if sidecar.bad_lines:
        console.print(f"{sidecar.bad_lines} bad lines were left out:{shown}", markup=False, soft_wrap=True)
    num_bytes, free = (sum(path.stat().st_size for path in folder.glob("shard-*")), shutil.disk_usage(folder).free)
    if free < num_bytes:
        raise DataError(f"{folder}: joining the parts takes {num_bytes} bytes, and {free} are free. {RUN_AGAIN}")
    checksums = merge_shards(shards, reports, folder, folder / "merged", tokenizer.vocab_size)
    sidecar = replace(sidecar, bin_crc32=checksums[0], idx_crc32=checksums[1])
    files.write_atomically(folder / "merged.json", sidecar.to_json())
    console.print(f"{options.output}: {sidecar.documents} documents, {sidecar.tokens} tokens ({speed})", soft_wrap=True)


def _refuse_replacing(options: PreprocessOptions) -> dict[str, Sequence[int]]:
    output = options.output
    sources = [("an input", path) for path in options.inputs]
    sources.append(("the tokenizer", Path(str(options.tokenizer.path))))
    for ending in (*ENDINGS, LOG):
        files.refuse_overlap(files.with_ending(output, ending), sources)
    there = [path for ending in ENDINGS if os.path.lexists(path := files.with_ending(output, ending))]
    names = ", ".join(map(str, there))
    if there and not options.overwrite:
        raise DataError(f"{names} exist already. Give another output, or --overwrite to replace them.")
    if there and not _is_written_here(output):
        raise DataError(
            f"{names} are no dataset that `data preprocess` wrote and nobody changed since (by {output}.json). They "
            "are not replaced: move them away, or give another output."
        )
    log = files.with_ending(output, LOG)
    if os.path.lexists(log) and not files.is_event_log(log):
        raise DataError(
            f"{log} is no log of `data preprocess`, which appends to it. Move it away, or give another output."
        )
    return {path.suffix: files.stamps_of(path)[""] for path in there}


def _is_written_here(output: Path) -> bool:
    paths = [files.with_ending(output, ending) for ending in ENDINGS]
    if not all(path.is_file() and not path.is_symlink() for path in paths):
        return False
    try:
        sidecar = sidecar_from(paths[-1])
    except (DataError, TypeError):
        return False
    return [crc32_of(path) for path in paths[:-1]] == [sidecar.bin_crc32, sidecar.idx_crc32]


def _refuse_foreign_folder(folder: Path) -> None:
    there = sorted(folder.iterdir()) if folder.is_dir() and not folder.is_symlink() else None
    foreign = [path.name for path in there or () if not _is_own(path)]
    if foreign or (there is None and os.path.lexists(folder)):
        raise DataError(
            f"{folder} is in the way: the dataset grows there, and it holds what no run made"
            f"{': ' if foreign else ''}{', '.join(foreign[:SHOWN_BAD_LINES])}. Move it away, or give another output."
        )


def _is_own(path: Path) -> bool:
    return path.is_file() and path.name.startswith((*OWN_NAMES, *(f".{name}" for name in OWN_NAMES)))


def _differing(folder: Path, plan: dict[str, Any], overwrite: bool) -> list[str]:
    path = folder / PLAN
    found = json.loads(path.read_bytes()) if path.exists() else plan
    differing = [key for key in plan if found.get(key) != plan[key]]
    if differing and not overwrite:
        raise DataError(
            f"{folder} holds an unfinished run with another {' and '.join(differing)} (see its plan.json). "
            "Finish that one with its own command, or give --overwrite to forget it."
        )
    return differing


def _sidecar(
    options: PreprocessOptions, sources: Sequence[InputFile], tokenizer: Tokenizer, reports: Sequence[ShardReport]
) -> Sidecar:
    documents = sum(report.documents for report in reports)
    num_bad = sum(report.num_bad for report in reports)
    if documents == 0:
        raise DataError(
            f"{options.output}: no document in {len(sources)} files ({num_bad} bad lines, the first ones in "
            f"{options.output}.log.jsonl). Look at --key and --format."
        )
    return Sidecar(
        tokenizer_kind=options.tokenizer.kind,
        tokenizer_digest=tokenizer.digest,
        vocab_size=tokenizer.vocab_size,
        eod_id=tokenizer.eod_id,
        max_token_id=max(report.max_token_id for report in reports),
        documents=documents,
        tokens=sum(report.tokens for report in reports),
        dtype=token_dtype(tokenizer.vocab_size).__name__,
        bad_lines=num_bad,
        sources=tuple(SourceFile(path=source.path, num_bytes=source.num_bytes) for source in sources),
    )


def _publish(folder: Path, output: Path) -> None:
    """Move merged.* to their names, the sidecar last; after a kill at any point the next run finishes the move."""
    stamps = json.loads((folder / STAMPS).read_text(encoding="utf-8")) if (folder / STAMPS).exists() else {}
    merged, replaced = folder / "merged", folder / "replaced"
    # Move an older dataset away first: files of two datasets must never be mixed under the same prefix.
    moves = []
    for ending in reversed(ENDINGS):
        path = files.with_ending(output, ending)
        if files.with_ending(merged, ending).exists() and os.path.lexists(path):
            if files.stamps_of(path)[""] != tuple(stamps.get(ending, ())):
                raise DataError(f"{path} was changed meanwhile, and is not replaced. Move it away, and run again.")
            moves.append((path, files.with_ending(replaced, ending)))
    moves += [
        (path, files.with_ending(output, ending))
        for ending in ENDINGS
        if (path := files.with_ending(merged, ending)).exists()
    ]
    files.rename_all(moves)


def _bad_lines(shards: Sequence[Shard], reports: dict[int, ShardReport]) -> list[tuple[str, int, str]]:
    found: list[tuple[str, int, str]] = []
    lines_before: dict[str, int] = {}
    for shard in shards:
        report = reports[shard.index]
        for number, (file_slice, lines) in enumerate(zip(shard.file_slices, report.lines, strict=True)):
            start = lines_before.get(file_slice.path, 0)
            found += [
                (file_slice.path, start + bad.line, bad.problem) for bad in report.bad if bad.file_slice == number
            ]
            lines_before[file_slice.path] = start + lines
    return found


def _log(output: Path, event: str, **fields: Any) -> None:
    with open(files.with_ending(output, LOG), "a", encoding="utf-8") as log:
        log.write(json.dumps({"time": time.time(), "event": event, **fields}) + "\n")
