"""Conversations in packed sequences: each once an epoch, by index alone, labels within their spans."""

import random

import pytest
import torch

from mcore_rl.data.examples import Examples
from mcore_rl.data.loader import BatchSource
from mcore_rl.data.packed_epochs import plan_epoch
from mcore_rl.data.packed_sequences import PackedSequences, PackingOptions
from mcore_rl.data.packing import padded

ROW = 64


def lengths_of(count, seed=0):
    draw = random.Random(seed)
    return [draw.randint(1, ROW) if draw.random() < 0.3 else draw.randint(1, ROW // 4) for _ in range(count)]


def examples(lengths, sizes=()):
    """Example i has the tokens 1000 i, 1000 i + 1, ...; the assistant says the odd ones."""
    ids = torch.cat([1000 * index + torch.arange(length + 1) for index, length in enumerate(lengths)])
    starts = torch.tensor([0, *(length + 1 for length in lengths)]).cumsum(0)
    return Examples(
        ids_T=ids.int().numpy(),
        assistant_mask_T=(ids % 2 == 1).numpy(),
        starts_N=starts.numpy(),
        source_sizes=sizes or (len(lengths),),
        num_skipped=0,
    )


def packed_sequences(lengths, multiple=1, num_sequences=10_000, seed=0, sizes=(), weights=()):
    packing = PackingOptions(
        row_length=ROW, length_multiple=multiple, buffer=16, seed=seed, pad_id=7, weights=weights
    )
    return PackedSequences(examples(lengths, sizes), packing, num_sequences)


def test_an_epoch_has_each_example_once_in_an_order_of_its_own():
    lengths = lengths_of(70)
    first, again, second = (plan_epoch(lengths, ROW, buffer=16, seed=3, epoch=e) for e in (0, 0, 1))
    assert first == again != second
    for plan in (first, second):
        assert sorted(index for row in plan for index in row) == list(range(70))


def test_rows_run_through_the_epochs_and_depend_on_their_number_alone():
    lengths = lengths_of(50)
    forwards, late = packed_sequences(lengths), packed_sequences(lengths)
    rows = [forwards.members(index) for index in range(3 * forwards.sequences_per_epoch)]
    assert [late.members(index) for index in reversed(range(len(rows)))] == rows[::-1]
    seen = [example for row in rows for example in row]
    assert sorted(seen[:50]) == sorted(seen[50:100]) == list(range(50))


@pytest.mark.parametrize("multiple", [1, 4])
def test_labels_masks_and_positions_stay_within_their_span(multiple):
    lengths = lengths_of(40)
    rows = packed_sequences(lengths, multiple)
    for index in range(rows.sequences_per_epoch):
        row, begin = rows[index], 0
        spans = row["lengths"].tolist()
        assert sum(spans) == ROW and not any(span % multiple for span in spans)
        for example, span in zip(rows.members(index), spans, strict=False):
            assert span == padded(lengths[example], multiple)
            real, pad = slice(begin, begin + lengths[example]), slice(begin + lengths[example], begin + span)
            tokens = 1000 * example + torch.arange(lengths[example])
            assert row["tokens"][real].equal(tokens) and row["labels"][real].equal(tokens + 1)
            assert row["loss_mask"][real].equal((tokens % 2 == 0).float()), "the label is what is said"
            assert row["tokens"][pad].eq(7).all() and not row["loss_mask"][pad].any()
            assert row["position_ids"][begin : begin + span].equal(torch.arange(span))
            begin += span
        assert not row["loss_mask"][begin:].any()


def test_spans_of_a_microbatch_run_over_its_rows():
    rows = packed_sequences(lengths_of(40), num_sequences=4)
    (microbatch,) = BatchSource(rows, micro_batch=4).microbatches(0, 4)
    lengths = torch.cat([rows[index]["lengths"] for index in range(4)])
    assert microbatch.packed.cu_seqlens.diff().equal(lengths)
    assert microbatch.packed.cu_seqlens[-1] == microbatch.tokens_BS.numel() == 4 * ROW
    assert microbatch.packed.max_length == lengths.max()
