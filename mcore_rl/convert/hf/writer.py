"""Safetensors files of an export; headers and sizes are known before a byte of a tensor is read."""

import json
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from mcore_rl.convert.copying.content import ChunkBytes
from mcore_rl.convert.copying.conversion import WrittenRange
from mcore_rl.convert.copying.plan import CopyTask, TargetTensor
from mcore_rl.convert.hf.folder import DTYPE_NAMES


class SafetensorsWriter:
    """Writes shards: any worker writes any chunk, in any order, twice if need be, as each has its bytes in a file."""

    def __init__(self, shards: Mapping[str, Sequence[TargetTensor]]) -> None:
        self._starts: dict[str, int] = {}
        self._headers: dict[str, bytes] = {}
        self._sizes: dict[str, int] = {}
        for file, targets in shards.items():
            self._lay_out(file, targets)

    def prepare(self, folder: Path) -> None:
        """Make the files in full length, unless an earlier run did: a full disk refuses at once, not hours later."""
        for file, header in self._headers.items():
            path = folder / file
            if path.exists() and path.stat().st_size == self._sizes[file]:
                continue
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            try:
                os.posix_fallocate(descriptor, 0, self._sizes[file])
                os.pwrite(descriptor, header, 0)
                # A resumed run trusts a file of full length to have its header.
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def write(self, folder: Path, task: CopyTask, contents: Iterator[ChunkBytes]) -> list[WrittenRange]:
        """Write a task's chunks to where they belong in its file."""
        ranges = []
        descriptor = os.open(folder / task.file, os.O_WRONLY)
        try:
            for content in contents:
                offset = self._starts[content.chunk.target.name] + content.chunk.start
                ranges.append(WrittenRange(offset, content.chunk.num_bytes))
                for block in content.blocks():
                    _write_at(descriptor, block, offset)
                    offset += len(block)
        finally:
            os.close(descriptor)
        return ranges

    def _lay_out(self, file: str, targets: Sequence[TargetTensor]) -> None:
        """Compute the header of a file, its size, and the byte at which each tensor begins."""
        entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
        position = 0
        for target in targets:
            end = position + target.num_bytes
            entries[target.name] = {
                "dtype": DTYPE_NAMES[target.dtype],
                "shape": list(target.shape),
                "data_offsets": [position, end],
            }
            position = end
        text = json.dumps(entries, separators=(",", ":")).encode()
        # Spaces until the data begins at a multiple of 8 bytes, as the format's own library has it.
        text += b" " * (-len(text) % 8)
        # "<Q": the length of the header as a little-endian number of 8 bytes.
        header = struct.pack("<Q", len(text)) + text
        position = len(header)
        for target in targets:
            self._starts[target.name] = position
            position += target.num_bytes
        self._headers[file], self._sizes[file] = header, position


def shards_of(targets: Sequence[TargetTensor], max_bytes: int) -> dict[str, list[TargetTensor]]:
    """Return the targets by file, in their order, as many a file as fit in `max_bytes`; named as transformers does."""
    groups: list[list[TargetTensor]] = [[]]
    size = 0
    for target in targets:
        if groups[-1] and size + target.num_bytes > max_bytes:
            groups.append([])
            size = 0
        groups[-1].append(target)
        size += target.num_bytes
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    total = len(groups)
    return {f"model-{i:05d}-of-{total:05d}.safetensors": group for i, group in enumerate(groups, 1)}


def _write_at(descriptor: int, data: memoryview, offset: int) -> None:
    """Write all of `data`: one call of the system may write less."""
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written
