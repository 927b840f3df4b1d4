"""Memory for cached routes: on the device, in page-locked main memory, or in memory-mapped files."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy
import torch
from torch import Tensor

Store = Literal["device", "pinned", "file"]
FASTEST_FIRST: tuple[Store, ...] = ("device", "pinned", "file")


@dataclass(slots=True)
class StoredBlock:
    """Encoded tokens that were stored together."""

    store: Store
    bytes_nw: Tensor
    path: Path | None = None
    """File that the bytes are mapped from; None: they are in memory."""


class RouteStorage:
    """Blocks of encoded tokens; blocks beyond the budget of a store go to the next slower one."""

    def __init__(
        self, store: Store, budget_bytes: int | None, folder: Path | None, device: torch.device
    ) -> None:
        """Create an empty storage.

        Args:
            store: the fastest store to use.
            budget_bytes: most bytes in each store except files; None: no limit.
            folder: a folder of this rank alone, for files; it is made when it is needed.
            device: the device that "device" means.
        """
        self._stores = FASTEST_FIRST[FASTEST_FIRST.index(store) :]
        self._budget, self._folder, self._device = budget_bytes, folder, device
        self._blocks: dict[int, StoredBlock] = {}
        self._next_block = 0

    def bytes_in(self, store: Store) -> int:
        """Return the number of bytes of all blocks in `store`."""
        return sum(block.bytes_nw.numel() for block in self._blocks.values() if block.store == store)

    @property
    def num_bytes(self) -> int:
        """Number of bytes of all blocks in all stores."""
        return sum(block.bytes_nw.numel() for block in self._blocks.values())

    def add(self, bytes_nw: Tensor) -> int:
        """Copy encoded tokens into a new block and return its index."""
        index, self._next_block = self._next_block, self._next_block + 1
        self._blocks[index] = self._stored(index, bytes_nw)
        return index

    def drop(self, block: int) -> None:
        """Forget a block and delete its file."""
        dropped = self._blocks.pop(block)
        if dropped.path is not None:
            dropped.path.unlink()

    def read(self, block: int, rows_n: Tensor, device: torch.device) -> Tensor:
        """Return some rows of a block, uint8 `[n, w]` on `device`; `rows_n` is on the CPU."""
        stored = self._blocks[block]
        found_nw = stored.bytes_nw[rows_n.to(stored.bytes_nw.device, non_blocking=True)]
        if stored.store == "pinned" and device.type == "cuda":
            # Indexing has made a pageable copy, from which a copy to the device would wait.
            found_nw = found_nw.pin_memory()
        return found_nw.to(device, non_blocking=True)

    def store_of(self, block: int) -> Store:
        """Return the store that a block is in."""
        return self._blocks[block].store

    def _stored(self, index: int, bytes_nw: Tensor) -> StoredBlock:
        fits = [
            store
            for store in self._stores[:-1]
            if self._budget is None or self.bytes_in(store) + bytes_nw.numel() <= self._budget
        ]
        store = fits[0] if fits else self._stores[-1]
        if store == "device":
            return StoredBlock(store, bytes_nw.to(self._device, copy=True))
        if store == "pinned":
            pinned = torch.empty(bytes_nw.shape, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
            return StoredBlock(store, pinned.copy_(bytes_nw, non_blocking=True))
        assert self._folder is not None, "routes go to files, but no folder was given"
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"routes-{index}.bin"
        if not bytes_nw.numel():
            return StoredBlock(store, bytes_nw.cpu())  # an empty file cannot be mapped
        bytes_nw.cpu().numpy().tofile(path)
        # Copy on write: torch warns about memory that it may not write to, although nothing writes here.
        mapped = numpy.memmap(path, dtype=numpy.uint8, mode="c", shape=tuple(bytes_nw.shape))
        return StoredBlock(store, torch.from_numpy(mapped), path)
