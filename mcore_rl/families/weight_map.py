"""Which rectangle of which Hugging Face tensor is which rectangle of which Megatron tensor.

Megatron's distributed checkpoints hold whole tensors, whatever mesh they were trained on, and so do Hugging Face's
files: a conversion is a set of rectangle copies, the same in both directions. Nothing here needs a model or a byte.
"""

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from mcore_rl.errors import CheckpointError

Shape = tuple[int, ...]

NO_WEIGHTS = re.compile(r"\.rotary_emb\.inv_freq$")
"""Hugging Face tensors that old checkpoints carry although they follow from the config."""


class AxisRange(NamedTuple):
    """The positions start <= i < stop of one axis, every `step`-th of them."""

    start: int
    stop: int
    step: int = 1

    @property
    def count(self) -> int:  # type: ignore[override]
        """How many positions these are."""
        return -((self.start - self.stop) // self.step)


Region = tuple[AxisRange, ...]
"""A rectangle: a span an axis; with steps its rows or columns lie apart."""


@dataclass(frozen=True, slots=True)
class HfRows:
    """Rows start <= i < stop of a Hugging Face tensor; a row is what one index of its first axis selects.

    `at` picks from axes before that one: an expert of a tensor that holds all. Transposed, the last axis counts.
    """

    name: str
    start: int
    stop: int
    step: int = 1
    at: tuple[int, ...] = ()
    transposed: bool = False

    def where(self, row: Shape) -> Region:
        """The rectangle, of rows of this shape."""
        rows, across = (
            (AxisRange(self.start, self.stop, self.step),),
            tuple(AxisRange(0, size) for size in row),
        )
        lead = tuple(AxisRange(i, i + 1) for i in self.at)
        return (*lead, *across, *rows) if self.transposed else (*lead, *rows, *across)


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightRule:
    """Megatron's tensor `key`, or the slice of it at `index`, is these rows in this order, then rows of zeros."""

    key: str
    rows: tuple[HfRows, ...]
    row: Shape
    """Shape of one row; () when the tensors are vectors."""
    index: tuple[int, ...] = ()
    """The layer, the expert that the slice belongs to, where the tensor holds several."""
    lead: Shape = ()
    """Sizes of the axes that `index` picks from."""
    padding: int = 0
    """How many rows of zeros."""
    fp32: bool = False
    """Megatron keeps it in fp32, whatever the model's type."""


@dataclass(frozen=True, slots=True)
class WeightBlock:
    """The rectangle `hf_where` of `hf_name` is the rectangle `mcore_where` of `mcore_key`, element by element.

    One side may have further axes in front, on which it is one position wide. Transposed, the last two
    axes of one side are those of the other exchanged.
    """

    hf_name: str
    hf_where: Region
    mcore_key: str
    mcore_where: Region
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class DuplicateTensor:
    """A Hugging Face tensor that repeats another: it may be absent, and must be equal where it is not."""

    name: str
    original: str
    written: bool
    """Whether the family's published checkpoints have it, so that an export writes it too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightMap:
    """All of a model: the tensors of both sides by name and shape, and the blocks that pair them."""

    blocks: tuple[WeightBlock, ...]
    hf_shapes: Mapping[str, Shape]
    """Without the copies."""
    mcore_shapes: Mapping[str, Shape]
    padding: tuple[tuple[str, Region], ...]
    """Rectangles of Megatron tensors that are zero on import and dropped on export."""
    fp32_keys: frozenset[str]
    copies: tuple[DuplicateTensor, ...]

    def prove(self) -> None:
        """CheckpointError unless the blocks use every Hugging Face element, and write every Megatron element, once."""
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
                faults.append(
                    f"{block.hf_name} {_shown(block.hf_where)} and {block.mcore_key} differ in shape"
                )
        for key, where in self.padding:
            written[key].append(where)
        for tensors, verb, shapes in (
            (used, "used", self.hf_shapes),
            (written, "written", self.mcore_shapes),
        ):
            for name, places in tensors.items():
                for where, times in covered_otherwise_than_once(shapes[name], places):
                    faults.append(f"{name} {_shown(where)} is {verb} {times} times")
        if faults:
            raise CheckpointError(
                f"the rules do not pair the tensors element by element:\n{listed(faults)}\n"
                "This is a mistake in the family's rules."
            )

    def check_hf(self, shapes: Mapping[str, Shape]) -> None:
        """CheckpointError when these are not the tensors of a Hugging Face checkpoint of this model."""
        copies = {copy.name: self.hf_shapes[copy.original] for copy in self.copies}
        known = {
            name: shape
            for name, shape in shapes.items()
            if name not in copies and not NO_WEIGHTS.search(name)
        }
        faults = [
            f"{name} has shape {shapes[name]}, its original {shape}"
            for name, shape in copies.items()
            if shapes.get(name, shape) != shape
        ]
        _check("The Hugging Face tensors", [*_differences(known, self.hf_shapes), *faults])

    def check_mcore(self, shapes: Mapping[str, Shape]) -> None:
        """CheckpointError when these are not the global tensors of this model."""
        _check("The Megatron tensors", list(_differences(shapes, self.mcore_shapes)))


def build_map(rules: Iterable[WeightRule], copies: Iterable[DuplicateTensor]) -> WeightMap:
    """The map that `rules` describe."""
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


def covered_otherwise_than_once(shape: Shape, places: list[Region]) -> Iterator[tuple[Region, int]]:
    """The parts of a tensor of `shape` that not exactly one of the rectangles covers, and how many do.

    Exact for any rectangles: each axis is cut at every start and stop, and by what is left over the steps.
    """
    for place in places:
        fits = len(place) == len(shape)
        if not fits or any(
            not 0 <= s.start < s.stop <= n or s.step < 1 for s, n in zip(place, shape, strict=True)
        ):
            yield place, -1
            return
    yield from _miscovered(shape, places, ())


def listed(lines: Iterable[str], most: int = 20) -> str:
    """The first lines, and how many more there are."""
    lines = list(lines)
    more = [f"... and {len(lines) - most} more"] if len(lines) > most else []
    return "\n".join(f"  {line}" for line in [*lines[:most], *more])


def _miscovered(shape: Shape, places: list[Region], front: Region) -> Iterator[tuple[Region, int]]:
    whole = tuple(AxisRange(0, size) for size in shape)
    if not places or places == [whole] or not shape:
        if len(places) != 1:
            yield (*front, *whole), len(places)
        return
    for span, slab in _slabs(shape[0], places):
        yield from _miscovered(shape[1:], slab, (*front, span))


def _slabs(size: int, places: list[Region]) -> list[tuple[AxisRange, list[Region]]]:
    """The first axis in parts of which a place covers all or nothing, and what lies on each, without that axis."""
    axis = [place[0] for place in places]
    cuts = sorted({0, size, *(span.start for span in axis), *(span.stop for span in axis)})
    period = math.lcm(*(span.step for span in axis))
    parts: list[list[tuple[AxisRange, list[Region]]]] = [
        [(AxisRange(first, stop, period), []) for first in range(start, min(start + period, stop))]
        for start, stop in itertools.pairwise(cuts)
    ]
    part_at = {cut: i for i, cut in enumerate(cuts)}
    for place, span in zip(places, axis, strict=True):
        for between in parts[part_at[span.start] : part_at[span.stop]]:
            for part, slab in between:
                if (part.start - span.start) % span.step == 0:
                    slab.append(place[1:])
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
            f"{what} are not those of the model:\n{listed(faults)}\n"
            "Is the model's config that of the checkpoint?"
        )


def _sizes(where: Region) -> Shape:
    return tuple(span.count for span in where)


def _squeezed(where: Region, num_axes: int) -> Shape:
    """The sizes on the last `num_axes` axes, if the others are one position wide."""
    sizes = _sizes(where)
    extra = len(sizes) - num_axes
    return sizes[extra:] if extra >= 0 and math.prod(sizes[:extra]) == 1 else sizes


def _shown(where: Region) -> str:
    steps = (f":{span.step}" if span.step > 1 else "" for span in where)
    return "[" + ", ".join(f"{s.start}:{s.stop}{step}" for s, step in zip(where, steps, strict=True)) + "]"
