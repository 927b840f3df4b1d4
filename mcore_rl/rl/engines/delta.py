"""Files of what has changed in weights since the last push (`rl.engine.delta`), for servers that keep its bytes.

A file names the version of the bytes that it makes, and the version that it is a difference to (none: it has the bytes
themselves). A server applies it to that version alone, once, and keeps the result only if it has the trainer's CRC-32
(`vllm_worker.Bases`); what a server refuses goes whole.
"""

import struct
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from mcore_rl.storage.checksums import compress, crc32

MOST, THREADS = 0.5, 4
"""Largest size of a difference, as a fraction of the bytes; and threads of a rank that compress tensors."""


class Differences:
    """This rank's bytes of the last push in main memory, by bucket, and differences to them."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[str, dict[str, Tensor]]] = {}
        self._first = ""

    def file_of(self, push: str, bucket: str, tensors: dict[str, Tensor]) -> tuple[dict[str, str], dict[str, Tensor]]:
        """Keep a bucket of a push, and empty `tensors`; if it is empty, servers have refused the difference to what is
        kept. Returns the versions of the bucket's file, and its tensors: differences or all bytes.
        """
        base, old = self._kept.pop(bucket, ("", {})) if tensors else ("", {})
        if tensors:
            # Servers drop bytes whose version has another first word, as nothing will be a difference to them.
            self._first = self._first or push
            kept = {name: tensors.pop(name).cpu().contiguous() for name in list(tensors)}
            self._kept[bucket] = f"{self._first} {push}", kept
        version, new = self._kept[bucket]
        found = difference(old, new) if base else dict(new)
        if base and num_bytes(found) > MOST * num_bytes(new):
            base, found = "", dict(new)
        return {"version": version, "base": base}, found


def difference(old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return, for tensors of the same names, types and shapes, bytes: the CRC-32 of the new tensor, and, compressed as
    by zlib, the exclusive or of new and old bytes, all first bytes of the elements, then all second ones.
    """

    def one(name: str) -> Tensor:
        bytes_N = _bytes(new[name])
        # numpy's transposition of bytes is ten times as fast as torch's.
        planes_PN = (bytes_N ^ _bytes(old[name])).numpy().reshape(-1, new[name].element_size()).T
        data = struct.pack("<I", crc32(bytes_N.numpy().data)) + compress(planes_PN.tobytes(), 1)
        return torch.frombuffer(bytearray(data), dtype=torch.uint8)

    with ThreadPoolExecutor(THREADS) as pool:
        return dict(zip(new, pool.map(one, new), strict=True))


def num_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Return the size of tensors."""
    return sum(tensor.nbytes for tensor in tensors.values())


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
