"""Preprocessing in parts: a shard is a run of the input for one process; its marker says it is done."""

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

from mcore_rl.data.documents import Layout, Piece, PieceReader, Source
from mcore_rl.data.index_file import read_index
from mcore_rl.data.tokenizer import Tokenizer
from mcore_rl.files import flush_to_disk, move_into_place, with_ending, write_atomically

MIN_SHARD_BYTES = 256 << 10
MAX_SHARD_BYTES = 32 << 20
WANTED_SHARDS = 64
KEPT_BAD_LINES = 1000
"""Bad lines of one shard that are remembered one by one; the others are counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """The `index`-th run of the input."""

    index: int
    pieces: tuple[Piece, ...]

    @property
    def num_bytes(self) -> int:
        """Input bytes."""
        return sum(piece.end - piece.start for piece in self.pieces)

    def prefix(self, folder: Path) -> Path:
        """Where its files lie; PREFIX.done is the marker."""
        return folder / f"shard-{self.index:06d}"


@dataclass(frozen=True, kw_only=True, slots=True)
class BadLine:
    """Something that is no document; `line` 1 is the first line of the shard's piece number `piece`."""

    piece: int
    line: int
    problem: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardReport:
    """What one shard came to; the content of its marker."""

    index: int
    documents: int
    tokens: int
    max_token_id: int
    num_bytes: int
    lines: tuple[int, ...]
    """Of each piece."""
    num_bad: int
    bad: tuple[BadLine, ...]
    """The first KEPT_BAD_LINES."""


def plan_shards(sources: Sequence[Source], layout: Layout) -> tuple[Shard, ...]:
    """The sources in order, cut or joined to runs of about equal size; depends on their sizes alone."""
    total = sum(source.num_bytes for source in sources)
    size = min(max(total // WANTED_SHARDS, MIN_SHARD_BYTES), MAX_SHARD_BYTES)
    shards: list[Shard] = []
    pieces: list[Piece] = []
    filled = 0
    for source in sources:
        step = size if layout.is_splittable else max(source.num_bytes, 1)
        for start in range(0, max(source.num_bytes, 1), step):
            end = min(start + step, source.num_bytes)
            pieces.append(Piece(path=source.path, start=start, end=end))
            filled += end - start
            if filled >= size:
                shards.append(Shard(index=len(shards), pieces=tuple(pieces)))
                pieces, filled = [], 0
    if pieces:
        shards.append(Shard(index=len(shards), pieces=tuple(pieces)))
    return tuple(shards)


def token_dtype(vocab_size: int) -> type[numpy.number]:
    """Megatron's choice for ids below `vocab_size`."""
    dtype: type[numpy.number] = DType.optimal_dtype(vocab_size)
    return dtype


def tokenize_shard(shard: Shard, layout: Layout, tokenizer: Tokenizer, folder: Path) -> ShardReport:
    """Writes the shard's .bin, .idx and, once these are on the disk, its marker."""
    prefix = shard.prefix(folder)
    # A process of an earlier, killed run may still be at this shard; each writes under its own name.
    scratch = with_ending(prefix, f".{os.getpid()}.tmp")
    builder = IndexedDatasetBuilder(
        str(with_ending(scratch, ".bin")), dtype=token_dtype(tokenizer.vocab_size)
    )
    documents, tokens, largest, num_bad = 0, 0, -1, 0
    bad: list[BadLine] = []
    lines: list[int] = []
    for number, piece in enumerate(shard.pieces):
        reader = PieceReader(piece, layout)
        for record in reader:
            ids = [] if record.problem else tokenizer.encode(record.text)
            if ids:
                ids.append(tokenizer.eod_id)
                builder.add_document(ids, [len(ids)])
                documents, tokens, largest = documents + 1, tokens + len(ids), max(largest, *ids)
                continue
            num_bad += 1
            if len(bad) < KEPT_BAD_LINES:
                bad.append(BadLine(piece=number, line=record.line, problem=record.problem or "no token"))
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
    )
    write_atomically(with_ending(prefix, ".done"), json.dumps(asdict(report)))
    return report


def finished_shards(shards: Sequence[Shard], folder: Path) -> dict[int, ShardReport]:
    """The reports of the shards whose marker is in `folder`."""
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
) -> None:
    """Writes MERGED.bin and .idx: the documents of all shards, in order."""
    builder = IndexedDatasetBuilder(str(with_ending(merged, ".bin")), dtype=token_dtype(vocab))
    for shard in shards:
        if reports[shard.index].documents:
            _append(builder, str(shard.prefix(folder)))
    builder.finalize(str(with_ending(merged, ".idx")))
    for ending in (".bin", ".idx"):
        flush_to_disk(with_ending(merged, ending))


def _append(builder: IndexedDatasetBuilder, prefix: str) -> None:
    """Megatron's `add_index` without its garbage collection: 0.15 s a shard, more as the lists grow."""
    lengths = read_index(prefix).lengths_N.tolist()
    before = len(builder.sequence_lengths)
    builder.sequence_lengths.extend(lengths)
    builder.document_indices.extend(range(before + 1, before + len(lengths) + 1))
    with open(with_ending(prefix, ".bin"), "rb") as content:
        shutil.copyfileobj(content, builder.data_file)
