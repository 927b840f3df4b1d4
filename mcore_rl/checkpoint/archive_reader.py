"""Tensors in the files that `torch.save` writes, found without reading them and without torch's unpickler."""

import io
import math
from dataclasses import dataclass
from typing import Any

import torch

from mcore_rl.checkpoint.archives import Sliced, content, find, records
from mcore_rl.checkpoint.pickles import MALFORMED, PLAIN, Unpickler
from mcore_rl.errors import CheckpointError

STORAGES = {
    "FloatStorage": torch.float32,
    "DoubleStorage": torch.float64,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}


@dataclass(frozen=True, slots=True)
class Saved:
    """Where a saved tensor's elements are: a strided view of a run of bytes."""

    start: int
    """Byte of the file at which the storage begins."""
    num_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    storage_offset: int


def find_tensor(data: Sliced, start: int, what: str) -> Saved:
    """The tensor saved in these bytes, which begin at `start` of a file; CheckpointError naming `what` if none is."""
    try:
        return _find(data, start)
    except MALFORMED as error:
        raise CheckpointError(f"{what} is not a saved tensor ({type(error).__name__}: {error}).") from error


def _find(data: Sliced, start: int) -> Saved:
    found = records(data)
    if any(record.name.endswith("/byteorder") for record in found) and (
        content(data, found, "byteorder") != b"little"
    ):
        raise ValueError("its bytes are in big-endian order")
    allowed = PLAIN | {
        ("torch._utils", "_rebuild_tensor_v2"): _Rebuilt,
        ("torch._utils", "_rebuild_parameter"): lambda data, *_: data,
        **{("torch", name): dtype for name, dtype in STORAGES.items()},
        ("torch.storage", "UntypedStorage"): None,
    }
    saved = Unpickler(io.BytesIO(content(data, found, "data.pkl")), allowed).load()
    if not isinstance(saved, _Rebuilt):
        raise ValueError(f"it holds a {type(saved).__name__}")
    _, dtype, key, _, numel = saved.storage
    if not isinstance(dtype, torch.dtype):
        raise ValueError("it has a storage without a type")
    record = find(found, f"data/{key}")
    if not record.is_plain:
        raise ValueError("it is compressed")
    last = saved.storage_offset + sum((n - 1) * s for n, s in zip(saved.shape, saved.stride, strict=True))
    size = numel * dtype.itemsize
    if record.size < size or (math.prod(saved.shape) and not 0 <= last < numel):
        raise ValueError("its storage is shorter than its shape")
    return Saved(
        start=start + record.start,
        num_bytes=size,
        dtype=dtype,
        shape=saved.shape,
        stride=saved.stride,
        storage_offset=saved.storage_offset,
    )


class _Rebuilt:
    """The arguments with which torch would rebuild a tensor."""

    def __init__(
        self, storage: Any, offset: int, shape: tuple[int, ...], stride: tuple[int, ...], *_: Any
    ) -> None:
        self.storage, self.storage_offset = storage, int(offset)
        self.shape, self.stride = tuple(map(int, shape)), tuple(map(int, stride))
