"""Encoded routes are read as they were written from every store."""

import os
import resource
import signal
from pathlib import Path

import pytest
import torch

from mcore_rl.errors import DataError, RoutingError
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
    file = blocks._file
    assert file is not None and os.fstat(file.fileno()).st_size == 48
    for number in numbers:
        blocks.drop(number)
    assert blocks.num_bytes == 0 and file.closed


def test_blocks_follow_each_other_in_the_file(tmp_path: Path) -> None:
    blocks = RouteStorage("file", None, tmp_path, CPU)
    content = [torch.randint(0, 256, (n, 7), dtype=torch.uint8) for n in (5, 0, 9)]
    numbers = [blocks.add(rows) for rows in content]
    for number, rows in zip(numbers, content, strict=True):
        order = torch.randperm(len(rows)).repeat(2)
        assert torch.equal(blocks.read(number, order, CPU), rows[order])


def test_a_process_that_is_killed_leaves_no_file(tmp_path: Path) -> None:
    blocks = RouteStorage("file", None, tmp_path, CPU)
    rows = torch.ones(100, 10, dtype=torch.uint8)
    child = os.fork()
    if child == 0:
        blocks.add(rows)
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_has_lost_its_end_is_an_error(tmp_path: Path) -> None:
    blocks = RouteStorage("file", None, tmp_path, CPU)
    number = blocks.add(torch.zeros(10, 10, dtype=torch.uint8))
    assert blocks._file is not None
    os.ftruncate(blocks._file.fileno(), 55)
    assert blocks.read(number, torch.arange(5), CPU).shape == (5, 10)
    with pytest.raises(RoutingError, match="ends at byte 55, 5 bytes too early"):
        blocks.read(number, torch.arange(6), CPU)


def test_a_full_disk_is_named_with_a_remedy(tmp_path: Path) -> None:
    """A limit on the size of files stops a writer as a full disk does."""
    blocks = RouteStorage("file", None, tmp_path / "routes", CPU)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(
            DataError, match=rf"^{tmp_path}/routes: File too large\. 0\.00 GiB of routes .* Free space"
        ):
            blocks.add(torch.zeros(5000, 1, dtype=torch.uint8))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
