"""The quick checks of shards find what comparing all pairs finds, and leave the rest to torch."""

import itertools
import random
from typing import Any

import pytest
import torch
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from mcore_rl.megatron.patches.replacements import find_overlap_on_grid, validate_plan_on_grid

Box = tuple[tuple[int, ...], tuple[int, ...]]


def overlapping(boxes: list[Box]) -> set[frozenset[int]]:
    """Pairs whose intersection is not empty, by comparing all of them."""
    return {
        frozenset((i, j))
        for (i, (a, m)), (j, (b, n)) in itertools.combinations(enumerate(boxes), 2)
        if all(max(x, y) < min(x + p, y + q) for x, p, y, q in zip(a, m, b, n, strict=True))
    }


def grid(counts: tuple[int, ...], size: tuple[int, ...]) -> list[Box]:
    return [
        (tuple(i * n for i, n in zip(place, size, strict=True)), size)
        for place in itertools.product(*map(range, counts))
    ]


def shards(boxes: list[Box]) -> list[ShardMetadata]:
    return [ShardMetadata(list(offsets), list(sizes), "rank:0/cpu") for offsets, sizes in boxes]


def refused(*_: Any) -> Any:
    raise AssertionError("torch was asked")


def test_a_whole_grid_has_no_overlap_and_torch_is_not_asked() -> None:
    boxes = grid((4, 6, 2), (1, 1, 8))
    random.Random(0).shuffle(boxes)
    assert find_overlap_on_grid(refused)(shards(boxes), [0, 1, 2]) is None


@pytest.mark.parametrize("seed", range(20))
def test_two_shards_at_one_place_are_found(seed: int) -> None:
    generator = random.Random(seed)
    boxes = grid((3, 4), (2, 5))
    boxes.insert(generator.randrange(len(boxes)), generator.choice(boxes))
    found = find_overlap_on_grid(refused)(shards(boxes), [0, 1])
    assert found is not None and {frozenset(found)} == overlapping(boxes)


@pytest.mark.parametrize(
    "boxes",
    [[((0, 0), (2, 2)), ((1, 1), (2, 2))], [((0, 0), (2, 2)), ((0, 2), (2, 3))], [((0, 0), (0, 2)), ((0, 2), (0, 2))]],
    ids=["shifted", "uneven", "empty"],
)
def test_what_is_no_grid_is_left_to_torch(boxes: list[Box]) -> None:
    assert find_overlap_on_grid(lambda given, dims: (len(given), dims[0]))(shards(boxes), [7]) == (2, 7)


def entry(boxes: list[Box], size: tuple[int, ...]) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes]
    return TensorStorageMetadata(TensorProperties(), torch.Size(size), chunks)


def test_only_tensors_that_are_not_evidently_whole_are_left_to_torch() -> None:
    whole = grid((2, 3), (4, 4))
    entries = {
        "whole": entry(whole, (8, 12)),
        "with a hole": entry(whole[:-1], (8, 12)),
        "beyond its end": entry([*whole[:-1], ((8, 0), (4, 4))], (8, 12)),
        "one place twice": entry([*whole[:-1], whole[0]], (8, 12)),
        "uneven": entry([((0, 0), (4, 12)), ((4, 0), (4, 6)), ((4, 6), (4, 6))], (8, 12)),
        "without chunks": entry([], (8, 12)),
    }
    metadata = Metadata(state_dict_metadata=dict(entries))
    left = validate_plan_on_grid(lambda plan, given: (plan, list(given.state_dict_metadata)))("plan", metadata)
    assert left == ("plan", [name for name in entries if name != "whole"])
    assert metadata.state_dict_metadata.keys() == entries.keys(), "the plan itself is as it was"
