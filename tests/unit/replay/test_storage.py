"""Encoded routes are read as they were written from every store."""

import pytest
import torch

from mcore_rl.replay.storage import RouteStorage

CPU = torch.device("cpu")


@pytest.mark.parametrize("store", ["device", "pinned", "file"])
def test_rows_are_read_from_every_store(store, tmp_path) -> None:  # type: ignore[no-untyped-def]
    blocks = RouteStorage(store, None, tmp_path, CPU)
    rows = torch.arange(60, dtype=torch.uint8).view(12, 5)
    number = blocks.add(rows)
    rows.zero_()
    assert blocks.store_of(number) == store
    assert blocks.read(number, torch.tensor([3, 1]), CPU).tolist() == [
        [15, 16, 17, 18, 19],
        [5, 6, 7, 8, 9],
    ]


def test_what_is_beyond_the_budget_goes_to_the_next_slower_store(tmp_path) -> None:  # type: ignore[no-untyped-def]
    blocks = RouteStorage("device", 100, tmp_path / "routes", CPU)
    rows = torch.zeros(8, 6, dtype=torch.uint8)
    numbers = [blocks.add(rows) for _ in range(5)]
    assert [blocks.store_of(number) for number in numbers] == [
        "device",
        "device",
        "pinned",
        "pinned",
        "file",
    ]
    assert blocks.num_bytes == 5 * 48
    assert [path.stat().st_size for path in (tmp_path / "routes").iterdir()] == [48]
    for number in numbers:
        blocks.drop(number)
    assert blocks.num_bytes == 0 and not list((tmp_path / "routes").iterdir())
