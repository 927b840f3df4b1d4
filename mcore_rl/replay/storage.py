"""Memory for cached routes: on the device, in page-locked main memory, or in a file without a name."""

import os
import tempfile
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO, Literal

import torch
from torch import Tensor

from mcore_rl.backend.transfer import to_device
from mcore_rl.errors import RoutingError
from mcore_rl.files import disk_errors_explained

Store = Literal["device", "pinned", "file"]
FASTEST_FIRST: tuple[Store, ...] = ("device", "pinned", "file")


@dataclass(slots=True)
class StoredBlock:
    """Encoded tokens that were stored together."""

    store: Store
    num_tokens: int
    bytes_per_token: int
    bytes_nw: Tensor | None
    """The tokens; None: they are in the file."""
    offset: int = 0
    """First byte in the file."""

    @property
    def num_bytes(self) -> int:
        """Number of bytes of all tokens."""
        return self.num_tokens * self.bytes_per_token


class RouteStorage:
    """Blocks of encoded tokens; blocks beyond the budget of a store go to the next slower one.

    The file has no name: no other process can shorten it, and its space is free again whatever ends this one.
    """

    def __init__(
        self, store: Store, budget_bytes: int | None, folder: Path | None, device: torch.device
    ) -> None:
        """Create an empty storage.

        Args:
            store: the fastest store to use.
            budget_bytes: most bytes in each store except files; None: no limit.
            folder: a folder on the disk for files; it is made when it is needed.
            device: the device that "device" means.
        """
        self._stores = FASTEST_FIRST[FASTEST_FIRST.index(store) :]
        self._budget, self._folder, self._device = budget_bytes, folder, device
        self._blocks: dict[int, StoredBlock] = {}
        self._next_block = 0
        self._file: IO[bytes] | None = None
        self._file_end = 0

    def bytes_in(self, store: Store) -> int:
        """Return the number of bytes of all blocks in `store`."""
        return sum(block.num_bytes for block in self._blocks.values() if block.store == store)

    @property
    def num_bytes(self) -> int:
        """Number of bytes of all blocks in all stores."""
        return sum(block.num_bytes for block in self._blocks.values())

    def add(self, bytes_nw: Tensor) -> int:
        """Copy encoded tokens into a new block and return its index.

        Raises:
            DataError: The disk is full, or the folder may not be written to.
        """
        index, self._next_block = self._next_block, self._next_block + 1
        self._blocks[index] = self._stored(bytes_nw)
        return index

    def drop(self, block: int) -> None:
        """Forget a block; the last one that is in the file frees its space."""
        del self._blocks[block]
        if self._file is not None and not self.bytes_in("file"):
            self._file.close()
            self._file, self._file_end = None, 0

    def read(self, block: int, rows_n: Tensor, device: torch.device) -> Tensor:
        """Return some rows of a block, uint8 `[n, w]` on `device`; `rows_n` is on the CPU.

        Raises:
            RoutingError: The file ends before the rows do.
        """
        stored = self._blocks[block]
        if stored.bytes_nw is None:
            found_nw = self._read_file(stored, rows_n)
        else:
            found_nw = stored.bytes_nw[to_device(rows_n, stored.bytes_nw.device)]
        return to_device(found_nw, device)

    def store_of(self, block: int) -> Store:
        """Return the store that a block is in."""
        return self._blocks[block].store

    def _stored(self, bytes_nw: Tensor) -> StoredBlock:
        fits = [
            store
            for store in self._stores[:-1]
            if self._budget is None or self.bytes_in(store) + bytes_nw.numel() <= self._budget
        ]
        store = fits[0] if fits else self._stores[-1]
        num_tokens, bytes_per_token = bytes_nw.shape
        if store == "device":
            return StoredBlock(store, num_tokens, bytes_per_token, bytes_nw.to(self._device, copy=True))
        if store == "pinned":
            pinned = torch.empty(bytes_nw.shape, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
            pinned.copy_(bytes_nw, non_blocking=True)
            return StoredBlock(store, num_tokens, bytes_per_token, pinned)
        offset, self._file_end = self._file_end, self._file_end + bytes_nw.numel()
        self._write_file(offset, bytes_nw)
        return StoredBlock(store, num_tokens, bytes_per_token, None, offset)

    def _write_file(self, offset: int, bytes_nw: Tensor) -> None:
        assert self._folder is not None, "routes go to a file, but no folder was given"
        remedy = (
            f"{self._file_end / 2**30:.2f} GiB of routes belong there (replay.store, and what exceeds "
            'replay.budget_gib). Free space, raise replay.budget_gib, or set replay.encoding="sets".'
        )
        with disk_errors_explained(self._folder, remedy):
            if self._file is None:
                self._folder.mkdir(parents=True, exist_ok=True)
                self._file = tempfile.TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115  # until the drop
            rest = bytes_nw.cpu().contiguous().numpy().data.cast("B") if bytes_nw.numel() else b""
            while rest:
                written = os.pwrite(self._file.fileno(), rest, offset)
                offset, rest = offset + written, rest[written:]

    def _read_file(self, stored: StoredBlock, rows_n: Tensor) -> Tensor:
        if not len(rows_n) or not stored.bytes_per_token:
            return torch.empty(len(rows_n), stored.bytes_per_token, dtype=torch.uint8)
        assert self._file is not None
        # Completions share the rows of their prompt, which are read once.
        rising_n, index_n = rows_n.unique(return_inverse=True)
        # Runs of consecutive rows are read at once.
        bounds = [0, *((rising_n.diff() != 1).nonzero()[:, 0] + 1).tolist(), len(rising_n)]
        rising_nw = torch.empty(len(rising_n), stored.bytes_per_token, dtype=torch.uint8)
        buffer = rising_nw.numpy().data.cast("B")
        for first, last in pairwise(bounds):
            begin, end = first * stored.bytes_per_token, last * stored.bytes_per_token
            offset = stored.offset + int(rising_n[first]) * stored.bytes_per_token
            while begin < end:
                count = os.preadv(self._file.fileno(), [buffer[begin:end]], offset)
                if not count:
                    raise RoutingError(
                        f"The file of routes in {self._folder} ends at byte {offset}, {end - begin} bytes too early: "
                        "the disk has lost what was written."
                    )
                begin, offset = begin + count, offset + count
        return rising_nw[index_n]
