"""How a chunk gets into a file: torch's format one after another, or safetensors in places known beforehand."""

import io
import json
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from mcore_rl.convert.copying.content import Content
from mcore_rl.convert.copying.plan import Target, Task
from mcore_rl.convert.hf.folder import NAMES
from mcore_rl.convert.megatron.archive_writer import save


@dataclass(frozen=True, slots=True)
class Placed:
    """Where in its file something was written."""

    offset: int
    length: int


class Writer(Protocol):
    """Writes the files of a conversion; used by many processes at once."""

    def prepare(self, folder: Path) -> None:
        """Once, before any task."""

    def write(self, folder: Path, task: Task, contents: Iterator[Content]) -> list[Placed]:
        """Write a task's chunks, one after another; they need not be on the disk yet."""


class DistWriter:
    """A file a task, each chunk as `torch.save` writes it: what torch's FileSystemReader reads."""

    def prepare(self, folder: Path) -> None:
        """Nothing."""

    def write(self, folder: Path, task: Task, contents: Iterator[Content]) -> list[Placed]:
        """See Writer."""
        placed = []
        with io.FileIO(folder / task.file, "wb") as file:
            for content in contents:
                start = file.tell()
                save(file, content)
                placed.append(Placed(start, file.tell() - start))
        return placed


class SafetensorsWriter:
    """Shards whose headers and sizes are known: any worker writes any chunk, in any order, twice if need be."""

    def __init__(self, shards: Mapping[str, Sequence[Target]]) -> None:
        self._starts: dict[str, int] = {}
        self._headers: dict[str, bytes] = {}
        self._sizes: dict[str, int] = {}
        for file, targets in shards.items():
            self._lay_out(file, targets)

    def prepare(self, folder: Path) -> None:
        """Make the files in full length, unless an earlier run did. The file system says no here if it is full."""
        for file, header in self._headers.items():
            path = folder / file
            if path.exists() and path.stat().st_size == self._sizes[file]:
                continue
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            try:
                os.posix_fallocate(descriptor, 0, self._sizes[file])
                os.pwrite(descriptor, header, 0)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def write(self, folder: Path, task: Task, contents: Iterator[Content]) -> list[Placed]:
        """See Writer."""
        placed = []
        descriptor = os.open(folder / task.file, os.O_WRONLY)
        try:
            for content in contents:
                offset = self._starts[content.chunk.target.name] + content.chunk.start
                placed.append(Placed(offset, content.chunk.num_bytes))
                for block in content.blocks():
                    _write_at(descriptor, block, offset)
                    offset += len(block)
        finally:
            os.close(descriptor)
        return placed

    def _lay_out(self, file: str, targets: Sequence[Target]) -> None:
        entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
        position = 0
        for target in targets:
            end = position + target.num_bytes
            entries[target.name] = {
                "dtype": NAMES[target.dtype],
                "shape": list(target.shape),
                "data_offsets": [position, end],
            }
            position = end
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        header = struct.pack("<Q", len(text)) + text
        position = len(header)
        for target in targets:
            self._starts[target.name] = position
            position += target.num_bytes
        self._headers[file], self._sizes[file] = header, position


def shards_of(targets: Sequence[Target], most_bytes: int) -> dict[str, list[Target]]:
    """The targets by file, in their order, as many a file as fit in `most_bytes`; named as transformers does."""
    groups: list[list[Target]] = [[]]
    size = 0
    for target in targets:
        if groups[-1] and size + target.num_bytes > most_bytes:
            groups.append([])
            size = 0
        groups[-1].append(target)
        size += target.num_bytes
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    total = len(groups)
    return {f"model-{i:05d}-of-{total:05d}.safetensors": group for i, group in enumerate(groups, 1)}


def _write_at(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written
