"""Memory for cached routes: on the device, or in page-locked main memory."""

from typing import Literal

import torch
from torch import Tensor

from mcore_rl.backend.transfer import to_device

Store = Literal["device", "pinned"]


class RouteStorage:
    """Blocks of encoded tokens, uint8 `[n, w]`, in one kind of memory."""

    def __init__(self, store: Store, device: torch.device) -> None:
        """Create an empty storage; `device` is the device that "device" means.

        Page-locked memory is a GPU's: on a CPU both stores are main memory.
        """
        self._store, self._device = store, device
        self._blocks: dict[int, Tensor] = {}
        self._next_block = 0
        self._copies: dict[int, torch.cuda.Event] = {}
        """Copies from the device into blocks in main memory, of which none has been read yet."""

    @property
    def num_bytes(self) -> int:
        """Number of bytes of all blocks."""
        return sum(block_nw.nbytes for block_nw in self._blocks.values())

    def add(self, bytes_nw: Tensor) -> int:
        """Copy encoded tokens into a new block and return its index."""
        index, self._next_block = self._next_block, self._next_block + 1
        if self._store == "device":
            self._blocks[index] = bytes_nw.to(self._device, copy=True)
        else:
            pinned_nw = torch.empty(bytes_nw.shape, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
            self._blocks[index] = pinned_nw.copy_(bytes_nw, non_blocking=True)
            if bytes_nw.is_cuda:
                self._copies[index] = torch.cuda.current_stream().record_event()
        return index

    def drop(self, block: int) -> None:
        """Forget a block."""
        # torch does not use page-locked memory again before a copy into it is over.
        del self._blocks[block]
        self._copies.pop(block, None)

    def read(self, block: int, rows_n: Tensor, device: torch.device) -> Tensor:
        """Return some rows of a block, uint8 `[n, w]` on `device`; `rows_n` is on the CPU."""
        block_nw = self._blocks[block]
        copy = self._copies.pop(block, None)
        # The host reads the block itself. The copy is long over, unless the pass that made it goes on.
        if copy is not None and not copy.query():
            copy.synchronize()
        return to_device(block_nw[to_device(rows_n, block_nw.device)], device)
