"""Tensors in the files that `torch.save` writes, found without reading them and without torch's unpickler."""

import io
import math
import zipfile
from dataclasses import dataclass
from typing import Any

import torch

from mcore_rl.convert.pickles import MALFORMED, PLAIN, Unpickler, load_common
from mcore_rl.errors import CheckpointError

LOCAL_HEADER_BYTES = 30
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
    """Byte of the archive at which the storage begins."""
    num_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    storage_offset: int


class Window(io.RawIOBase):
    """Bytes start <= i < start + length of a buffer, as a file."""

    def __init__(self, buffer: Any, start: int, length: int) -> None:
        self._buffer, self._start, self._length, self._position = buffer, start, length, 0

    def readable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """Yes."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """As of any file."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        self._position = max(0, base + offset)
        return self._position

    def tell(self) -> int:
        """As of any file."""
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        """As of any file."""
        left = max(0, self._length - self._position)
        count = left if size is None or size < 0 else min(size, left)
        begin = self._start + self._position
        self._position += count
        return bytes(self._buffer[begin : begin + count])


def find_tensor(buffer: Any, start: int, length: int, what: str) -> Saved:
    """The tensor saved in these bytes of `buffer`; CheckpointError naming `what` when there is none."""
    try:
        with zipfile.ZipFile(Window(buffer, start, length)) as archive:
            return _find(archive, buffer, start)
    except (zipfile.BadZipFile, NotImplementedError, *MALFORMED) as error:
        raise CheckpointError(f"{what} is not a saved tensor ({type(error).__name__}: {error}).") from error


def common_of(data: bytes, what: str) -> dict[str, Any]:
    """The plain values of a `common.pt`."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return load_common(archive.read(_member(archive, "data.pkl")))
    except (zipfile.BadZipFile, *MALFORMED) as error:
        raise CheckpointError(f"{what} cannot be read ({type(error).__name__}: {error}).") from error


def _find(archive: zipfile.ZipFile, buffer: Any, start: int) -> Saved:
    order = [name for name in archive.namelist() if name.endswith("/byteorder")]
    if order and archive.read(order[0]) != b"little":
        raise ValueError("its bytes are in big-endian order")
    allowed = PLAIN | {
        ("torch._utils", "_rebuild_tensor_v2"): _Rebuilt,
        ("torch._utils", "_rebuild_parameter"): lambda data, *_: data,
        **{("torch", name): dtype for name, dtype in STORAGES.items()},
        ("torch.storage", "UntypedStorage"): None,
    }
    saved = Unpickler(io.BytesIO(archive.read(_member(archive, "data.pkl"))), allowed).load()
    if not isinstance(saved, _Rebuilt):
        raise ValueError(f"it holds a {type(saved).__name__}")
    _, dtype, key, _, numel = saved.storage
    if not isinstance(dtype, torch.dtype):
        raise ValueError("it has a storage without a type")
    member = archive.getinfo(_member(archive, f"data/{key}"))
    if member.compress_type != zipfile.ZIP_STORED:
        raise ValueError("it is compressed")
    last = saved.storage_offset + sum((n - 1) * s for n, s in zip(saved.shape, saved.stride, strict=True))
    size = numel * dtype.itemsize
    if member.file_size < size or (math.prod(saved.shape) and not 0 <= last < numel):
        raise ValueError("its storage is shorter than its shape")
    header = start + member.header_offset
    name_length, extra_length = (
        int.from_bytes(buffer[header + at : header + at + 2], "little") for at in (26, 28)
    )
    return Saved(
        start=header + LOCAL_HEADER_BYTES + name_length + extra_length,
        num_bytes=size,
        dtype=dtype,
        shape=saved.shape,
        stride=saved.stride,
        storage_offset=saved.storage_offset,
    )


def _member(archive: zipfile.ZipFile, name: str) -> str:
    return next(member for member in archive.namelist() if member.endswith(f"/{name}"))


class _Rebuilt:
    """The arguments with which torch would rebuild a tensor."""

    def __init__(
        self, storage: Any, offset: int, shape: tuple[int, ...], stride: tuple[int, ...], *_: Any
    ) -> None:
        self.storage, self.storage_offset = storage, int(offset)
        self.shape, self.stride = tuple(map(int, shape)), tuple(map(int, stride))
