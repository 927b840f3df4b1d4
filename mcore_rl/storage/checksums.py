"""CRC-32 of files and tensors that are read in parts: that of a whole follows from its parts'."""

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

try:
    # Several times as fast as zlib's; the numbers, and the format of compressed bytes, are the same.
    from isal.isal_zlib import compress, crc32
except ImportError:
    from zlib import compress, crc32

__all__ = ["PartChecksum", "as_hex", "compress", "crc32", "crc32_of", "joined"]

BLOCK_BYTES = 256 << 10
"""Bytes of a file that are read at a time: they stay in the processor's cache."""

POLYNOMIAL = 0xEDB88320
"""The polynomial of zlib's CRC-32, its bits in reverse."""
BitMatrix = tuple[int, ...]
"""A linear map of 32 bits: the image of each bit."""


class PartChecksum(NamedTuple):
    """The CRC-32 of the bytes start <= i < start + size of a tensor or file."""

    start: int
    size: int
    crc: int


def as_hex(crc: int) -> str:
    """Return a CRC-32 as it is recorded: eight hexadecimal digits."""
    return f"{crc:08x}"


def crc32_of(file: Path) -> str:
    """Return the CRC-32 of a file in hexadecimal; it is read in blocks."""
    crc = 0
    try:
        with file.open("rb", buffering=0) as opened:
            while block := opened.read(BLOCK_BYTES):
                crc = crc32(block, crc)
    except OSError as error:
        # A failing disk does not say which file it failed to read.
        raise OSError(error.errno, error.strerror, str(file)) from error
    return as_hex(crc)


def joined(parts: Iterable[PartChecksum], size: int) -> int | None:
    """Return the CRC-32 of `size` bytes from parts in any order; None unless they make up the whole."""
    position = crc = 0
    for part in sorted(parts):
        if part.start != position:
            return None
        # A CRC-32 is linear: that of two byte strings is the first's, with zeros appended, plus (xor) the second's.
        for power in range(part.size.bit_length()):
            if part.size >> power & 1:
                crc = _apply(_zero_bytes(power), crc)
        crc ^= part.crc
        position += part.size
    return crc if position == size else None


@cache
def _zero_bytes(power: int) -> BitMatrix:
    """Return the change of a CRC's state by 2**power zero bytes."""
    if power == 0:
        # A zero bit shifts the state by one; the bit that falls out brings the polynomial in. Doubled three times it
        # is a byte.
        one_bit: BitMatrix = (POLYNOMIAL, *(1 << i for i in range(31)))
        for _ in range(3):
            one_bit = _twice(one_bit)
        return one_bit
    return _twice(_zero_bytes(power - 1))


def _twice(matrix: BitMatrix) -> BitMatrix:
    return tuple(_apply(matrix, image) for image in matrix)


def _apply(matrix: BitMatrix, bits: int) -> int:
    result = 0
    for image in matrix:
        if bits & 1:
            result ^= image
        bits >>= 1
        if not bits:
            break
    return result
