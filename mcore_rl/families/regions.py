"""Copies between regions of tensors: restrict them to a window, or compose them through an intermediate tensor."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from mcore_rl.families.weight_map import AxisRange, Region, Shape, WeightBlock


class RegionCopy(NamedTuple):
    """The region `into` of a target tensor equals the region `where` of the source tensor `source`.

    One side may have additional leading axes, on which the region has size 1. With `transposed`, the last two axes of
    the two sides are swapped.
    """

    into: Region
    source: str
    where: Region
    transposed: bool = False


def sizes(where: Region) -> Shape:
    """Return the shape of a region."""
    return tuple(axis.count for axis in where)


def whole(shape: Shape) -> Region:
    """Return the region that covers a tensor of this shape."""
    return tuple(AxisRange(0, size) for size in shape)


def copies_into_megatron(blocks: Sequence[WeightBlock]) -> dict[str, list[RegionCopy]]:
    """Return, for each Megatron tensor, the copies from Hugging Face tensors that fill it."""
    copies: dict[str, list[RegionCopy]] = {}
    for block in blocks:
        copies.setdefault(block.mcore_key, []).append(
            RegionCopy(block.mcore_where, block.hf_name, block.hf_where, block.transposed)
        )
    return copies


def copies_into_hf(blocks: Sequence[WeightBlock]) -> dict[str, list[RegionCopy]]:
    """Return, for each Hugging Face tensor, the copies from Megatron tensors that fill it."""
    copies: dict[str, list[RegionCopy]] = {}
    for block in blocks:
        copies.setdefault(block.hf_name, []).append(
            RegionCopy(block.hf_where, block.mcore_key, block.mcore_where, block.transposed)
        )
    return copies


def composed(copies: Sequence[RegionCopy], through: Mapping[str, Sequence[RegionCopy]]) -> list[RegionCopy]:
    """Compose copies: every source of `copies` is a target of `through`; the result copies from `through`'s sources."""
    result = []
    for copy in copies:
        for inner in through[copy.source]:
            if overlap(inner.into, copy.where):
                part = cut(inner, copy.where)
                # Swapping the axes twice has no effect.
                transposed = part.transposed != copy.transposed
                result.append(RegionCopy(_moved(part.into, copy), part.source, part.where, transposed))
    return result


def overlap(region: Region, window: Region) -> bool:
    """Return whether a region has positions in a window; the window's axes must have step 1."""
    return all(low < high for low, high in map(_positions_inside, region, window))


def cut(copy: RegionCopy, window: Region) -> RegionCopy:
    """Return the part of a copy inside a window of the target; its `into` is relative to the window."""
    inside = [_positions_inside(axis, edge) for axis, edge in zip(copy.into, window, strict=True)]
    into = tuple(
        _shifted(_positions(axis, *positions), edge.start)
        for axis, positions, edge in zip(copy.into, inside, window, strict=True)
    )
    where = list(copy.where)
    for axis, other in _axes_that_match(len(copy.into), len(where), copy.transposed):
        where[other] = _positions(where[other], *inside[axis])
    return RegionCopy(into, copy.source, tuple(where), copy.transposed)


def _moved(part: Region, copy: RegionCopy) -> Region:
    """Return the region of the copy's target that corresponds to `part`, a region relative to `copy.where`."""
    moved = list(copy.into)
    for axis, other in _axes_that_match(len(moved), len(part), copy.transposed):
        moved[axis] = _positions(moved[axis], part[other].start, part[other].stop)
    return tuple(moved)


def _positions_inside(axis: AxisRange, window: AxisRange) -> tuple[int, int]:
    """Return the first position, and the position after the last, of an axis inside a window, counted from 0."""
    # Negated twice, floor division rounds up, to the first step that reaches the edge.
    low, high = (-((axis.start - edge) // axis.step) for edge in window[:2])
    return max(low, 0), min(high, axis.count)


def _positions(axis: AxisRange, low: int, high: int) -> AxisRange:
    """Return an axis's positions low <= i < high, counted from 0."""
    # The last position is high - 1; a stop right after it keeps `count` correct for any step.
    return AxisRange(axis.start + low * axis.step, axis.start + (high - 1) * axis.step + 1, axis.step)


def _shifted(axis: AxisRange, by: int) -> AxisRange:
    return AxisRange(axis.start - by, axis.stop - by, axis.step)


def _axes_that_match(num_axes: int, num_others: int, transposed: bool) -> Iterator[tuple[int, int]]:
    """Yield pairs of corresponding axes of two regions, as negative indices."""
    for back in range(1, min(num_axes, num_others) + 1):
        # Transposed, axis -1 goes with -2 and -2 with -1.
        yield -back, -(3 - back) if transposed and back <= 2 else -back
