"""Four rows of sequences, packed or not, cut into microbatches of one or more rows, under losses of the routers."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_rl.data.batch import Microbatch, PackedSpans
from mcore_rl.data.packing import padded
from mcore_rl.model.inputs import LocalMicrobatch, localize
from mcore_rl.train.state import TrainState

ROW, ROWS, VOCAB = 16, 4, 99
CONVERSATIONS = ((9, 4), (16,), (3, 5, 2), (2, 11))
"""Tokens of the conversations in each packed row; what is left of its 16 positions is padding."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model with losses of its routers, and a batch of four rows that is cut into microbatches."""

    balance: str
    micro_batch: int
    is_packed: bool = False
    capacity_factor: float | None = None
    mtp: bool = False
    recompute: bool = False

    def __str__(self) -> str:
        parts = [self.balance, f"{self.micro_batch} rows"]
        parts += ["packed"] * self.is_packed + ["mtp"] * self.mtp + ["recomputed"] * self.recompute
        return ", ".join(parts + ["capacity"] * (self.capacity_factor is not None))


@dataclass(frozen=True, eq=False)
class Sequence:
    """A row, or a conversation of a packed row."""

    tokens_T: Tensor
    """Ids, of which the last is only a label."""
    mask_S: Tensor

    @property
    def length(self) -> int:
        return len(self.mask_S)


def rows_of(case: Case) -> list[list[Sequence]]:
    """The sequences of each row; the loss mask counts one token in six, and none of the third row."""
    generator = torch.Generator().manual_seed(5)
    rows = []
    for index, lengths in enumerate(CONVERSATIONS if case.is_packed else ((ROW,),) * ROWS):
        row = []
        for length in lengths:
            tokens_T = torch.randint(1, VOCAB, (length + 1,), generator=generator)
            mask_S = (torch.rand(length, generator=generator) < 1 / 6).float() * (index != 2)
            row.append(Sequence(tokens_T, mask_S))
        rows.append(row)
    return rows


def microbatches_of(case: Case) -> Iterator[list[list[Sequence]]]:
    rows = rows_of(case)
    for begin in range(0, ROWS, case.micro_batch):
        yield rows[begin : begin + case.micro_batch]


def local_microbatch(
    rows: list[list[Sequence]], is_packed: bool, state: TrainState, multiple: int = 1
) -> LocalMicrobatch:
    """This rank's part of what the loader would make of these rows, each conversation padded to a multiple."""
    whole = {
        "tokens": torch.zeros(len(rows), ROW, dtype=torch.int64),
        "labels": torch.zeros(len(rows), ROW, dtype=torch.int64),
        "mask": torch.zeros(len(rows), ROW),
        "positions": torch.zeros(len(rows), ROW, dtype=torch.int64),
        "pads": torch.ones(len(rows), ROW, dtype=torch.bool),
    }
    lengths: list[int] = []
    for index, row in enumerate(rows):
        begin = 0
        for sequence in row:
            here, span = slice(begin, begin + sequence.length), padded(sequence.length, multiple)
            whole["tokens"][index, here], whole["labels"][index, here] = (sequence.tokens_T[:-1], sequence.tokens_T[1:])
            whole["mask"][index, here], whole["pads"][index, here] = sequence.mask_S, False
            whole["positions"][index, begin : begin + span] = torch.arange(span)
            lengths.append(span)
            begin += span
        whole["positions"][index, begin:] = torch.arange(ROW - begin)
        lengths += [ROW - begin] if begin < ROW else []
    bounds = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    microbatch = Microbatch(
        tokens_BS=whole["tokens"],
        labels_BS=whole["labels"],
        loss_mask_BS=whole["mask"],
        position_ids_BS=whole["positions"],
        packed=PackedSpans(cu_seqlens=bounds, max_length=max(lengths)) if is_packed else None,
        is_padding_BS=whole["pads"] if is_packed else None,
    )
    return localize(microbatch, state.mesh.cp, state.platform.device)
