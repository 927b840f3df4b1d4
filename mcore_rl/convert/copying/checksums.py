"""CRC-32 of tensors whose parts are read apart: the checksum of a whole follows from those of its parts."""

from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

POLYNOMIAL = 0xEDB88320
Matrix = tuple[int, ...]
"""A linear map of 32 bits: the image of each."""


class Part(NamedTuple):
    """Bytes start <= i < start + size of something, and their CRC-32."""

    start: int
    size: int
    crc: int


def as_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor, without a copy."""
    flat = tensor.reshape(-1) if tensor.is_contiguous() else tensor.contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def joined(parts: Iterable[Part], size: int) -> int | None:
    """The CRC-32 of `size` bytes from parts in any order; None unless they make up the whole."""
    position = crc = 0
    for part in sorted(parts):
        if part.start != position:
            return None
        crc = _then(crc, part.crc, part.size)
        position += part.size
    return crc if position == size else None


def _then(first: int, second: int, second_size: int) -> int:
    """The CRC-32 of two byte strings after one another."""
    for power in range(second_size.bit_length()):
        if second_size >> power & 1:
            first = _apply(_zero_bytes(power), first)
    return first ^ second


@cache
def _zero_bytes(power: int) -> Matrix:
    """What 2**power zero bytes do to a CRC's state."""
    if power == 0:
        one_bit: Matrix = (POLYNOMIAL, *(1 << i for i in range(31)))
        for _ in range(3):
            one_bit = _twice(one_bit)
        return one_bit
    return _twice(_zero_bytes(power - 1))


def _twice(matrix: Matrix) -> Matrix:
    return tuple(_apply(matrix, image) for image in matrix)


def _apply(matrix: Matrix, bits: int) -> int:
    result = 0
    for image in matrix:
        if bits & 1:
            result ^= image
        bits >>= 1
        if not bits:
            break
    return result
