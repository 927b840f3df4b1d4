"""What a conversion writes, cut into chunks that fit in memory, and from which rectangles each chunk is made."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Literal, NamedTuple

import torch

from mcore_rl.convert.sources import sizes, whole
from mcore_rl.errors import CheckpointError
from mcore_rl.model.weight_map import Block, Shape, Span, Where, listed

CHUNK_BYTES = 64 << 20
"""A chunk is not larger, unless one row of its tensor is. Not a setting: it decides the bytes that are written."""


class Pair(NamedTuple):
    """The rectangle `into` of a target is the rectangle `where` of the source's tensor `source`."""

    into: Where
    source: str
    where: Where


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A tensor to write. What no pair covers is zeros."""

    name: str
    shape: Shape
    dtype: torch.dtype
    pairs: tuple[Pair, ...]

    @property
    def num_bytes(self) -> int:
        """Of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive elements of a target: some of the rows, all of what is in them."""

    target: Target
    where: Where
    pairs: tuple[Pair, ...]
    """Their `into` is relative to the chunk."""

    @property
    def start(self) -> int:
        """Byte of the target at which it begins."""
        position = 0
        for span, size in zip(self.where, self.target.shape, strict=True):
            position = position * size + span.start
        return position * self.target.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        """Of its elements."""
        return math.prod(sizes(self.where)) * self.target.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Task:
    """Chunks that one worker writes to one file, and then records as done."""

    index: int
    file: str
    chunks: tuple[Chunk, ...]

    @property
    def num_bytes(self) -> int:
        """Of all chunks."""
        return sum(chunk.num_bytes for chunk in self.chunks)


def import_pairs(blocks: Sequence[Block]) -> dict[str, list[Pair]]:
    """For each Megatron tensor, its rectangles and Hugging Face's."""
    pairs: dict[str, list[Pair]] = {}
    for block in blocks:
        pairs.setdefault(block.mcore_key, []).append(Pair(block.mcore_where, block.hf_name, block.hf_where))
    return pairs


def export_pairs(blocks: Sequence[Block]) -> dict[str, list[Pair]]:
    """For each Hugging Face tensor, its rectangles and Megatron's."""
    pairs: dict[str, list[Pair]] = {}
    for block in blocks:
        pairs.setdefault(block.hf_name, []).append(Pair(block.hf_where, block.mcore_key, block.mcore_where))
    return pairs


def chunks_of(target: Target, limit: int = CHUNK_BYTES) -> Iterator[Chunk]:
    """The chunks of a target, in the order of its elements."""
    lead = _lead(target)
    at: dict[tuple[int, ...], list[Pair]] = {}
    for pair in target.pairs:
        at.setdefault(tuple(span.start for span in pair.into[:lead]), []).append(pair)
    for index in _indices(target.shape[:lead]):
        front = tuple(Span(i, i + 1) for i in index)
        for rows in _row_runs(target, lead, limit):
            where = (*front, *rows)
            yield Chunk(target, where, tuple(_cut(pair, where) for pair in at.get(index, ()) if _meet(pair.into, where)))


def tasks_of(chunks: Iterator[Chunk], most_bytes: int, file_of: "Mapping[str, str] | Literal['numbered']") -> list[Task]:
    """Chunks in their order, as many a task as fit in `most_bytes`.

    `file_of` gives the file of each target; "numbered": every task has a file of its own.
    """
    tasks: list[Task] = []
    group: list[Chunk] = []
    group_bytes, group_file = 0, ""

    def close() -> None:
        if group:
            file = f"__{len(tasks)}_0.distcp" if file_of == "numbered" else group_file
            tasks.append(Task(len(tasks), file, tuple(group)))
            group.clear()

    for chunk in chunks:
        file = "" if file_of == "numbered" else file_of[chunk.target.name]
        if group and (group_bytes + chunk.num_bytes > most_bytes or file != group_file):
            close()
            group_bytes = 0
        group.append(chunk)
        group_bytes += chunk.num_bytes
        group_file = file
    close()
    return tasks


def one_dtype(name: str, dtypes: Mapping[str, torch.dtype]) -> torch.dtype:
    """The type that all sources of a target have; CheckpointError when they differ."""
    kinds = sorted({str(dtype) for dtype in dtypes.values()})
    if len(kinds) > 1:
        lines = [f"{source} is {dtype}" for source, dtype in sorted(dtypes.items())]
        raise CheckpointError(
            f"{name} would be made of tensors of the types {', '.join(kinds)}:\n{listed(lines, 6)}\n"
            "Choose one with --dtype bf16 or --dtype fp32."
        )
    return next(iter(dtypes.values()))


def digest(tasks: Sequence[Task]) -> str:
    """SHA-256 of all that the tasks say."""
    state = sha256()
    for task in tasks:
        state.update(f"{task.index} {task.file}\n".encode())
        for chunk in task.chunks:
            target = chunk.target
            state.update(f"{target.name} {target.shape} {target.dtype} {_plain(chunk.where)}\n".encode())
            for pair in chunk.pairs:
                state.update(f" {_plain(pair.into)} {pair.source} {_plain(pair.where)}\n".encode())
    return state.hexdigest()


def _plain(where: Where) -> list[tuple[int, int]]:
    return [(span.start, span.stop) for span in where]


def _lead(target: Target) -> int:
    """How many axes in front, such as layers and experts, no rectangle is more than one position wide on."""
    lead = 0
    while lead < len(target.shape) - 1 and all(pair.into[lead].stop - pair.into[lead].start == 1 for pair in target.pairs):
        lead += 1
    # A target of one pair and many rows of size one is not cut into as many chunks.
    return lead if target.pairs and lead < len(target.shape) else 0


def _indices(shape: Shape) -> Iterator[tuple[int, ...]]:
    if not shape:
        yield ()
        return
    for first in range(shape[0]):
        for rest in _indices(shape[1:]):
            yield (first, *rest)


def _row_runs(target: Target, lead: int, limit: int) -> Iterator[Where]:
    shape = target.shape[lead:]
    if not shape:
        yield ()
        return
    row_bytes = math.prod(shape[1:]) * target.dtype.itemsize
    count = max(1, limit // max(row_bytes, 1))
    for start in range(0, shape[0], count):
        yield (Span(start, min(start + count, shape[0])), *whole(shape[1:]))


def _meet(one: Where, other: Where) -> bool:
    return all(a.start < b.stop and b.start < a.stop for a, b in zip(one, other, strict=True))


def _cut(pair: Pair, chunk: Where) -> Pair:
    """What of a pair is in a chunk."""
    common = [Span(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(pair.into, chunk, strict=True)]
    offsets = [(span.start - into.start, span.stop - into.start) for span, into in zip(common, pair.into, strict=True)]
    where = list(pair.where)
    # Both sides have the same last axes; what one has more in front is one position wide.
    for back in range(1, min(len(where), len(offsets)) + 1):
        first = where[-back].start
        where[-back] = Span(first + offsets[-back][0], first + offsets[-back][1])
    into = tuple(Span(a.start - b.start, a.stop - b.start) for a, b in zip(common, chunk, strict=True))
    return Pair(into, pair.source, tuple(where))
