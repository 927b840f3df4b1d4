"""Files of what has changed in weights since the last push (`rl.engine.delta`), for servers that keep its bytes.

A file names the version of the bytes that it makes, and the version that it is a difference to; one without it has the
bytes themselves. A server applies a difference to that version alone, once, and keeps the result only if it has the
trainer's CRC-32 (`vllm_worker.Bases`); what a server refuses goes whole.
"""

import json
import struct
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from mcore_rl.storage.checksums import as_hex, compress, crc32

MOST = 0.5
"""Largest size of a difference, as a fraction of the bytes; a larger one goes whole."""
THREADS = 4
"""Threads of a rank that compress tensors."""


class Differences:
    """This rank's bytes of the last push in main memory, by bucket, and differences to them."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[str, dict[str, Tensor]]] = {}
        self._first = self._version = ""

    def begin(self, push: str) -> None:
        """Begin a push with a name of its own, which all ranks give."""
        self._first = self._first or push
        # Servers drop bytes whose versions begin with another word: nothing will be a difference to them.
        self._version = f"{self._first} {push}"

    def file_of(
        self, bucket: str, tensors: dict[str, Tensor], *, is_refused: bool
    ) -> tuple[dict[str, str], bytes | dict[str, Tensor]]:
        """Keep the tensors of a bucket, and empty `tensors`; if servers have refused the difference, they are kept
        already. Returns the versions of the bucket's file, and what is to be in it: a difference, or the tensors.
        """
        base, old = "", dict[str, Tensor]()
        if not is_refused:
            base, old = self._kept.pop(bucket, (base, old))
            self._kept[bucket] = self._version, {name: tensors.pop(name).cpu().contiguous() for name in list(tensors)}
        version, new = self._kept[bucket]
        if base and len(data := encoded(old, new)) <= MOST * sum(tensor.nbytes for tensor in new.values()):
            return {"version": version, "base": base}, data
        return {"version": version, "base": ""}, dict(new)


def encoded(old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> bytes:
    """Return a file of the difference of tensors of the same names, types and shapes: the length of its header in eight
    bytes, the header in JSON, and for each tensor the exclusive or of its bytes, all first bytes of the elements first,
    then all second ones, compressed as zlib does.
    """

    def piece(name: str) -> tuple[dict[str, Any], bytes]:
        tensor, bytes_N = new[name], _bytes(new[name])
        # numpy's transposition of bytes is ten times as fast as torch's.
        planes_PN = (bytes_N ^ _bytes(old[name])).numpy().reshape(-1, tensor.element_size()).T
        data = compress(planes_PN.tobytes(), 1)
        entry = {"name": name, "dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
        return {**entry, "crc32": as_hex(crc32(bytes_N.numpy().data)), "size": len(data)}, data

    with ThreadPoolExecutor(THREADS) as pool:
        pieces = list(pool.map(piece, new))
    header = json.dumps([entry for entry, _ in pieces]).encode()
    return b"".join((struct.pack("<Q", len(header)), header, *(data for _, data in pieces)))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
