"""Routes are read as they were written from both stores."""

from typing import Any

import pytest
import torch

from mcore_rl.replay.cache import RouteStorage

CPU = torch.device("cpu")


@pytest.mark.parametrize("store", ["device", "pinned"])
def test_rows_are_read_from_both_stores(store: Any) -> None:
    blocks = RouteStorage(store, CPU)
    rows = torch.arange(60, dtype=torch.uint8).view(12, 5)
    number, empty = blocks.add(rows), blocks.add(rows[:0])
    rows.zero_()
    assert blocks.read(number, torch.tensor([3, 1, 3]), CPU).tolist() == [
        [15, 16, 17, 18, 19],
        [5, 6, 7, 8, 9],
        [15, 16, 17, 18, 19],
    ]
    assert blocks.read(empty, torch.arange(0), CPU).shape == (0, 5)


@pytest.mark.parametrize("store", ["device", "pinned"])
def test_a_block_that_is_dropped_takes_no_memory_and_the_others_stay(store: Any) -> None:
    blocks = RouteStorage(store, CPU)
    first, second = (blocks.add(torch.full((8, 6), value, dtype=torch.uint8)) for value in (1, 2))
    assert blocks.num_bytes == 96
    blocks.drop(first)
    assert blocks.num_bytes == 48 and blocks.read(second, torch.arange(8), CPU).unique().tolist() == [2]
