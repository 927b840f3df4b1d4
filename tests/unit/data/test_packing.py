"""Packing: every sample once, packed sequences within bounds and well filled, ranks in step."""

import random

import pytest

from mcore_rl.data.packing import PackingLimits, pack, plan_minibatches
from tests.unit.data.test_packed_sequences import ROW, lengths_of


@pytest.mark.parametrize("seed", range(20))
def test_each_index_is_packed_once_and_no_row_is_overfull(seed):
    lengths = lengths_of(100, seed)
    rows = pack(lengths, ROW)
    assert sorted(index for row in rows for index in row) == list(range(100))
    assert all(sum(lengths[index] for index in row) <= ROW for row in rows)


@pytest.mark.parametrize("seed", range(20))
def test_rows_are_at_most_a_few_percent_more_than_the_tokens_need(seed):
    lengths = lengths_of(500, seed)
    assert len(pack(lengths, ROW)) <= 1.03 * sum(lengths) / ROW + 1


def test_two_that_fill_a_row_share_it():
    assert pack([40, 30, 24, 34, 64], ROW) == [[4], [0, 2], [3, 1]]


@pytest.mark.parametrize("seed", range(20))
def test_each_sample_is_in_one_microbatch_of_one_rank_within_the_limits(seed: int) -> None:
    draw = random.Random(seed)
    multiple = draw.choice([1, 2, 4])
    limits = PackingLimits(
        max_tokens=64, multiple=4, sample_multiple=multiple, microbatch_multiple=draw.choice([1, 2, 3])
    )
    lengths = [draw.randint(1, 64 - multiple) for _ in range(draw.randint(1, 60))]
    dp_size, num_minibatches = draw.randint(1, 4), draw.randint(1, 5)
    # Some of the batch's samples may be left out.
    samples = sorted(draw.sample(range(100), len(lengths)))
    lengths_of_samples = dict(zip(samples, lengths, strict=True))
    plans = plan_minibatches(lengths_of_samples, num_minibatches, dp_size, limits)
    assert len(plans) == num_minibatches
    in_order = []
    for plan in plans:
        assert len(plan.microbatches) == dp_size
        assert len({len(of_rank) for of_rank in plan.microbatches}) == 1, (
            "ranks must compute as many microbatches"
        )
        assert len(plan.microbatches[0]) % limits.microbatch_multiple == 0 and len(plan.microbatches[0]) >= 1
        for of_rank in plan.microbatches:
            for microbatch in of_rank:
                assert (
                    sum(-(-lengths_of_samples[sample] // multiple) * multiple for sample in microbatch)
                    <= limits.max_tokens
                )
        indices = sorted(sample for rank in range(dp_size) for sample in plan.samples_of(rank))
        in_order += indices
    assert in_order == samples, "minibatches are runs of samples in order"
    sizes = [sum(len(plan.samples_of(rank)) for rank in range(dp_size)) for plan in plans]
    assert max(sizes) - min(sizes) <= 1


def test_ranks_are_balanced_to_within_one_sample() -> None:
    draw = random.Random(1)
    lengths = [draw.randint(1, 100) for _ in range(256)]
    limits = PackingLimits(max_tokens=1024, multiple=1, sample_multiple=1)
    (plan,) = plan_minibatches(dict(enumerate(lengths)), 1, 8, limits)
    totals = [sum(lengths[sample] for sample in plan.samples_of(rank)) for rank in range(8)]
    assert max(totals) - min(totals) <= 100
    # By the integral packing bound no plan has fewer microbatches than the tokens of the fullest rank need.
    assert len(plan.microbatches[0]) == -(-max(totals) // 1024)


def test_a_rank_without_samples_gets_empty_microbatches() -> None:
    (plan,) = plan_minibatches({0: 5}, 1, 3, PackingLimits(max_tokens=8, multiple=1, sample_multiple=1))
    assert sorted(plan.microbatches) == [((),), ((),), ((0,),)]
