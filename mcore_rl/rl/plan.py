"""Which completion is trained on where: from lengths alone, so that every rank finds the same."""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from mcore_rl.data.packing import pack, padded


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """How completions are laid into the rows of tokens of a forward pass."""

    length: int
    """Positions of a row at the most."""
    unit: int
    """A row is a multiple of this, or `length` long."""
    span_multiple: int
    """So is a completion with its prompt of this: context parallelism cuts each by itself."""
    microbatch_multiple: int = 1
    """So is the number of rows, with interleaved pipeline stages."""
    equally_long: bool = False
    """All rows are `length` long: pipeline stages exchange tensors of one shape."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MinibatchPlan:
    """One optimizer step: for each data-parallel rank its rows, as many as the others', of sample numbers."""

    rows: tuple[tuple[tuple[int, ...], ...], ...]

    def samples_of(self, rank: int) -> list[int]:
        """All sample numbers of a data-parallel rank."""
        return [sample for row in self.rows[rank] for sample in row]


def plan_minibatches(
    lengths_N: Sequence[int], num_minibatches: int, dp_size: int, rows: Rows
) -> list[MinibatchPlan]:
    """Runs of samples in order, of sizes that differ by at most one; each sample is in one row of one rank."""
    size, larger = divmod(len(lengths_N), num_minibatches)
    minibatches, begin = [], 0
    for index in range(num_minibatches):
        end = begin + size + (index < larger)
        minibatches.append(_plan(range(begin, end), lengths_N, dp_size, rows))
        begin = end
    return minibatches


def _plan(samples: range, lengths_N: Sequence[int], dp_size: int, rows: Rows) -> MinibatchPlan:
    padded_lengths = {sample: padded(lengths_N[sample], rows.span_multiple) for sample in samples}
    shares = _balanced(padded_lengths, dp_size)
    packed = [_packed(share, padded_lengths, rows.length) for share in shares]
    num_rows = padded(max(1, *map(len, packed)), rows.microbatch_multiple)
    laid_out = []
    for share, dense in zip(shares, packed, strict=True):
        even = _balanced({sample: padded_lengths[sample] for sample in share}, num_rows)
        fits = all(sum(padded_lengths[sample] for sample in row) <= rows.length for row in even)
        laid_out.append(even if fits else dense + [[]] * (num_rows - len(dense)))
    return MinibatchPlan(rows=tuple(tuple(tuple(sorted(row)) for row in of_rank) for of_rank in laid_out))


def _packed(share: Sequence[int], lengths: dict[int, int], row_length: int) -> list[list[int]]:
    packed = pack([lengths[sample] for sample in share], row_length)
    return [[share[place] for place in row] for row in packed]


def _balanced(lengths: dict[int, int], num_parts: int) -> list[list[int]]:
    """Longest first, each to the part with the least so far."""
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    totals = [(0, part) for part in range(num_parts)]
    for sample in sorted(lengths, key=lambda sample: (-lengths[sample], sample)):
        total, part = heappop(totals)
        parts[part].append(sample)
        heappush(totals, (total + lengths[sample], part))
    return parts
