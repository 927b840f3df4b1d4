"""Batches of preferences by cursor, and packed sequences that keep the answers to a prompt together."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from mcore_rl.data.batch import Microbatch, PackedSpans
from mcore_rl.data.packing import PackingLimits, ShuffledSources, lay_out, padded
from mcore_rl.data.preferences import Preferences


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedPreferences:
    """One microbatch: whole groups in one packed sequence of `S` positions, on the CPU; indices count within it."""

    microbatch: Microbatch
    """The microbatch; its loss mask is 1 at positions t where the next token, t + 1, belongs to an answer."""
    sequence_S: Tensor
    """int64: sequence of each position; 0 at padding, where `microbatch.is_padding_BS` is True."""
    is_last_S: Tensor
    """bool: the position of each sequence's last token."""
    answer_lengths_N: Tensor
    """int64: tokens of each sequence's answer."""
    pairs_P2: Tensor
    """int64: sequences of each pair, chosen and rejected."""
    margins_P: Tensor
    """float32: margin of each pair."""
    probabilities_P: Tensor
    """float32: probability that the chosen answer of a pair is better; 0.5 for a tie."""
    sequences: tuple[int, ...]
    """Index in the Preferences of each sequence."""
    pairs: tuple[int, ...]
    """Index in the Preferences of each pair."""
    step_labels_S: Tensor | None = None
    """float32: probability that a step is right, at the last token of each labelled step, NaN elsewhere; None if no
    steps are labelled."""


class PreferenceOrder:
    """An endless order of groups, each once an epoch, or with weights as many draws; a batch depends on the cursor."""

    def __init__(self, preferences: Preferences, *, seed: int, weights: Sequence[float] = ()) -> None:
        self._seed = seed
        self._pairs_G: NDArray[numpy.int64] = numpy.diff(preferences.pair_starts_G)
        self._sources = ShuffledSources(preferences.source_sizes, weights, seed) if weights else None
        self._ends: list[int] = []
        """End of each planned epoch, in pairs."""
        self._plan: tuple[int, NDArray[numpy.int64], NDArray[numpy.int64]] | None = None
        """The epoch planned last: its groups, and the pairs up to and with each of them."""

    def batch(self, consumed_pairs: int, num_pairs: int) -> list[int]:
        """Return the whole groups after the first `consumed_pairs` pairs, with `num_pairs` pairs or more."""
        groups: list[int] = []
        cursor = consumed_pairs
        while cursor < consumed_pairs + num_pairs:
            while not self._ends or self._ends[-1] <= cursor:
                _, ends_G = self._planned(len(self._ends))
                self._ends.append((self._ends[-1] if self._ends else 0) + int(ends_G[-1]))
            epoch = bisect_right(self._ends, cursor)
            order_G, ends_G = self._planned(epoch)
            begin = self._ends[epoch - 1] if epoch else 0
            group = int(order_G[numpy.searchsorted(ends_G, cursor - begin, side="right")])
            groups.append(group)
            cursor += int(self._pairs_G[group])
        return groups

    def num_pairs(self, groups: Sequence[int]) -> int:
        """Return the number of pairs of these groups."""
        return int(self._pairs_G[list(groups)].sum())

    def _planned(self, epoch: int) -> tuple[NDArray[numpy.int64], NDArray[numpy.int64]]:
        if self._plan is None or self._plan[0] != epoch:
            num_groups = len(self._pairs_G)
            if self._sources is None:
                order_G = numpy.random.default_rng((self._seed, epoch)).permutation(num_groups)
            else:
                order_G = numpy.array(list(self._sources.items(epoch * num_groups, num_groups)), numpy.int64)
            self._plan = epoch, order_G, numpy.cumsum(self._pairs_G[order_G])
        return self._plan[1:]


def plan_batch(
    preferences: Preferences, groups: Sequence[int], dp_size: int, limits: PackingLimits
) -> list[list[list[int]]]:
    """Return rank -> microbatch -> groups, which may recur; ranks have equally many microbatches, some empty."""
    lengths = {}
    for index, group in enumerate(groups):
        first, last = preferences.sequence_starts_G[group : group + 2]
        sizes = numpy.diff(preferences.starts_N[first : last + 1]).tolist()
        lengths[index] = sum(padded(size, limits.sample_multiple) for size in sizes)
    plan = lay_out(lengths, dp_size, limits)
    return [
        [[groups[place] for place in microbatch] for microbatch in microbatches] for microbatches in plan.microbatches
    ]


def pack_groups(
    preferences: Preferences, groups: Sequence[int], limits: PackingLimits, pad_id: int
) -> PackedPreferences:
    """Pack all sequences of these groups; without groups, return a microbatch of only padding."""
    starts_G, pair_starts_G = preferences.sequence_starts_G, preferences.pair_starts_G
    sequences: list[int] = []
    pairs: list[int] = []
    places: list[NDArray[numpy.int64]] = []
    for group in groups:
        pairs_of_group = range(pair_starts_G[group], pair_starts_G[group + 1])
        # From indices in all data to indices in this microbatch, in which a group may occur twice.
        places.append(preferences.pairs_P2[pairs_of_group] - starts_G[group] + len(sequences))
        pairs += pairs_of_group
        sequences += range(starts_G[group], starts_G[group + 1])
    sizes = [int(preferences.starts_N[n + 1] - preferences.starts_N[n]) for n in sequences]
    spans = [padded(size, limits.sample_multiple) for size in sizes]
    num_filled = sum(spans)
    length = limits.max_tokens
    if not limits.is_fixed:
        length = min(length, padded(max(num_filled, 1), limits.multiple))
    assert num_filled <= length, (num_filled, length)
    tokens_S, labels_S = torch.full((2, length), pad_id)
    positions_S, sequence_S = torch.zeros(2, length, dtype=torch.int64)
    mask_S = torch.zeros(length)
    is_padding_S = torch.ones(length, dtype=torch.bool)
    is_last_S = torch.zeros(length, dtype=torch.bool)
    step_labels_S = torch.full((length,), torch.nan) if preferences.labels_T is not None else None
    answer_lengths = []
    begin = 0
    for place, (n, size, span) in enumerate(zip(sequences, sizes, spans, strict=True)):
        whole = slice(preferences.starts_N[n], preferences.starts_N[n + 1])
        ids_T = torch.from_numpy(preferences.ids_T[whole]).long()
        is_answer_T = torch.from_numpy(preferences.is_answer_T[whole])
        tokens_S[begin : begin + size] = ids_T
        # The last token predicts nothing; it is there because a score is read at it.
        labels_S[begin : begin + size - 1] = ids_T[1:]
        mask_S[begin : begin + size - 1] = is_answer_T[1:].float()
        is_padding_S[begin : begin + size] = False
        is_last_S[begin + size - 1] = True
        positions_S[begin : begin + span] = torch.arange(span)
        sequence_S[begin : begin + span] = place
        if step_labels_S is not None and preferences.labels_T is not None:
            step_labels_S[begin : begin + size] = torch.from_numpy(preferences.labels_T[whole])
        answer_lengths.append(int(is_answer_T.sum()))
        begin += span
    positions_S[begin:] = torch.arange(length - begin)
    # Remaining positions are a span of their own, so that no answer attends to them.
    lengths = spans + ([length - begin] if begin < length else [])
    bounds = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return PackedPreferences(
        microbatch=Microbatch(
            tokens_BS=tokens_S[None],
            labels_BS=labels_S[None],
            loss_mask_BS=mask_S[None],
            position_ids_BS=positions_S[None],
            packed=PackedSpans(cu_seqlens=bounds, max_length=max(lengths)),
            is_padding_BS=is_padding_S[None],
        ),
        sequence_S=sequence_S,
        is_last_S=is_last_S,
        answer_lengths_N=torch.tensor(answer_lengths, dtype=torch.int64),
        pairs_P2=torch.from_numpy(numpy.concatenate([numpy.zeros((0, 2), numpy.int64), *places])),
        margins_P=torch.from_numpy(preferences.margins_P[pairs]).float(),
        probabilities_P=torch.from_numpy(preferences.probabilities_P[pairs]).float(),
        sequences=tuple(sequences),
        pairs=tuple(pairs),
        step_labels_S=step_labels_S,
    )
