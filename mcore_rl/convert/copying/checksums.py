"""CRC-32 of tensors whose parts are read apart: the checksum of a whole follows from those of its parts."""

from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

POLYNOMIAL = 0xEDB88320
"""The polynomial of zlib's CRC-32, its bits in reverse."""
BitMatrix = tuple[int, ...]
"""A linear map of 32 bits: the image of each bit."""


class PartChecksum(NamedTuple):
    """The CRC-32 of the bytes start <= i < start + size of a tensor."""

    start: int
    size: int
    crc: int


def joined(parts: Iterable[PartChecksum], size: int) -> int | None:
    """Return the CRC-32 of `size` bytes from parts in any order; None unless they make up the whole."""
    position = crc = 0
    for part in sorted(parts):
        if part.start != position:
            return None
        crc = _concatenated(crc, part.crc, part.size)
        position += part.size
    return crc if position == size else None


def _concatenated(first: int, second: int, second_size: int) -> int:
    """Return the CRC-32 of two byte strings after one another.

    A CRC is linear: appending bytes is appending as many zeros to the first string, then adding (xor) the second's CRC.
    """
    for power in range(second_size.bit_length()):
        if second_size >> power & 1:
            first = _apply(_zero_bytes(power), first)
    return first ^ second


@cache
def _zero_bytes(power: int) -> BitMatrix:
    """Return what 2**power zero bytes do to a CRC's state."""
    if power == 0:
        # A zero bit shifts the state by one; the bit that falls out brings the polynomial in. Doubled three times it
        # is a byte.
        one_bit: BitMatrix = (POLYNOMIAL, *(1 << i for i in range(31)))
        for _ in range(3):
            one_bit = _twice(one_bit)
        return one_bit
    return _twice(_zero_bytes(power - 1))


def _twice(matrix: BitMatrix) -> BitMatrix:
    """Return the matrix multiplied by itself."""
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
