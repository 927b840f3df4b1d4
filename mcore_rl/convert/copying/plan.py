"""The tensors that a conversion writes, cut into chunks that fit in memory, each with the copies that make it."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Literal

import torch

from mcore_rl.errors import CheckpointError
from mcore_rl.families.regions import RegionCopy, cut, overlap, sizes, whole
from mcore_rl.families.weight_map import AxisRange, Region, Shape, listed

CHUNK_BYTES = 64 << 20
"""Largest size in bytes of a chunk, unless a row is larger. It affects the written bytes, so it is not a setting."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetTensor:
    """A tensor to write. Elements that no copy covers are zeros."""

    name: str
    shape: Shape
    dtype: torch.dtype
    copies: tuple[RegionCopy, ...]

    @property
    def num_bytes(self) -> int:
        """Number of bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive elements of a target: some of its rows, each with all of its elements."""

    target: TargetTensor
    where: Region
    copies: tuple[RegionCopy, ...]
    """The copies that make it; their `into` is relative to the chunk."""

    @property
    def start(self) -> int:
        """Byte of the target at which the chunk begins."""
        position = 0
        for axis, size in zip(self.where, self.target.shape, strict=True):
            position = position * size + axis.start
        return position * self.target.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        """Number of bytes of its elements."""
        return math.prod(sizes(self.where)) * self.target.dtype.itemsize


@dataclass(frozen=True, slots=True)
class CopyTask:
    """Chunks that one worker writes to one file, and then records as done."""

    index: int
    file: str
    chunks: tuple[Chunk, ...]

    @property
    def num_bytes(self) -> int:
        """Number of bytes of all chunks."""
        return sum(chunk.num_bytes for chunk in self.chunks)


def chunks_of(target: TargetTensor, limit: int = CHUNK_BYTES) -> Iterator[Chunk]:
    """Yield the chunks of a target in the order of its elements, each of at most `limit` bytes or of one row."""
    num_lead = _num_lead_axes(target)
    at: dict[tuple[int, ...], list[RegionCopy]] = {}
    for copy in target.copies:
        at.setdefault(tuple(axis.start for axis in copy.into[:num_lead]), []).append(copy)
    for index in _indices(target.shape[:num_lead]):
        front = tuple(AxisRange(i, i + 1) for i in index)
        for rows in _runs_of_rows(target, num_lead, limit):
            where = (*front, *rows)
            yield Chunk(
                target,
                where,
                tuple(cut(copy, where) for copy in at.get(index, ()) if overlap(copy.into, where)),
            )


def chunk_at(target: TargetTensor, where: Region) -> Chunk:
    """Return any region of a target as a chunk."""
    return Chunk(
        target, where, tuple(cut(copy, where) for copy in target.copies if overlap(copy.into, where))
    )


def tasks_of(
    chunks: Iterator[Chunk], max_bytes: int, file_of: Mapping[str, str] | Literal["numbered"]
) -> list[CopyTask]:
    """Group chunks, in their order, into tasks of at most `max_bytes` or of one chunk.

    Args:
        chunks: All chunks of a conversion.
        max_bytes: Most bytes of a task.
        file_of: The file of each target; with "numbered" every task has its own file, named as torch does.
    """
    tasks: list[CopyTask] = []
    group: list[Chunk] = []
    group_bytes, group_file = 0, ""

    def close() -> None:
        if group:
            file = f"__{len(tasks)}_0.distcp" if file_of == "numbered" else group_file
            tasks.append(CopyTask(len(tasks), file, tuple(group)))
            group.clear()

    for chunk in chunks:
        file = "" if file_of == "numbered" else file_of[chunk.target.name]
        if group and (group_bytes + chunk.num_bytes > max_bytes or file != group_file):
            close()
            group_bytes = 0
        group.append(chunk)
        group_bytes += chunk.num_bytes
        group_file = file
    close()
    return tasks


def common_dtype(name: str, dtypes: Mapping[str, torch.dtype]) -> torch.dtype:
    """Return the type that all sources of the target `name` have. Raises CheckpointError if they differ."""
    kinds = sorted({str(dtype) for dtype in dtypes.values()})
    if len(kinds) > 1:
        lines = [f"{source} is {dtype}" for source, dtype in sorted(dtypes.items())]
        raise CheckpointError(
            f"{name} would be made of tensors of the types {', '.join(kinds)}:\n{listed(lines, 6)}\n"
            "Choose one with --dtype bf16 or --dtype fp32."
        )
    return next(iter(dtypes.values()))


def digest(tasks: Sequence[CopyTask]) -> str:
    """Return the SHA-256 of everything in the tasks: equal digests give equal bytes from equal sources."""
    state = sha256()
    for task in tasks:
        state.update(f"{task.index} {task.file}\n".encode())
        for chunk in task.chunks:
            target = chunk.target
            state.update(f"{target.name} {target.shape} {target.dtype} {_plain(chunk.where)}\n".encode())
            for copy in chunk.copies:
                state.update(
                    f" {_plain(copy.into)} {copy.source} {_plain(copy.where)} {copy.transposed}\n".encode()
                )
    return state.hexdigest()


def _plain(where: Region) -> list[tuple[int, ...]]:
    """Return a region as plain tuples, so that a renamed class leaves the digest as it was."""
    return [tuple(axis) for axis in where]


def _num_lead_axes(target: TargetTensor) -> int:
    """Return the number of leading axes, such as layers and experts, on which every copy has size 1."""
    lead = 0
    # The last axis never counts: a chunk would then be a single element.
    while lead < len(target.shape) - 1 and all(copy.into[lead].count == 1 for copy in target.copies):
        lead += 1
    # `all` is also true without copies: a target of only zeros is split by bytes, not into single rows.
    return lead if target.copies and lead < len(target.shape) else 0


def _indices(shape: Shape) -> Iterator[tuple[int, ...]]:
    """Yield all indices of a tensor of this shape, the last axis fastest."""
    if not shape:
        yield ()
        return
    for first in range(shape[0]):
        for rest in _indices(shape[1:]):
            yield (first, *rest)


def _runs_of_rows(target: TargetTensor, num_lead: int, limit: int) -> Iterator[Region]:
    """Yield regions of consecutive rows that have at most `limit` bytes, or are one row."""
    shape = target.shape[num_lead:]
    if not shape:
        yield ()
        return
    row_bytes = math.prod(shape[1:]) * target.dtype.itemsize
    count = max(1, limit // max(row_bytes, 1))
    for start in range(0, shape[0], count):
        yield (AxisRange(start, min(start + count, shape[0])), *whole(shape[1:]))
