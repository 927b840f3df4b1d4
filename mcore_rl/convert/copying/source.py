"""Sources of tensors: their protocol, and the bytes of files that every format's source reads.

A process never holds more of a file than the region at hand.
"""

import mmap
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from mcore_rl.errors import CheckpointError
from mcore_rl.families.weight_map import Region
from mcore_rl.storage.foreign.archives import FilePart


class ByteRun(NamedTuple):
    """The bytes start <= i < start + size of a file, and their meaning."""

    file: str
    start: int
    size: int
    dtype: torch.dtype
    tensor_start: int | None
    """Byte of its tensor at which the run begins; None if the tensor itself is not contiguous in the file."""


class TensorSource(Protocol):
    """A checkpoint that has tensors by name; each worker opens its own."""

    def fill(self, out: Tensor, name: str, where: Region) -> None:
        """Copy a region to `out`, converting to its type; `out` has the region's sizes, but may lack axes of size 1."""

    def prefetch(self, name: str, where: Region) -> None:
        """Start reading a region from disk that will be needed soon."""

    def run(self, name: str, where: Region) -> ByteRun | None:
        """Return where a region is stored; None if its bytes are not contiguous."""

    def read(self, run: ByteRun, start: int, out: memoryview) -> None:
        """Fill `out` with the bytes of a run from its byte `start` on."""


class FileBytes:
    """Files of a folder, opened and mapped on first use."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, mmap.mmap] = {}
        self._descriptors: dict[str, int] = {}

    def __del__(self) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)

    def __getitem__(self, name: str) -> mmap.mmap:
        found = self._files.get(name)
        if found is None:
            found = self._files[name] = mmap.mmap(self._descriptor(name), 0, prot=mmap.PROT_READ)
        return found

    def read(self, name: str, start: int, out: memoryview) -> None:
        """Fill `out` with the bytes from `start` on."""
        # Read, not mapped: bytes that move unchanged then cost no page faults and are not counted as this process's.
        while out:
            count = os.preadv(self._descriptor(name), [out], start)
            if not count:
                raise CheckpointError(f"{self._folder / name} has become shorter. Take another copy.")
            out, start = out[count:], start + count

    def part(self, name: str, start: int, length: int) -> FilePart:
        """Return a range of a file without reading it yet."""
        return FilePart(self._descriptor(name), start, length)

    def prefetch(self, name: str, start: int, count: int) -> None:
        """Read these bytes in the background."""
        if count:
            os.posix_fadvise(self._descriptor(name), start, count, os.POSIX_FADV_WILLNEED)

    @contextmanager
    def bytes_of(self, name: str, start: int, count: int) -> Iterator[Tensor]:
        """Yield uint8 `[count]`, a view of the file; its pages are given back on leaving."""
        mapped = self[name]
        if not count:
            yield torch.empty(0, dtype=torch.uint8)
            return
        # madvise wants the start of a page; the pages at both ends are shared with neighbours, and are read again.
        page = start // mmap.PAGESIZE * mmap.PAGESIZE
        self.prefetch(name, start, count)
        yield _view(mapped, start, count)
        # Without this, pages that were read once stay in this process's memory and count against --max-ram.
        mapped.madvise(mmap.MADV_DONTNEED, page, start + count - page)

    def _descriptor(self, name: str) -> int:
        found = self._descriptors.get(name)
        if found is None:
            found = self._descriptors[name] = os.open(self._folder / name, os.O_RDONLY)
        return found


def as_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor; no copy is made if it is contiguous."""
    flat = tensor.reshape(-1) if tensor.is_contiguous() else tensor.contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def _view(mapped: mmap.mmap, start: int, count: int) -> Tensor:
    with warnings.catch_warnings():
        # The file is opened for reading only, and nothing writes to the view.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(mapped, dtype=torch.uint8, offset=start, count=count)
