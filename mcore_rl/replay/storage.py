"""Where cached routes lie: blocks of tokens on the device, in page-locked memory, or in memory-mapped files."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy
import torch
from torch import Tensor

Store = Literal["device", "pinned", "file"]
SLOWER: tuple[Store, ...] = ("device", "pinned", "file")
BYTE_CODES = 256


@dataclass(frozen=True, slots=True)
class Codec:
    """Routes `[n, l, K]` of codes below `num_codes` as rows of bytes `[n, w]`."""

    num_codes: int
    num_layers: int
    top_k: int
    bit_pack: bool

    @property
    def dtype(self) -> torch.dtype:
        """Of the codes outside: one byte up to 256, two above."""
        return torch.uint8 if self.num_codes <= BYTE_CODES else torch.int16

    @property
    def bits(self) -> int:
        """That a code needs."""
        return max(1, (self.num_codes - 1).bit_length())

    @property
    def packs(self) -> bool:
        """Whether bits are saved."""
        return self.bit_pack and self.bits < 8 * self.dtype.itemsize

    @property
    def row_bytes(self) -> int:
        """Of one token."""
        values = self.num_layers * self.top_k
        return -(-values * self.bits // 8) if self.packs else values * self.dtype.itemsize

    def encode(self, codes_nlK: Tensor) -> Tensor:
        """uint8 `[n, row_bytes]`."""
        flat_nm = codes_nlK.reshape(len(codes_nlK), self.num_layers * self.top_k)
        if not self.packs:
            return flat_nm.contiguous().view(torch.uint8).view(len(flat_nm), self.row_bytes)
        place = torch.arange(self.bits, dtype=flat_nm.dtype, device=flat_nm.device)
        bits_nm = ((flat_nm[..., None] >> place) & 1).to(torch.uint8).flatten(1)
        spare = 8 * self.row_bytes - bits_nm.shape[1]
        bits_nw8 = torch.nn.functional.pad(bits_nm, (0, spare)).view(len(flat_nm), self.row_bytes, 8)
        return (bits_nw8 << torch.arange(8, dtype=torch.uint8, device=flat_nm.device)).sum(
            -1, dtype=torch.uint8
        )

    def decode(self, rows_nw: Tensor) -> Tensor:
        """`[n, l, K]` of `dtype`."""
        shape = (len(rows_nw), self.num_layers, self.top_k)
        if not self.packs:
            return rows_nw.contiguous().view(-1).view(self.dtype).view(shape)
        place = torch.arange(8, dtype=torch.uint8, device=rows_nw.device)
        bits_nm = ((rows_nw[..., None] >> place) & 1).flatten(1)[
            :, : self.num_layers * self.top_k * self.bits
        ]
        values_nm = bits_nm.to(self.dtype).view(len(rows_nw), self.num_layers * self.top_k, self.bits)
        weights = 1 << torch.arange(self.bits, dtype=self.dtype, device=rows_nw.device)
        return (values_nm * weights).sum(-1, dtype=self.dtype).view(shape)


@dataclass(slots=True)
class Block:
    """Rows of tokens in one place."""

    store: Store
    rows_nw: Tensor
    path: Path | None = None

    @property
    def num_bytes(self) -> int:
        """That it takes there."""
        return self.rows_nw.numel()


class Blocks:
    """Blocks by number; the next slower store takes what is beyond the budget of one."""

    def __init__(
        self, store: Store, budget_bytes: int | None, folder: Path | None, device: torch.device
    ) -> None:
        """`budget_bytes` is of each store but files; None: no limit. `folder` is this rank's own, for files."""
        self._stores = SLOWER[SLOWER.index(store) :]
        self._budget, self._folder, self._device = budget_bytes, folder, device
        self._blocks: dict[int, Block] = {}
        self._next = 0

    def bytes_in(self, store: Store) -> int:
        """That blocks take there."""
        return sum(block.num_bytes for block in self._blocks.values() if block.store == store)

    @property
    def num_bytes(self) -> int:
        """That blocks take everywhere."""
        return sum(block.num_bytes for block in self._blocks.values())

    def add(self, rows_nw: Tensor) -> int:
        """Keep rows; the block's number."""
        number, self._next = self._next, self._next + 1
        self._blocks[number] = self._placed(number, rows_nw)
        return number

    def drop(self, number: int) -> None:
        """Forget a block, and delete its file."""
        block = self._blocks.pop(number)
        if block.path is not None:
            block.path.unlink()

    def rows(self, number: int, index_n: Tensor, device: torch.device) -> Tensor:
        """Some rows of a block, on `device`; `index_n` is on the CPU."""
        block = self._blocks[number]
        found = block.rows_nw[index_n.to(block.rows_nw.device, non_blocking=True)]
        if block.store == "pinned" and device.type == "cuda":
            found = found.pin_memory()
        return found.to(device, non_blocking=True)

    def store_of(self, number: int) -> Store:
        """Where a block lies."""
        return self._blocks[number].store

    def _placed(self, number: int, rows_nw: Tensor) -> Block:
        fits = [
            store
            for store in self._stores[:-1]
            if self._budget is None or self.bytes_in(store) + rows_nw.numel() <= self._budget
        ]
        store = fits[0] if fits else self._stores[-1]
        if store == "device":
            return Block(store, rows_nw.to(self._device, copy=True))
        if store == "pinned":
            pinned = torch.empty(rows_nw.shape, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
            return Block(store, pinned.copy_(rows_nw, non_blocking=True))
        assert self._folder is not None, "routes go to files, but no folder was given"
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"routes-{number}.bin"
        if not rows_nw.numel():
            return Block(store, rows_nw.cpu())
        rows_nw.cpu().numpy().tofile(path)
        # Copy on write, so that torch has memory that it may write to; nothing does.
        mapped = numpy.memmap(path, dtype=numpy.uint8, mode="c", shape=tuple(rows_nw.shape))
        return Block(store, torch.from_numpy(mapped), path)
