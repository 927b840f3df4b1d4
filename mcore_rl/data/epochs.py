"""Epochs of data for pretraining: how often a run reads each source, and in which order."""

from dataclasses import dataclass
from typing import Any

import numpy
from megatron.core.datasets.gpt_dataset import GPTDataset
from numpy.typing import NDArray
from torch import Tensor

APART = 0.8
"""Share of an epoch below which Megatron shuffles the last epoch apart."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainSource:
    """A dataset of the blend to train on."""

    prefix: str
    tokens: int
    """Tokens of its part to train on."""
    share: float
    """Its weight in the blend; the weights add up to 1."""
    sequences: int
    """Whole sequences in an epoch."""
    samples: int
    """Sequences that the run reads, including a blend's reserve."""
    seq_length: int
    """Tokens of a sequence."""

    def describe(self, train_samples: int) -> str:
        """Return the line for a log of a run that trains on `train_samples` sequences of all sources."""
        epochs = train_samples * self.share / self.sequences
        return (
            f"{self.prefix} has {self.tokens:,} tokens to train on, {self.sequences:,} sequences; "
            f"{self.share:.2%} of the run's, {epochs:,.2f} epochs"
        )

    def whole_order(self) -> str:
        """Return the values that the order of `data.shuffle = "whole"` depends on apart from the seed: runs with the
        same text read the same sequences up to the end of the shorter run.
        """
        # As GPTDataset counts: epochs follow without a gap, and the last label needs one more token.
        num_epochs = -(-(self.samples * self.seq_length + 1) // self.tokens)
        before = ((num_epochs - 1) * self.tokens - 1) // self.seq_length
        is_apart = num_epochs > 1 and self.samples - before < int(APART * self.sequences)
        return f"{num_epochs} epochs shuffled as {'one and the last apart' if is_apart else 'one'}"


class EpochDataset(GPTDataset):
    """Repeats one epoch as Megatron cuts, shuffles and caches it. Each epoch has every sequence once: the first epoch
    in Megatron's order, later epochs in an order that depends only on the seed and the epoch's index.

    The sequences are the same in all epochs; remaining tokens at the end that do not fill a sequence are never used.
    From the second epoch on, an order takes 8 bytes for each sequence of the source, on each rank.
    """

    def __init__(self, *args: Any) -> None:
        """Take the arguments of GPTDataset by position, as Megatron's builder gives them; the fourth is the number of
        samples.
        """
        low_level, path, indices, num_samples, *rest = args
        super().__init__(low_level, path, indices, None, *rest)  # None: one epoch
        self._per_epoch = int(super().__len__())
        self._num_epochs: int = max(1, -(-num_samples // self._per_epoch))
        self._order: tuple[int, NDArray[numpy.int64]] | None = None

    def __len__(self) -> int:
        """Return the number of samples in all epochs that the requested samples begin."""
        return self._num_epochs * self._per_epoch

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return a sample as GPTDataset does, for any index from 0."""
        epoch, place = divmod(int(index), self._per_epoch)
        sample: dict[str, Tensor] = super().__getitem__(int(self._order_of(epoch)[place]) if epoch else place)
        return sample

    def _order_of(self, epoch: int) -> NDArray[numpy.int64]:
        order = self._order
        if order is None or order[0] != epoch:
            rng = numpy.random.default_rng((self.config.random_seed, epoch))
            # Assigned as a whole: a thread reads ahead while another may ask for an earlier sample.
            self._order = order = epoch, rng.permutation(self._per_epoch)
        return order[1]
