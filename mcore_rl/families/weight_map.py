"""The mapping between two formats: each region of a Hugging Face tensor is a region of a Megatron tensor.

Megatron's distributed checkpoints have whole tensors, independent of the mesh, and so do Hugging Face's files: a
conversion is a set of copies of regions, the same in both directions. This module needs neither a model nor weights.
"""

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from mcore_rl.errors import CheckpointError

Shape = tuple[int, ...]

NO_WEIGHTS = re.compile(r"\.rotary_emb\.inv_freq$")
"""Names of tensors in old Hugging Face checkpoints that are determined by the config."""


class AxisRange(NamedTuple):
    """Indices start <= i < stop of an axis, in steps of `step`."""

    start: int
    stop: int
    step: int = 1

    @property
    def count(self) -> int:  # type: ignore[override]  # in place of tuple's method, which would search the three
        """Number of indices."""
        # Negated twice, floor division rounds up.
        return -((self.start - self.stop) // self.step)


Region = tuple[AxisRange, ...]
"""Region of a tensor: a range for each axis."""


@dataclass(frozen=True, slots=True)
class HfRows:
    """Rows start <= i < stop of a Hugging Face tensor; a row is one index of the first axis."""

    name: str
    start: int
    stop: int
    step: int = 1
    """Distance from each row to the next."""
    at: tuple[int, ...] = ()
    """Indices on the axes before the row axis, such as an expert's in a tensor of all experts."""
    transposed: bool = False
    """True if rows are counted on the last axis: Hugging Face's matrix is Megatron's transposed."""

    def where(self, row: Shape) -> Region:
        """Return the region that rows of shape `row` cover."""
        rows, across = ((AxisRange(self.start, self.stop, self.step),), tuple(AxisRange(0, size) for size in row))
        lead = tuple(AxisRange(i, i + 1) for i in self.at)
        return (*lead, *across, *rows) if self.transposed else (*lead, *rows, *across)


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightRule:
    """Megatron's tensor `key`, or its slice at `index`, consists of these rows in order, then rows of zeros."""

    key: str
    """Complete key of the tensor in a distributed checkpoint."""
    rows: tuple[HfRows, ...]
    """Rows of Hugging Face's tensors, in the order of Megatron's rows."""
    row: Shape
    """Shape of one row; () for vectors."""
    index: tuple[int, ...] = ()
    """Layer and expert of the slice, if the tensor has several layers or experts."""
    lead: Shape = ()
    """Sizes of the axes that `index` selects from."""
    padding: int = 0
    """Number of rows of zeros at the end."""
    fp32: bool = False
    """True if Megatron keeps the tensor in fp32 for any model dtype."""


@dataclass(frozen=True, slots=True)
class WeightBlock:
    """The region `hf_where` of `hf_name` equals `mcore_where` of `mcore_key`, but for leading axes of size 1."""

    hf_name: str
    hf_where: Region
    mcore_key: str
    mcore_where: Region
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class DuplicateTensor:
    """A Hugging Face tensor that repeats another tensor: it may be absent, but if present, it equals the original."""

    name: str
    original: str
    written: bool
    """True if the family's published checkpoints have the tensor; an export then writes it too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightMap:
    """The tensors of a model on both sides, by name and shape, and the blocks that pair them."""

    blocks: tuple[WeightBlock, ...]
    hf_shapes: Mapping[str, Shape]
    """Shapes of Hugging Face's tensors, without duplicates."""
    mcore_shapes: Mapping[str, Shape]
    padding: tuple[tuple[str, Region], ...]
    """Regions of Megatron tensors, as (key, region), that are set to zero on import and left out on export."""
    fp32_keys: frozenset[str]
    """Keys of Megatron tensors that are fp32 in every checkpoint."""
    copies: tuple[DuplicateTensor, ...]
    """Hugging Face tensors that repeat another tensor."""

    def prove(self) -> None:
        """Raise CheckpointError unless each Hugging Face element is read, and each Megatron element written, once."""
        used: dict[str, list[Region]] = {name: [] for name in self.hf_shapes}
        written: dict[str, list[Region]] = {key: [] for key in self.mcore_shapes}
        faults = []
        for block in self.blocks:
            used[block.hf_name].append(block.hf_where)
            written[block.mcore_key].append(block.mcore_where)
            num_axes = min(len(block.hf_where), len(block.mcore_where))
            sizes = _squeezed(block.hf_where, num_axes)
            if block.transposed:
                sizes = (*sizes[:-2], *reversed(sizes[-2:]))
            if _squeezed(block.mcore_where, num_axes) != sizes:
                faults.append(f"{block.hf_name} {_shown(block.hf_where)} and {block.mcore_key} differ in shape")
        for key, where in self.padding:
            written[key].append(where)
        for tensors, verb, shapes in ((used, "used", self.hf_shapes), (written, "written", self.mcore_shapes)):
            for name, regions in tensors.items():
                for where, times in covered_otherwise_than_once(shapes[name], regions):
                    faults.append(f"{name} {_shown(where)} is {verb} {times} times")
        if faults:
            raise CheckpointError(
                f"the rules do not pair the tensors element by element:\n{listed(faults)}\n"
                "This is a mistake in the family's rules."
            )

    def check_hf(self, shapes: Mapping[str, Shape]) -> None:
        """Raise CheckpointError if `shapes` are not the tensors of a Hugging Face checkpoint of this model."""
        copies = {copy.name: self.hf_shapes[copy.original] for copy in self.copies}
        known = {name: shape for name, shape in shapes.items() if name not in copies and not NO_WEIGHTS.search(name)}
        faults = [
            f"{name} has shape {shapes[name]}, its original {shape}"
            for name, shape in copies.items()
            if shapes.get(name, shape) != shape
        ]
        _check("The Hugging Face tensors", [*_differences(known, self.hf_shapes), *faults])

    def check_mcore(self, shapes: Mapping[str, Shape]) -> None:
        """Raise CheckpointError if `shapes` are not the global tensors of this model in Megatron."""
        _check("The Megatron tensors", list(_differences(shapes, self.mcore_shapes)))


def build_map(rules: Iterable[WeightRule], copies: Iterable[DuplicateTensor]) -> WeightMap:
    """Return the map described by `rules`; the rows of each rule fill the Megatron tensor in order."""
    blocks: list[WeightBlock] = []
    padding: list[tuple[str, Region]] = []
    hf_shapes: dict[str, Shape] = {}
    mcore_shapes: dict[str, Shape] = {}
    fp32_keys = set()
    for rule in rules:
        at = tuple(AxisRange(i, i + 1) for i in rule.index)
        row = tuple(AxisRange(0, size) for size in rule.row)
        position = 0
        for rows in rule.rows:
            hf_where = rows.where(rule.row)
            end = position + AxisRange(rows.start, rows.stop, rows.step).count
            mcore_where = (*at, AxisRange(position, end), *row)
            blocks.append(WeightBlock(rows.name, hf_where, rule.key, mcore_where, rows.transposed))
            position = end
            known = hf_shapes.get(rows.name, (0,) * len(hf_where))
            hf_shapes[rows.name] = tuple(map(max, known, (span.stop for span in hf_where)))
        if rule.padding:
            padding.append((rule.key, (*at, AxisRange(position, position + rule.padding), *row)))
        shape = (*rule.lead, position + rule.padding, *rule.row)
        assert mcore_shapes.setdefault(rule.key, shape) == shape, f"{rule.key} has two shapes"
        if rule.fp32:
            fp32_keys.add(rule.key)
    return WeightMap(
        blocks=tuple(blocks),
        hf_shapes=hf_shapes,
        mcore_shapes=mcore_shapes,
        padding=tuple(padding),
        fp32_keys=frozenset(fp32_keys),
        copies=tuple(copies),
    )


def covered_otherwise_than_once(shape: Shape, regions: list[Region]) -> Iterator[tuple[Region, int]]:
    """Yield the parts of a tensor that not exactly one region covers, and how many do; -1: a region does not fit. It is
    exact: each axis is split at every start and stop, and by the remainder modulo the steps.
    """
    for region in regions:
        fits = len(region) == len(shape)
        if not fits or any(not 0 <= s.start < s.stop <= n or s.step < 1 for s, n in zip(region, shape, strict=True)):
            yield region, -1
            return
    yield from _miscovered(shape, regions, ())


def listed(lines: Iterable[str], most: int = 20) -> str:
    """Return the first `most` lines, indented, and the number of remaining lines."""
    lines = list(lines)
    more = [f"... and {len(lines) - most} more"] if len(lines) > most else []
    return "\n".join(f"  {line}" for line in [*lines[:most], *more])


def _miscovered(shape: Shape, regions: list[Region], front: Region) -> Iterator[tuple[Region, int]]:
    whole = tuple(AxisRange(0, size) for size in shape)
    if not regions or regions == [whole] or not shape:
        if len(regions) != 1:
            yield (*front, *whole), len(regions)
        return
    for span, slab in _slabs(shape[0], regions):
        yield from _miscovered(shape[1:], slab, (*front, span))


def _slabs(size: int, regions: list[Region]) -> list[tuple[AxisRange, list[Region]]]:
    """Split the first axis into parts that each region covers or not; each with its regions without that axis."""
    axis = [region[0] for region in regions]
    cuts = sorted({0, size, *(span.start for span in axis), *(span.stop for span in axis)})
    period = math.lcm(*(span.step for span in axis))
    parts: list[list[tuple[AxisRange, list[Region]]]] = [
        [(AxisRange(first, stop, period), []) for first in range(start, min(start + period, stop))]
        for start, stop in itertools.pairwise(cuts)
    ]
    part_at = {cut: i for i, cut in enumerate(cuts)}
    for region, span in zip(regions, axis, strict=True):
        for between in parts[part_at[span.start] : part_at[span.stop]]:
            for part, slab in between:
                if (part.start - span.start) % span.step == 0:
                    slab.append(region[1:])
    return [part for between in parts for part in between]


def _differences(found: Mapping[str, Shape], wanted: Mapping[str, Shape]) -> Iterator[str]:
    for name in sorted(wanted.keys() - found.keys()):
        yield f"{name} {wanted[name]} is missing"
    for name in sorted(found.keys() - wanted.keys()):
        yield f"{name} {found[name]} belongs to nothing in the model"
    for name in sorted(found.keys() & wanted.keys()):
        if tuple(found[name]) != wanted[name]:
            yield f"{name} has shape {tuple(found[name])}, the model wants {wanted[name]}"


def _check(what: str, faults: list[str]) -> None:
    if faults:
        raise CheckpointError(
            f"{what} are not those of the model:\n{listed(faults)}\nIs the model's config that of the checkpoint?"
        )


def _squeezed(where: Region, num_axes: int) -> Shape:
    """Return the sizes of the last `num_axes` axes if the region has size 1 on all other axes, else all sizes."""
    sizes = tuple(span.count for span in where)
    extra = len(sizes) - num_axes
    return sizes[extra:] if extra >= 0 and math.prod(sizes[:extra]) == 1 else sizes


def _shown(where: Region) -> str:
    steps = (f":{span.step}" if span.step > 1 else "" for span in where)
    return "[" + ", ".join(f"{s.start}:{s.stop}{step}" for s, step in zip(where, steps, strict=True)) + "]"


class RegionCopy(NamedTuple):
    """Region `into` of a target equals `where` of `source`, but for leading axes of size 1, or transposed."""

    into: Region
    source: str
    where: Region
    transposed: bool = False


class Copies(tuple[RegionCopy, ...]):
    """The copies that fill a tensor, found by window: to search all each time takes (layers x experts) squared."""

    def within(self, window: Region) -> Iterator[RegionCopy]:
        """Yield the parts of the copies inside a window of step 1, in order; `into` is relative to it."""
        front = [range(axis.start, axis.stop) for axis in window[: self.num_lead]]
        found = sorted(place for index in itertools.product(*front) for place in self._at.get(index, ()))
        for copy in (self[place] for place in found):
            if overlap(copy.into, window):
                yield cut(copy, window)

    @cached_property
    def num_lead(self) -> int:
        """Number of leading axes on which every copy fills a single index; 0 without copies."""
        num_axes = len(self[0].into) if self else 0
        return next((i for i in range(num_axes) if any(copy.into[i].count != 1 for copy in self)), num_axes)

    @cached_property
    def _at(self) -> dict[Shape, list[int]]:
        at: dict[Shape, list[int]] = {}
        for place, copy in enumerate(self):
            at.setdefault(tuple(axis.start for axis in copy.into[: self.num_lead]), []).append(place)
        return at

    def __reduce__(self) -> tuple[type["Copies"], tuple[tuple[RegionCopy, ...]]]:
        return Copies, (tuple(self),)  # without the index, which is sooner made than sent


def sizes(where: Region) -> Shape:
    """Return the shape of a region."""
    return tuple(axis.count for axis in where)


def whole(shape: Shape) -> Region:
    """Return the region that covers a tensor of this shape."""
    return tuple(AxisRange(0, size) for size in shape)


FP8_BLOCK = 128
"""Rows and columns of an fp8 block unless config.json has other numbers."""
LINEAR = tuple(f".{name}.weight" for name in "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj w1 w2 w3".split())
"""Ends of Hugging Face's names of the matrices of attention, MLPs and experts, in the families that servers take."""


def copies_into_megatron(blocks: Sequence[WeightBlock]) -> dict[str, Copies]:
    """Return, for each Megatron tensor, the copies from Hugging Face tensors that fill it."""
    copies: dict[str, list[RegionCopy]] = {}
    for block in blocks:
        copies.setdefault(block.mcore_key, []).append(
            RegionCopy(block.mcore_where, block.hf_name, block.hf_where, block.transposed)
        )
    return {key: Copies(found) for key, found in copies.items()}


def copies_into_hf(blocks: Sequence[WeightBlock]) -> dict[str, Copies]:
    """Return, for each Hugging Face tensor, the copies from Megatron tensors that fill it."""
    copies: dict[str, list[RegionCopy]] = {}
    for block in blocks:
        copies.setdefault(block.hf_name, []).append(
            RegionCopy(block.hf_where, block.mcore_key, block.mcore_where, block.transposed)
        )
    return {name: Copies(found) for name, found in copies.items()}


def composed(copies: Sequence[RegionCopy], through: Mapping[str, Copies]) -> Copies:
    """Compose copies: every source of `copies` is a target of `through`; the result copies from `through`'s sources."""
    return Copies(
        # Swapping the axes twice has no effect.
        RegionCopy(_moved(part.into, copy), part.source, part.where, part.transposed != copy.transposed)
        for copy in copies
        for part in through[copy.source].within(copy.where)
    )


def overlap(region: Region, window: Region) -> bool:
    """Return whether a region has positions in a window; the window's axes must have step 1."""
    return all(low < high for low, high in map(_positions_inside, region, window))


def cut(copy: RegionCopy, window: Region) -> RegionCopy:
    """Return the part of a copy inside a window of the target; its `into` is relative to the window."""
    inside = [_positions_inside(axis, edge) for axis, edge in zip(copy.into, window, strict=True)]
    into = []
    for covered, positions, edge in zip(copy.into, inside, window, strict=True):
        start, stop, step = _positions(covered, *positions)
        into.append(AxisRange(start - edge.start, stop - edge.start, step))
    where = list(copy.where)
    for axis, other in _axes_that_match(len(copy.into), len(where), copy.transposed):
        where[other] = _positions(where[other], *inside[axis])
    return RegionCopy(tuple(into), copy.source, tuple(where), copy.transposed)


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
    # The last position is high - 1; a stop right after it keeps `count` correct for any step.
    return AxisRange(axis.start + low * axis.step, axis.start + (high - 1) * axis.step + 1, axis.step)


def _axes_that_match(num_axes: int, num_others: int, transposed: bool) -> Iterator[tuple[int, int]]:
    """Yield pairs of corresponding axes of two regions, as negative indices."""
    for back in range(1, min(num_axes, num_others) + 1):
        # Transposed, axis -1 goes with -2 and -2 with -1.
        yield -back, -(3 - back) if transposed and back <= 2 else -back
