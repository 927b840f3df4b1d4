"""What a conversion writes, cut into chunks that fit in memory, and from which rectangles each chunk is made."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Literal, NamedTuple

import torch

from mcore_rl.convert.copying.sources import sizes, whole
from mcore_rl.errors import CheckpointError
from mcore_rl.families.weight_map import AxisRange, Region, Shape, WeightBlock, listed

CHUNK_BYTES = 64 << 20
"""A chunk is not larger, unless one row of its tensor is. Not a setting: it decides the bytes that are written."""


class Pair(NamedTuple):
    """The rectangle `into` of a target is the rectangle `where` of the source's tensor `source`.

    What one side has more axes in front is one position wide. Transposed, the last two axes are exchanged.
    """

    into: Region
    source: str
    where: Region
    transposed: bool = False


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
    where: Region
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


def import_pairs(blocks: Sequence[WeightBlock]) -> dict[str, list[Pair]]:
    """For each Megatron tensor, its rectangles and Hugging Face's."""
    pairs: dict[str, list[Pair]] = {}
    for block in blocks:
        pairs.setdefault(block.mcore_key, []).append(
            Pair(block.mcore_where, block.hf_name, block.hf_where, block.transposed)
        )
    return pairs


def export_pairs(blocks: Sequence[WeightBlock]) -> dict[str, list[Pair]]:
    """For each Hugging Face tensor, its rectangles and Megatron's."""
    pairs: dict[str, list[Pair]] = {}
    for block in blocks:
        pairs.setdefault(block.hf_name, []).append(
            Pair(block.hf_where, block.mcore_key, block.mcore_where, block.transposed)
        )
    return pairs


def chunks_of(target: Target, limit: int = CHUNK_BYTES) -> Iterator[Chunk]:
    """The chunks of a target, in the order of its elements."""
    lead = _lead(target)
    at: dict[tuple[int, ...], list[Pair]] = {}
    for pair in target.pairs:
        at.setdefault(tuple(span.start for span in pair.into[:lead]), []).append(pair)
    for index in _indices(target.shape[:lead]):
        front = tuple(AxisRange(i, i + 1) for i in index)
        for rows in _row_runs(target, lead, limit):
            where = (*front, *rows)
            yield Chunk(
                target,
                where,
                tuple(_cut(pair, where) for pair in at.get(index, ()) if _meet(pair.into, where)),
            )


def chunk_at(target: Target, where: Region) -> Chunk:
    """Any rectangle of a target."""
    return Chunk(target, where, tuple(_cut(pair, where) for pair in target.pairs if _meet(pair.into, where)))


def composed(pairs: Sequence[Pair], through: Mapping[str, Sequence[Pair]]) -> list[Pair]:
    """`pairs`, of which each source is itself a target of `through`, down to the sources of `through`."""
    made = []
    for pair in pairs:
        for inner in through[pair.source]:
            if _meet(inner.into, pair.where):
                part = _cut(inner, pair.where)
                turned = part.transposed != pair.transposed
                made.append(Pair(_moved(part.into, pair), part.source, part.where, turned))
    return made


def tasks_of(
    chunks: Iterator[Chunk], most_bytes: int, file_of: Mapping[str, str] | Literal["numbered"]
) -> list[Task]:
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
                state.update(
                    f" {_plain(pair.into)} {pair.source} {_plain(pair.where)} {pair.transposed}\n".encode()
                )
    return state.hexdigest()


def _plain(where: Region) -> list[tuple[int, ...]]:
    return [tuple(span) for span in where]


def _lead(target: Target) -> int:
    """How many axes in front, such as layers and experts, no rectangle is more than one position wide on."""
    lead = 0
    while lead < len(target.shape) - 1 and all(pair.into[lead].count == 1 for pair in target.pairs):
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


def _row_runs(target: Target, lead: int, limit: int) -> Iterator[Region]:
    shape = target.shape[lead:]
    if not shape:
        yield ()
        return
    row_bytes = math.prod(shape[1:]) * target.dtype.itemsize
    count = max(1, limit // max(row_bytes, 1))
    for start in range(0, shape[0], count):
        yield (AxisRange(start, min(start + count, shape[0])), *whole(shape[1:]))


def _meet(one: Region, other: Region) -> bool:
    return all(low < high for low, high in map(_common, one, other))


def _common(span: AxisRange, window: AxisRange) -> tuple[int, int]:
    """Which of a span's positions, counted from 0, are in a window without steps."""
    low, high = (-((span.start - edge) // span.step) for edge in window[:2])
    return max(low, 0), min(high, span.count)


def _part(span: AxisRange, low: int, high: int) -> AxisRange:
    """A span's positions low <= i < high."""
    return AxisRange(span.start + low * span.step, span.start + (high - 1) * span.step + 1, span.step)


def _shift(span: AxisRange, by: int) -> AxisRange:
    return AxisRange(span.start - by, span.stop - by, span.step)


def _cut(pair: Pair, window: Region) -> Pair:
    """What of a pair is in a window of the target, and where in the window."""
    common = [_common(span, edge) for span, edge in zip(pair.into, window, strict=True)]
    into = tuple(
        _shift(_part(span, *inside), edge.start)
        for span, inside, edge in zip(pair.into, common, window, strict=True)
    )
    where = list(pair.where)
    for axis, other in _facing(len(pair.into), len(where), pair.transposed):
        where[other] = _part(where[other], *common[axis])
    return Pair(into, pair.source, tuple(where), pair.transposed)


def _moved(part: Region, pair: Pair) -> Region:
    """Where a rectangle, relative to `pair.where`, comes to lie in the target of the pair."""
    moved = list(pair.into)
    for axis, other in _facing(len(moved), len(part), pair.transposed):
        moved[axis] = _part(moved[axis], part[other].start, part[other].stop)
    return tuple(moved)


def _facing(axes: int, other_axes: int, transposed: bool) -> Iterator[tuple[int, int]]:
    """The axes of two rectangles that go together, counted from the end."""
    for back in range(1, min(axes, other_axes) + 1):
        yield -back, -(3 - back) if transposed and back <= 2 else -back
