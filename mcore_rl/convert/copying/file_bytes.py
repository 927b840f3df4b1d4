"""The bytes of a folder's files: read to where they are wanted, or, for what is to be changed on the way, mapped."""

import mmap
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from mcore_rl.checkpoint.archives import FilePart
from mcore_rl.errors import CheckpointError


class FileBytes:
    """Files of a folder, opened and mapped when first asked for."""

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
        while out:
            count = os.preadv(self._descriptor(name), [out], start)
            if not count:
                raise CheckpointError(f"{self._folder / name} has become shorter. Take another copy.")
            out, start = out[count:], start + count

    def part(self, name: str, start: int, length: int) -> FilePart:
        """Bytes of a file that are not read yet."""
        return FilePart(self._descriptor(name), start, length)

    def _descriptor(self, name: str) -> int:
        found = self._descriptors.get(name)
        if found is None:
            found = self._descriptors[name] = os.open(self._folder / name, os.O_RDONLY)
        return found

    def prefetch(self, name: str, start: int, count: int) -> None:
        """Have these bytes read while something else is done."""
        if count:
            os.posix_fadvise(self._descriptor(name), start, count, os.POSIX_FADV_WILLNEED)

    @contextmanager
    def bytes_of(self, name: str, start: int, count: int) -> Iterator[Tensor]:
        """uint8 `[count]`, a view of the file; its pages are given back on leaving."""
        mapped = self[name]
        if not count:
            yield torch.empty(0, dtype=torch.uint8)
            return
        page = start // mmap.PAGESIZE * mmap.PAGESIZE
        self.prefetch(name, start, count)
        yield _view(mapped, start, count)
        mapped.madvise(mmap.MADV_DONTNEED, page, start + count - page)


def _view(mapped: mmap.mmap, start: int, count: int) -> Tensor:
    with warnings.catch_warnings():
        # The file is opened for reading only, and nothing writes to the view.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(mapped, dtype=torch.uint8, offset=start, count=count)
