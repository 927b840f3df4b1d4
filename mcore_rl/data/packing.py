"""Packing: which samples share a packed sequence, and which rank trains on them in which microbatch. The plan depends
only on lengths, so every rank computes the same plan without communication.
"""

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

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
    """Longest packed sequence."""
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
    """Samples of one optimizer step: for each data-parallel rank its microbatches, for each of these sample indices.

    All ranks have the same number of microbatches; some may be empty.
    """

    microbatches: tuple[tuple[tuple[int, ...], ...], ...]

    def samples_of(self, dp_rank: int) -> list[int]:
        """Return the indices of all samples of a data-parallel rank."""
        return [sample for microbatch in self.microbatches[dp_rank] for sample in microbatch]


def plan_minibatches(
    lengths: Mapping[int, int], num_minibatches: int, dp_size: int, limits: PackingLimits
) -> list[MinibatchPlan]:
    """Split the samples, in order, into minibatches with sizes that differ by at most 1, and plan each of them.

    Args:
        lengths: sample -> its positions, for the samples of the rollout batch that are trained on.

    Returns:
        A plan for each optimizer step. Every sample is in one microbatch of one rank; positions are spread about
        evenly over the ranks, and over the microbatches of a rank.
    """
    samples = sorted(lengths)
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
    """Deal the samples out, longest first, each to the part with the fewest positions so far."""
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    totals = [(0, part) for part in range(num_parts)]
    for sample in sorted(lengths, key=lambda sample: (-lengths[sample], sample)):
        total, part = heappop(totals)
        parts[part].append(sample)
        heappush(totals, (total + lengths[sample], part))
    return parts
