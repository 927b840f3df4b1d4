"""The quick checks of shards find what comparing all pairs finds, and leave the rest to torch."""

import itertools
import random
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing import exchange_utils
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from mcore_rl.megatron.patches.replacements import (
    find_overlap_on_grid,
    read_items_on_grid,
    shards_to_least_busy,
    validate_plan_on_grid,
)

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


COMPARED: list[int] = []


def all_pairs(fqn: str, stored: TensorStorageMetadata, chunks: list[ChunkStorageMetadata]) -> list[ReadItem]:
    """The reads that fill `chunks` from the stored ones, by comparing all pairs."""
    items = []
    for (i, mine), (j, theirs) in itertools.product(enumerate(chunks), enumerate(stored.chunks)):
        COMPARED.append(1)
        low = [max(a, b) for a, b in zip(mine.offsets, theirs.offsets, strict=True)]
        ends = [(c.offsets[d] + c.sizes[d]) for d in range(len(low)) for c in (mine, theirs)]
        lengths = [min(pair) - at for pair, at in zip(zip(ends[::2], ends[1::2], strict=True), low, strict=True)]
        if min(lengths) > 0:
            items.append(
                ReadItem(
                    type=LoadItemType.TENSOR,
                    dest_index=MetadataIndex(fqn, mine.offsets, i),
                    dest_offsets=torch.Size(a - b for a, b in zip(low, mine.offsets, strict=True)),
                    storage_index=MetadataIndex(fqn, theirs.offsets, j),
                    storage_offsets=torch.Size(a - b for a, b in zip(low, theirs.offsets, strict=True)),
                    lengths=torch.Size(lengths),
                )
            )
    return items


def hinted(items: list[ReadItem]) -> list[tuple[Any, ...]]:
    """Reads in a fixed order, with the places in lists that torch leaves out when it compares indices."""
    return sorted(
        (
            *(one.dest_index.index, one.storage_index.index, one.dest_index.offset, one.storage_index.offset),
            *(one.dest_offsets, one.storage_offsets, one.lengths),
        )
        for one in items
    )


@pytest.mark.parametrize("seed", range(10))
def test_reads_of_shards_are_those_of_comparing_all_pairs(seed: int) -> None:
    """Stored shards are a grid, with holes or not; those that are read are of any other cut."""
    generator = random.Random(seed)
    stored = entry(generator.sample(grid((4, 3, 2), (1, 2, 5)), 24 - seed), (4, 6, 10))
    chunks = entry([*generator.sample(grid((2, 2, 5), (2, 3, 2)), 9), ((0, 1, 3), (4, 4, 5))], (4, 6, 10)).chunks
    expected = all_pairs("w", stored, chunks)
    assert hinted(read_items_on_grid(all_pairs)("w", stored, chunks)) == hinted(expected)
    assert hinted(create_read_items_for_chunk_list("w", stored, chunks)) == hinted(expected), "torch's, patched"


def test_the_time_to_plan_a_load_grows_with_the_shards_and_not_with_their_square() -> None:
    boxes = grid((16, 32, 1), (1, 1, 99))
    stored = entry(boxes, (16, 32, 99))
    COMPARED.clear()
    assert len(read_items_on_grid(all_pairs)("w", stored, stored.chunks)) == len(COMPARED) == len(boxes)


def test_what_is_stored_otherwise_than_on_a_grid_is_planned_by_torch() -> None:
    uneven = entry([((0, 0), (1, 4)), ((1, 0), (3, 4))], (4, 4))
    assert read_items_on_grid(lambda *given: list(given))("w", uneven, uneven.chunks) == ["w", uneven, uneven.chunks]


@pytest.mark.parametrize("seed", range(10))
def test_shards_go_to_the_least_busy_ranks_as_megatron_distributes_them(seed: int) -> None:
    """By its rule: shards that few ranks have first, then large ones; each to the rank with the fewest bytes so far."""
    generator = random.Random(seed)
    names = [(f"shard {index}", (index,), None) for index in range(30)]
    ranks = {name: sorted(generator.sample(range(9), generator.randint(1, 9))) for name in names}
    sizes = {name: generator.choice([1, 2, 3, 50]) for name in names}
    last = set(generator.sample(names, 5))
    expected, given = {}, dict.fromkeys(range(9), 0)
    order = sorted(names, key=lambda name: name)
    for name in sorted(order, key=lambda name: (name in last, len(ranks[name]), -sizes[name])):
        fewest = min(given[rank] for rank in ranks[name])
        expected[name] = next(rank for rank in ranks[name] if given[rank] == fewest)
        given[expected[name]] += sizes[name]
    assert shards_to_least_busy(None)(ranks, sizes, 9, last) == expected
    assert exchange_utils.distribute_shards_to_ranks(ranks, sizes, 9, last) == expected, "Megatron's, patched"
