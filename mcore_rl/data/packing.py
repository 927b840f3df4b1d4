"""Which samples share a packed sequence, in which order, and which rank trains on them in which microbatch. All of it
depends only on lengths, weights and a seed, so every rank computes the same without communication.
"""

from array import array
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from heapq import heappop, heappush
from math import gcd, lcm

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from mcore_rl.data.examples import Examples
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
        while (planned := len(self._sources)) <= place:
            # The next draw of a source is due in whole at the end of draw (drawn + 1) / share, rounded up.
            _, source = min(
                (-(-(self._drawn[source] + 1) * self._period // share), source)
                for source, share in enumerate(self._per_period)
                if self._drawn[source] * self._period < (planned + 1) * share  # it is due in part
            )
            self._sources.append(source)
            self._before.append(self._drawn[source])
            self._drawn[source] += 1
        source = self._sources[place]
        return source, periods * self._per_period[source] + self._before[place]


def refuse_empty_sources(field: str, weights: Sequence[float], names: Sequence[str], sizes: Sequence[int]) -> None:
    """Raise a DataError where a source has a weight in config field `field` and nothing to draw."""
    for weight, name, size in zip(weights, names, sizes, strict=False):  # there may be no weights
        if not size:
            raise DataError(
                f"{name} has the weight {weight} in {field}, and everything in it is left out as too long or bad. Take "
                "it and its weight out, or raise the limits."
            )


class ShuffledSources:
    """An endless order of the items of sources, mixed by weight; each source is read once before it is read again. A
    draw's item depends only on the seed and the draw's number, so that a run resumes with the next draw.
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
            planned, order = self._orders.get(source, (-1, []))
            if planned != reading:
                rng = numpy.random.default_rng((self._seed, reading, source))
                order = rng.permutation(self._sizes[source]).tolist()
                self._orders[source] = reading, order
            yield self._firsts[source] + order[place]


LENGTH_MULTIPLE = 64
"""Packed sequences are padded to a multiple of this: a GPU's fast kernels need round numbers of tokens."""


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


@dataclass(frozen=True, kw_only=True, slots=True)
class PackingLimits:
    """Limits on the lengths of packed sequences of prompts and completions; a microbatch is a packed sequence."""

    max_tokens: int
    multiple: int
    """The length of every packed sequence is a multiple of this, or `max_tokens`."""
    sample_multiple: int
    """Each sample is padded to a multiple of this, because context parallelism splits each sample separately."""
    microbatch_multiple: int = 1
    """The number of microbatches is a multiple of this, as interleaved pipeline stages need."""
    is_fixed: bool = False
    """All packed sequences are `max_tokens` long, because pipeline stages exchange tensors of a fixed shape."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MinibatchPlan:
    """Samples of one optimizer step: rank -> microbatch -> indices; ranks have equally many, some empty."""

    microbatches: tuple[tuple[tuple[int, ...], ...], ...]

    def samples_of(self, dp_rank: int) -> list[int]:
        """Return the indices of all samples of a data-parallel rank."""
        return [sample for microbatch in self.microbatches[dp_rank] for sample in microbatch]


def plan_minibatches(
    lengths: Mapping[int, int], num_minibatches: int, dp_size: int, limits: PackingLimits
) -> list[MinibatchPlan]:
    """Split samples (`lengths`: sample -> positions), in order, into minibatches of sizes that differ by at most 1, and
    plan each. Every sample is in one microbatch of one rank; positions are spread about evenly over ranks and
    microbatches.
    """
    samples = sorted(lengths)  # ranks may have filled the dict in different orders
    size, num_larger = divmod(len(samples), num_minibatches)
    plans, begin = [], 0
    for index in range(num_minibatches):
        end = begin + size + (index < num_larger)
        padded_lengths = {n: padded(lengths[n], limits.sample_multiple) for n in samples[begin:end]}
        plans.append(lay_out(padded_lengths, dp_size, limits))
        begin = end
    return plans


def lay_out(lengths: dict[int, int], dp_size: int, limits: PackingLimits) -> MinibatchPlan:
    """Return the plan of one optimizer step on samples of these padded lengths, each on one data-parallel rank."""
    samples_of_ranks = _balance(lengths, dp_size)
    packed = []
    for samples in samples_of_ranks:
        bins = pack([lengths[sample] for sample in samples], limits.max_tokens)
        packed.append([[samples[index] for index in indices] for indices in bins])
    # Every rank gets as many microbatches as the fullest rank, because all ranks take part in the same collectives.
    num_microbatches = padded(max(1, *map(len, packed)), limits.microbatch_multiple)
    microbatches = []
    for samples, dense in zip(samples_of_ranks, packed, strict=True):
        even = _balance({sample: lengths[sample] for sample in samples}, num_microbatches)
        # Equally long microbatches keep pipeline stages busy, but only packing is sure to stay within the limit.
        fits = all(sum(lengths[sample] for sample in indices) <= limits.max_tokens for indices in even)
        chosen = even if fits else dense + [[]] * (num_microbatches - len(dense))
        microbatches.append(tuple(tuple(sorted(indices)) for indices in chosen))
    return MinibatchPlan(microbatches=tuple(microbatches))


def _balance(lengths: dict[int, int], num_parts: int) -> list[list[int]]:
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    totals = [(0, part) for part in range(num_parts)]
    # The index decides between equal lengths: every rank must make the same plan.
    for sample in sorted(lengths, key=lambda sample: (-lengths[sample], sample)):
        total, part = heappop(totals)
        parts[part].append(sample)
        heappush(totals, (total + lengths[sample], part))
    return parts


def plan_epoch(
    lengths: Sequence[int],
    row_length: int,
    *,
    buffer: int,
    seed: int,
    epoch: int,
    sources: ShuffledSources | None = None,
) -> list[list[int]]:
    """Return the packed sequences of one epoch, packed within windows of `buffer` conversations. An epoch has each
    conversation once, or with `sources` as many draws; packed sequences are shuffled, with `sources` only within
    windows, which keeps the mixture's shares. The arguments decide the plan.
    """
    generator = numpy.random.default_rng((seed, epoch))
    if sources is None:
        order = generator.permutation(len(lengths)).tolist()
    else:
        order = list(sources.items(epoch * len(lengths), len(lengths)))
    shuffled_together: list[list[list[int]]] = []
    for begin in range(0, len(order), buffer):
        window = order[begin : begin + buffer]
        packed = pack([lengths[index] for index in window], row_length)
        shuffled_together.append([[window[place] for place in row] for row in packed])
    if sources is None:
        shuffled_together = [[row for window in shuffled_together for row in window]]
    return [rows[place] for rows in shuffled_together for place in generator.permutation(len(rows)).tolist()]


@dataclass(frozen=True, kw_only=True, slots=True)
class PackingOptions:
    """Settings of packing."""

    row_length: int
    length_multiple: int
    """Each conversation is padded to a multiple of this many positions, so that context parallelism can cut it."""
    buffer: int
    seed: int
    pad_id: int
    weights: tuple[float, ...] = ()
    """Weight of each source of the conversations in the mixture; empty: each conversation once an epoch."""


class PackedSequences:
    """An endless run through the conversations, of which the first `num_sequences` packed sequences are used. The
    content of one depends only on its index: a resumed run asks for the next.
    """

    def __init__(self, examples: Examples, packing: PackingOptions, num_sequences: int) -> None:
        self.examples = examples
        self.packing = packing
        self.num_sequences = num_sequences
        self._lengths = [padded(length, packing.length_multiple) for length in examples.lengths_N.tolist()]
        self._sources = (
            ShuffledSources(examples.source_sizes, packing.weights, packing.seed) if packing.weights else None
        )
        self._ends: list[int] = []  # where each planned epoch ends, in packed sequences
        self._plan: tuple[int, list[list[int]]] = (-1, [])

    def __len__(self) -> int:
        return self.num_sequences

    @property
    def mean_length(self) -> float:
        """Length of the conversation that a token sees, averaged over tokens: sum of squares / sum."""
        lengths = self._drawn_lengths_N.astype(numpy.float64)
        return float((lengths**2).sum() / lengths.sum())

    @property
    def sequences_per_epoch(self) -> int:
        """Number of packed sequences of the first epoch; other epochs have a few more or fewer."""
        return len(self._epoch(0))

    @property
    def filled_fraction(self) -> float:
        """Share of the first epoch's positions that hold a token of a conversation."""
        return float(self._drawn_lengths_N.sum()) / (self.sequences_per_epoch * self.packing.row_length)

    @property
    def _drawn_lengths_N(self) -> NDArray[numpy.int64]:
        if self._sources is None:
            return self.examples.lengths_N
        return self.examples.lengths_N[list(self._sources.items(0, len(self.examples)))]

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """`tokens`, `labels`, `loss_mask`, `position_ids`, `is_padding` `[row_length]`, and `lengths`."""
        length = self.packing.row_length
        ids = torch.full((2, length), self.packing.pad_id)  # tokens, labels
        mask, is_padding = torch.zeros(length), torch.ones(length, dtype=torch.bool)
        positions = torch.zeros(length, dtype=torch.long)
        lengths = []
        begin = 0
        for member in self.members(index):
            first, last = self.examples.starts_N[member : member + 2]
            assistant_mask_T = torch.from_numpy(self.examples.assistant_mask_T[first:last])
            ids_T = torch.from_numpy(self.examples.ids_T[first:last]).long()
            end, span = begin + len(ids_T) - 1, self._lengths[member]
            ids[0, begin:end], ids[1, begin:end] = ids_T[:-1], ids_T[1:]
            mask[begin:end], is_padding[begin:end] = assistant_mask_T[1:].float(), False
            positions[begin : begin + span] = torch.arange(span)
            lengths.append(span)
            begin += span
        if begin < length:
            positions[begin:] = torch.arange(length - begin)
            lengths.append(length - begin)
        return {
            "tokens": ids[0],
            "labels": ids[1],
            "loss_mask": mask,
            "position_ids": positions,
            "is_padding": is_padding,
            "lengths": torch.tensor(lengths, dtype=torch.int32),
        }

    def members(self, index: int) -> list[int]:
        """Return the conversations of packed sequence `index`, in their order."""
        epoch = bisect_right(self._ends, index)
        while epoch == len(self._ends):
            begin = self._ends[-1] if self._ends else 0
            self._ends.append(begin + len(self._epoch(epoch)))
            epoch = bisect_right(self._ends, index)
        begin = self._ends[epoch - 1] if epoch else 0
        return self._epoch(epoch)[index - begin]

    def _epoch(self, epoch: int) -> list[list[int]]:
        if self._plan[0] != epoch:
            packing = self.packing
            rows = plan_epoch(
                self._lengths,
                packing.row_length,
                buffer=packing.buffer,
                seed=packing.seed,
                epoch=epoch,
                sources=self._sources,
            )
            self._plan = (epoch, rows)
        return self._plan[1]
