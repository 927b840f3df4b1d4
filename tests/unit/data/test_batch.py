import pytest
import torch

from mcore_rl.data.batch import BatchSource
from mcore_rl.errors import ConfigError, DataError

SEQ = 4
RAMP = [4, 4, 8, 8, 16]
"""Global batches of five steps."""


def numbered(count):
    """Sample i has the tokens 10 i, 10 i + 1, ..."""
    return [
        {
            "tokens": torch.arange(SEQ) + 10 * i,
            "labels": torch.arange(SEQ) + 10 * i + 1,
            "loss_mask": torch.full((SEQ,), float(i)),
            "position_ids": torch.arange(SEQ),
        }
        for i in range(count)
    ]


def samples_of(microbatches):
    return [int(row[0]) // 10 for microbatch in microbatches for row in microbatch.tokens_BS]


def run(dp_size, micro_batch, steps=RAMP, cursor=0):
    """Sample numbers of each step: ranks and microbatches put end to end."""
    sources = [
        BatchSource(numbered(40), micro_batch=micro_batch, dp_rank=rank, dp_size=dp_size) for rank in range(dp_size)
    ]
    order = []
    for global_batch in steps:
        shares = [source.microbatches(cursor, global_batch) for source in sources]
        assert {len(share) for share in shares} == {global_batch // dp_size // micro_batch}
        order.append([sample for share in shares for sample in samples_of(share)])
        cursor += global_batch
    return order


@pytest.mark.parametrize("dp_size", [1, 2, 4])
@pytest.mark.parametrize("micro_batch", [1, 2, 4])
def test_every_mesh_trains_on_the_same_samples_in_the_same_order(dp_size, micro_batch):
    if RAMP[0] % (dp_size * micro_batch):
        steps, expected = RAMP[4:], [list(range(16))]
    else:
        steps, expected = RAMP, [list(range(b, b + n)) for b, n in zip([0, 4, 8, 16, 24], RAMP, strict=True)]
    assert run(dp_size, micro_batch, steps) == expected
    if steps == RAMP:  # resumed at a cursor
        assert run(dp_size, micro_batch, RAMP[2:], cursor=8) == expected[2:]


def test_a_microbatch_carries_each_field_of_its_samples():
    microbatch = BatchSource(numbered(4), micro_batch=2).microbatches(2, 2)[0]
    assert microbatch.tokens_BS.tolist() == [[20, 21, 22, 23], [30, 31, 32, 33]]
    assert microbatch.labels_BS.tolist() == [[21, 22, 23, 24], [31, 32, 33, 34]]
    assert microbatch.loss_mask_BS.tolist() == [[2.0] * 4, [3.0] * 4]
    assert microbatch.position_ids_BS.tolist() == [[0, 1, 2, 3]] * 2
    assert microbatch.packed is None


def test_what_was_read_ahead_is_what_is_read_without():
    source = BatchSource(numbered(40), micro_batch=1, dp_rank=1, dp_size=2)
    plain = samples_of(source.microbatches(8, 4))
    source.prefetch(8, 4)
    assert samples_of(source.microbatches(8, 4)) == plain
    source.prefetch(12, 4)  # the next call wants something else
    assert samples_of(source.microbatches(8, 4)) == plain


def test_every_evaluation_reads_the_same_batches_from_the_start():
    source = BatchSource(numbered(40), micro_batch=2)
    source.microbatches(20, 4)
    for _ in range(2):
        assert [samples_of(batch) for batch in source.from_the_start(3, 4)] == [
            [0, 1, 2, 3],
            [4, 5, 6, 7],
            [8, 9, 10, 11],
        ]


@pytest.mark.parametrize(
    ("source", "cursor", "global_batch", "error", "message"),
    [
        *(
            ({"micro_batch": 2, "dp_size": 2}, 0, size, ConfigError, f"{size} is not a multiple of .*=2 x dp=2")
            for size in (0, -4, 2, 6)
        ),
        *(({"micro_batch": 1}, cursor, 4, DataError, "built with 40") for cursor in (-1, 37, 1000)),
        *(
            ({"micro_batch": size, "dp_rank": rank, "dp_size": 2}, 0, 4, ConfigError, "wanted a micro-batch")
            for size, rank in ((0, 0), (1, 2), (1, -1))
        ),
    ],
)
def test_batches_that_cannot_be_read_are_refused(source, cursor, global_batch, error, message):
    with pytest.raises(error, match=message):
        BatchSource(numbered(40), **source).microbatches(cursor, global_batch)
