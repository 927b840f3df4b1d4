"""Quick checks that shards make up a tensor, for the usual case of a regular grid.

Torch compares every shard with every other that meets it along one axis, which it chooses badly for experts: a stack of
48 layers x 128 experts x 2 halves is 12,288 shards, and a save then hangs for minutes on every rank.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

FindOverlap = Callable[[Sequence[Any], Sequence[int]], tuple[int, int] | None]


def find_overlap_on_grid(find_overlap: FindOverlap) -> FindOverlap:
    """Return the indices of two shards that overlap. On a grid these have the same offset; else torch searches."""

    def find(shards: Sequence[Any], sharded_dims: Sequence[int]) -> tuple[int, int] | None:
        places = [tuple(shard.shard_offsets) for shard in shards]
        if not _is_grid(places, [tuple(shard.shard_sizes) for shard in shards]):
            return find_overlap(shards, sharded_dims)
        if len(set(places)) == len(places):
            return None
        first: dict[tuple[int, ...], int] = {}
        return next((first[place], i) for i, place in enumerate(places) if first.setdefault(place, i) != i)

    return find


def validate_plan_on_grid(validate: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return torch's check of a save's plan without the tensors that are whole grids."""

    def check(global_plan: Any, metadata: Any) -> Any:
        entries = metadata.state_dict_metadata
        rest = {name: entry for name, entry in entries.items() if not _is_whole(entry)}
        return validate(global_plan, dataclasses.replace(metadata, state_dict_metadata=rest))

    return check


def _is_whole(entry: Any) -> bool:
    """Return whether the chunks of a stored tensor are a grid that fills it, each offset once."""
    chunks = getattr(entry, "chunks", None)
    if not chunks:
        return False
    places = [tuple(chunk.offsets) for chunk in chunks]
    size = tuple(chunks[0].sizes)
    return (
        _is_grid(places, [tuple(chunk.sizes) for chunk in chunks])
        and all(
            offset + n <= end
            for place in places
            for offset, n, end in zip(place, size, entry.size, strict=True)
        )
        and len(set(places)) == len(places)
        and len(places) * math.prod(size) == math.prod(entry.size)
    )


def _is_grid(places: Sequence[tuple[int, ...]], sizes: Sequence[tuple[int, ...]]) -> bool:
    """Return whether all sizes are the same and each offset is a multiple of its size."""
    size = sizes[0]
    if 0 in size or any(other != size for other in sizes):
        return False
    return not any(offset % n for place in places for offset, n in zip(place, size, strict=True))
