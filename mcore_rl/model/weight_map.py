"""Which rectangle of which Hugging Face tensor is which rectangle of which Megatron tensor.

Megatron's distributed checkpoints hold whole tensors, whatever mesh they were trained on, and so do Hugging Face's
files: a conversion is a set of rectangle copies, the same in both directions. Nothing here needs a model or a byte.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from mcore_rl.errors import CheckpointError

Shape = tuple[int, ...]

NO_WEIGHTS = re.compile(r"\.rotary_emb\.inv_freq$")
"""Hugging Face tensors that old checkpoints carry although they follow from the config."""


class Span(NamedTuple):
    """The positions start <= i < stop of one axis."""

    start: int
    stop: int


Where = tuple[Span, ...]
"""A rectangle: a span an axis."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows start <= i < stop of a Hugging Face tensor; a row is what one index of its first axis selects."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """Megatron's tensor `key`, or the slice of it at `index`, is these rows in this order, then rows of zeros."""

    key: str
    rows: tuple[Rows, ...]
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
class Block:
    """The rectangle `hf_where` of `hf_name` is the rectangle `mcore_where` of `mcore_key`, element by element.

    The Megatron side may have further axes in front, on which it is one position wide.
    """

    hf_name: str
    hf_where: Where
    mcore_key: str
    mcore_where: Where


@dataclass(frozen=True, slots=True)
class Copy:
    """A Hugging Face tensor that repeats another: it may be absent, and must be equal where it is not."""

    name: str
    original: str
    written: bool
    """Whether the family's published checkpoints have it, so that an export writes it too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightMap:
    """All of a model: the tensors of both sides by name and shape, and the blocks that pair them."""

    blocks: tuple[Block, ...]
    hf_shapes: Mapping[str, Shape]
    """Without the copies."""
    mcore_shapes: Mapping[str, Shape]
    padding: tuple[tuple[str, Where], ...]
    """Rectangles of Megatron tensors that are zero on import and dropped on export."""
    fp32_keys: frozenset[str]
    copies: tuple[Copy, ...]

    def prove(self) -> None:
        """CheckpointError unless the blocks use every Hugging Face element, and write every Megatron element, once."""
        used: dict[str, list[Where]] = {name: [] for name in self.hf_shapes}
        written: dict[str, list[Where]] = {key: [] for key in self.mcore_shapes}
        faults = []
        for block in self.blocks:
            used[block.hf_name].append(block.hf_where)
            written[block.mcore_key].append(block.mcore_where)
            if _squeezed(block.mcore_where, len(block.hf_where)) != _sizes(block.hf_where):
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


def build_map(rules: Iterable[Rule], copies: Iterable[Copy]) -> WeightMap:
    """The map that `rules` describe."""
    blocks: list[Block] = []
    padding: list[tuple[str, Where]] = []
    hf_shapes: dict[str, Shape] = {}
    mcore_shapes: dict[str, Shape] = {}
    fp32_keys = set()
    for rule in rules:
        at = tuple(Span(i, i + 1) for i in rule.index)
        row = tuple(Span(0, size) for size in rule.row)
        position = 0
        for rows in rule.rows:
            count = rows.stop - rows.start
            end = Span(position, position + count)
            blocks.append(Block(rows.name, (Span(rows.start, rows.stop), *row), rule.key, (*at, end, *row)))
            position += count
            known_rows = hf_shapes.get(rows.name, (0,))[0]
            hf_shapes[rows.name] = (max(known_rows, rows.stop), *rule.row)
        if rule.padding:
            padding.append((rule.key, (*at, Span(position, position + rule.padding), *row)))
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


def covered_otherwise_than_once(shape: Shape, places: list[Where]) -> Iterator[tuple[Where, int]]:
    """The parts of a tensor of `shape` that not exactly one of the rectangles covers, and how many do.

    Exact for any rectangles: each axis is cut at every start and stop.
    """
    for place in places:
        fits = len(place) == len(shape)
        if not fits or any(not 0 <= s.start < s.stop <= n for s, n in zip(place, shape, strict=True)):
            yield place, -1
            return
    yield from _miscovered(shape, places, ())


def listed(lines: Iterable[str], most: int = 20) -> str:
    """The first lines, and how many more there are."""
    lines = list(lines)
    more = [f"... and {len(lines) - most} more"] if len(lines) > most else []
    return "\n".join(f"  {line}" for line in [*lines[:most], *more])


def _miscovered(shape: Shape, places: list[Where], front: Where) -> Iterator[tuple[Where, int]]:
    whole = tuple(Span(0, size) for size in shape)
    if not places or places == [whole] or not shape:
        if len(places) != 1:
            yield (*front, *whole), len(places)
        return
    cuts = sorted({0, shape[0], *(place[0].start for place in places), *(place[0].stop for place in places)})
    slab_at = {cut: i for i, cut in enumerate(cuts)}
    slabs: list[list[Where]] = [[] for _ in cuts[1:]]
    for place in places:
        for slab in slabs[slab_at[place[0].start] : slab_at[place[0].stop]]:
            slab.append(place[1:])
    for start, stop, slab in zip(cuts, cuts[1:], slabs, strict=False):
        yield from _miscovered(shape[1:], slab, (*front, Span(start, stop)))


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


def _sizes(where: Where) -> Shape:
    return tuple(span.stop - span.start for span in where)


def _squeezed(where: Where, num_axes: int) -> Shape:
    """The sizes on the last `num_axes` axes, if the others are one position wide."""
    sizes = _sizes(where)
    extra = len(sizes) - num_axes
    return sizes[extra:] if extra >= 0 and math.prod(sizes[:extra]) == 1 else sizes


def _shown(where: Where) -> str:
    return "[" + ", ".join(f"{span.start}:{span.stop}" for span in where) + "]"
