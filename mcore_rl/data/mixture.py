"""Mixtures of sources by weight: which source the n-th draw is from, as a function of n only."""

from array import array
from collections.abc import Iterator, Sequence
from fractions import Fraction
from math import gcd, lcm

import numpy

from mcore_rl.errors import DataError


class Mixture:
    """An endless order of draws from sources by weight.

    After every draw n each source has been drawn within 1 of n times its share of the weights. The next draw of a
    source may come as soon as it is due in part, and must come by when it is due in whole; of the draws that may
    come, the most urgent is drawn (earliest deadline first, which meets all deadlines: Baruah et al., "Proportionate
    progress", Algorithmica 15, 1996).
    """

    def __init__(self, weights: Sequence[float]) -> None:
        # Decimal values: the order of 0.7 and 0.3 repeats after 10 draws, the order of their binary values never.
        exact = [Fraction(str(weight)) for weight in weights]
        scale = lcm(*(weight.denominator for weight in exact))
        numbers = [int(weight * scale) for weight in exact]
        divisor = gcd(*numbers)
        self._per_period = tuple(number // divisor for number in numbers)
        self._period = sum(self._per_period)
        # The source of each planned draw, up to a period, and the number of draws before it from the same source.
        self._sources, self._before = array("q"), array("q")
        self._drawn = [0] * len(weights)

    def draw(self, n: int) -> tuple[int, int]:
        """Return the source of draw `n` and how many draws before it were from the same source, both from 0."""
        periods, place = divmod(n, self._period)
        while place >= len(self._sources):
            self._plan_next()
        source = self._sources[place]
        return source, periods * self._per_period[source] + self._before[place]

    def _plan_next(self) -> None:
        n, drawn = len(self._sources), self._drawn
        # The next draw of a source is due in whole at the end of draw (drawn + 1) / share, rounded up.
        deadlines = [
            (-(-(drawn[source] + 1) * self._period // share), source)
            for source, share in enumerate(self._per_period)
            if drawn[source] * self._period < (n + 1) * share  # it is due in part
        ]
        _, source = min(deadlines)
        self._sources.append(source)
        self._before.append(drawn[source])
        drawn[source] += 1


def refuse_empty_sources(
    field: str, weights: Sequence[float], names: Sequence[str], sizes: Sequence[int]
) -> None:
    """Raise a DataError where a source has a weight in config field `field` and nothing to draw."""
    for weight, name, size in zip(weights, names, sizes, strict=False):  # there may be no weights
        if not size:
            raise DataError(
                f"{name} has the weight {weight} in {field}, and everything in it is left out as too long or bad. Take "
                "it and its weight out, or raise the limits."
            )


class ShuffledSources:
    """An endless order of the items of sources, mixed by weight; each source is read once before it is read again.

    Each reading of a source has an order that depends on the seed, the source and how often it was read. A draw's item
    depends only on the draw's number, so that a run resumes with the next draw.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], seed: int) -> None:
        assert len(sizes) == len(weights) and min(sizes) > 0, (sizes, weights)
        self._mixture = Mixture(weights)
        self._sizes = tuple(sizes)
        self._firsts = tuple(int(end) - size for end, size in zip(numpy.cumsum(sizes), sizes, strict=True))
        self._seed = seed
        self._orders: dict[int, tuple[int, list[int]]] = {}  # by source: the last reading, and its order

    def items(self, start: int, count: int) -> Iterator[int]:
        """Yield the items of draws `start` to `start + count - 1`, as indices into the concatenated sources."""
        for n in range(start, start + count):
            source, drawn_before = self._mixture.draw(n)
            reading, place = divmod(drawn_before, self._sizes[source])
            yield self._firsts[source] + self._order(source, reading)[place]

    def _order(self, source: int, reading: int) -> list[int]:
        planned, order = self._orders.get(source, (-1, []))
        if planned != reading:
            order = (
                numpy.random.default_rng((self._seed, reading, source))
                .permutation(self._sizes[source])
                .tolist()
            )
            self._orders[source] = reading, order
        return order
