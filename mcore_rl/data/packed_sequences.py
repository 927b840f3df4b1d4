"""Conversations packed into sequences of one length, by index, for `BatchSource`."""

from bisect import bisect_right
from dataclasses import dataclass

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from mcore_rl.data.examples import Examples
from mcore_rl.data.mixture import ShuffledSources
from mcore_rl.data.packed_epochs import plan_epoch, plan_mixed_epoch
from mcore_rl.data.packing import padded


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
    """An endless run through the conversations; the first `num_sequences` packed sequences are used. An epoch has each
    conversation once; with weights it is the same number of draws from the mixture.

    The content of a packed sequence depends only on its index: a resumed run asks for the next index.
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
        """Positions of each conversation of the first epoch."""
        if self._sources is None:
            return self.examples.lengths_N
        return self.examples.lengths_N[list(self._sources.items(0, len(self.examples)))]

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """`tokens`, `labels`, `loss_mask`, `position_ids`, `is_padding` of `row_length` positions, and the spans'
        `lengths`.
        """
        return self._row(self.members(index))

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
        """Return the plan of an epoch; the last plan returned is cached."""
        if self._plan[0] != epoch:
            packing = self.packing
            rows = (
                plan_epoch(
                    self._lengths, packing.row_length, buffer=packing.buffer, seed=packing.seed, epoch=epoch
                )
                if self._sources is None
                else plan_mixed_epoch(
                    self._lengths,
                    packing.row_length,
                    buffer=packing.buffer,
                    seed=packing.seed,
                    epoch=epoch,
                    sources=self._sources,
                )
            )
            self._plan = (epoch, rows)
        return self._plan[1]

    def _row(self, members: list[int]) -> dict[str, Tensor]:
        length = self.packing.row_length
        ids = torch.full((2, length), self.packing.pad_id)  # tokens, labels
        mask, is_padding = torch.zeros(length), torch.ones(length, dtype=torch.bool)
        positions = torch.zeros(length, dtype=torch.long)
        lengths = []
        begin = 0
        for member in members:
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
