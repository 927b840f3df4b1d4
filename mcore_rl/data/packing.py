"""The plan of which conversations share a packed sequence: lengths in, indices out."""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence

import numpy

from mcore_rl.data.mixture import ShuffledSources


def padded(length: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `length`."""
    return -(-length // multiple) * multiple


def pack(lengths: Sequence[int], row_length: int) -> list[list[int]]:
    """Return packed sequences of indices: each index once, and the lengths in one add up to at most `row_length`.

    Longest first, each into the fullest row that still holds it: first fit then leaves small gaps
    (asserted in tests/unit/data/test_packing.py).
    """
    rows: list[list[int]] = []
    gaps: list[tuple[int, int]] = []  # (free positions, row), sorted
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        length = lengths[index]
        assert length <= row_length, f"a length of {length} in rows of {row_length}"
        place = bisect_left(gaps, (length, -1))
        if place < len(gaps):
            free, row = gaps.pop(place)
        else:
            free, row = row_length, len(rows)
            rows.append([])
        rows[row].append(index)
        insort(gaps, (free - length, row))
    return rows


def plan_epoch(
    lengths: Sequence[int], row_length: int, *, buffer: int, seed: int, epoch: int
) -> list[list[int]]:
    """Return the packed sequences of one epoch: each conversation once, shuffled, packed within windows of `buffer`
    conversations, and the packed sequences shuffled again.

    The same arguments give the same plan.
    """
    generator = numpy.random.default_rng((seed, epoch))
    order = generator.permutation(len(lengths)).tolist()
    rows = [row for window in _packed_windows(order, lengths, row_length, buffer) for row in window]
    return [rows[place] for place in generator.permutation(len(rows)).tolist()]


def plan_mixed_epoch(
    lengths: Sequence[int],
    row_length: int,
    *,
    buffer: int,
    seed: int,
    epoch: int,
    sources: ShuffledSources,
) -> list[list[int]]:
    """Return the packed sequences of one epoch of a mixture, which is as many draws from `sources` as there are
    conversations: packed within windows of `buffer` draws, and shuffled within them, so that each window has the
    shares of the mixture.

    The same arguments give the same plan.
    """
    generator = numpy.random.default_rng((seed, epoch))
    order = list(sources.items(epoch * len(lengths), len(lengths)))
    return [
        window[place]
        for window in _packed_windows(order, lengths, row_length, buffer)
        for place in generator.permutation(len(window)).tolist()
    ]


def _packed_windows(
    order: Sequence[int], lengths: Sequence[int], row_length: int, buffer: int
) -> Iterator[list[list[int]]]:
    """Yield the packed sequences of each window of `buffer` conversations of `order`."""
    for begin in range(0, len(order), buffer):
        window = order[begin : begin + buffer]
        packed = pack([lengths[index] for index in window], row_length)
        yield [[window[place] for place in row] for row in packed]
