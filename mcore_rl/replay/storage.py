"""Memory for cached routes: on the device, or in page-locked main memory."""

from typing import Literal

import torch
from torch import Tensor

from mcore_rl.megatron.transfer import to_device

Store = Literal["device", "pinned"]


class RouteStorage:
    """Blocks of routes `[n, ...]` of any dtype, a row per token, in one kind of memory."""

    def __init__(self, store: Store, device: torch.device) -> None:
        """Create an empty storage; with `store="device"` blocks are on `device`.

        Page-locked memory needs a GPU: on a CPU both stores are ordinary main memory.
        """
        self._store, self._device = store, device
        self._blocks: dict[int, Tensor] = {}
        self._next_block = 0
        self._copies: dict[int, torch.cuda.Event] = {}
        """Copies from the device into blocks in main memory that have not been read yet."""

    @property
    def num_bytes(self) -> int:
        """Size of all blocks in bytes."""
        return sum(block.nbytes for block in self._blocks.values())

    def add(self, routes: Tensor) -> int:
        """Copy routes into a new block and return its index."""
        index, self._next_block = self._next_block, self._next_block + 1
        if self._store == "device":
            self._blocks[index] = routes.to(self._device, copy=True)
        else:
            pinned = torch.empty(routes.shape, dtype=routes.dtype, pin_memory=self._device.type == "cuda")
            self._blocks[index] = pinned.copy_(routes, non_blocking=True)
            if routes.is_cuda:
                self._copies[index] = torch.cuda.current_stream().record_event()
        return index

    def drop(self, block: int) -> None:
        """Remove a block."""
        # torch does not reuse page-locked memory before a copy into it has finished.
        del self._blocks[block]
        self._copies.pop(block, None)

    def read(self, block: int, rows_n: Tensor, device: torch.device) -> Tensor:
        """Return some rows of a block, `[n, ...]` on `device`; `rows_n` is on the CPU."""
        rows = self._blocks[block]
        copy = self._copies.pop(block, None)
        # The host reads the block, so the copy must be complete. It usually is, unless its pass is still running.
        if copy is not None and not copy.query():
            copy.synchronize()
        return to_device(rows[to_device(rows_n, rows.device)], device)
