"""Preprocessing in parts: a shard is the input of one process, and its marker file records that it is done."""

import functools
import json
import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

from mcore_rl.config.data import TokenizerConfig
from mcore_rl.data.documents import DocumentFormat, DocumentReader, FileSlice, InputFile
from mcore_rl.data.index_file import read_index
from mcore_rl.data.tokenizer import Tokenizer, load_tokenizer
from mcore_rl.errors import DataError
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
        if reports[shard.index].documents:
            _append(builder, str(shard.prefix(folder)))
            written = with_ending(shard.prefix(folder), ".bin")
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


def _append(builder: IndexedDatasetBuilder, prefix: str) -> None:
    """Megatron's `add_index` without its garbage collection, which takes 0.15 s per shard and grows with the lists."""
    lengths = read_index(prefix).lengths_N.tolist()
    before = len(builder.sequence_lengths)
    builder.sequence_lengths.extend(lengths)
    builder.document_indices.extend(range(before + 1, before + len(lengths) + 1))
    with open(with_ending(prefix, ".bin"), "rb") as content:
        shutil.copyfileobj(content, builder.data_file)


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
