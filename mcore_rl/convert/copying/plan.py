"""The tensors that a conversion writes, cut into chunks that fit in memory, each with the copies that make it."""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256

import torch

from mcore_rl.errors import CheckpointError
from mcore_rl.families.regions import RegionCopy, cut, overlap, sizes, whole
from mcore_rl.families.weight_map import AxisRange, Region, Shape, listed

CHUNK_BYTES = 64 << 20
"""Largest size in bytes of a chunk, unless a row is larger. It affects the written bytes, so it is not a setting."""
NUMBERED = ""
"""Stands for files with a task each, which are named as torch names them."""


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
    for index in itertools.product(*map(range, target.shape[:num_lead])):
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


def tasks_of(files: Mapping[str, Iterable[TargetTensor]], max_bytes: int) -> list[CopyTask]:
    """Group the chunks of all targets, in their order, into tasks of at most `max_bytes` or of one chunk.

    Args:
        files: The targets of each file; with `NUMBERED` for a name, every task has its own file.
        max_bytes: Most bytes of a task.
    """
    tasks: list[CopyTask] = []
    for file, targets in files.items():
        groups: list[list[Chunk]] = []
        group_bytes = 0
        for chunk in (chunk for target in targets for chunk in chunks_of(target)):
            if not groups or group_bytes + chunk.num_bytes > max_bytes:
                groups.append([])
                group_bytes = 0
            groups[-1].append(chunk)
            group_bytes += chunk.num_bytes
        for index, group in enumerate(groups, len(tasks)):
            tasks.append(CopyTask(index, file or f"__{index}_0.distcp", tuple(group)))
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
