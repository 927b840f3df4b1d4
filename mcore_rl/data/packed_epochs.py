"""The packed sequences of an epoch of conversations: lengths in, indices out."""

from collections.abc import Iterator, Sequence

import numpy

from mcore_rl.data.mixture import ShuffledSources
from mcore_rl.data.packing import pack


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
