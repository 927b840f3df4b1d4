"""Microbatches of completions: what lies at each position."""

from itertools import chain
from typing import Any

import pytest
import torch

from mcore_rl.data.packing import PackingLimits
from mcore_rl.megatron.mesh import Axis, Mesh
from mcore_rl.replay.cache import SampleSpan, local_tokens
from mcore_rl.rl.batch import layout_of, make_microbatch
from mcore_rl.rl.step.objective import at_positions
from mcore_rl.rl.types import SampleShape, TrainedSample

ALONE = Axis(None, 0, 1)
CPU = torch.device("cpu")


def sample(prompt: list[int], said: list[int], *, is_trained: bool = True, **fields: Any) -> TrainedSample:
    return TrainedSample(
        tokens_T=torch.tensor(prompt + said),
        rollout_logprobs_C=-torch.tensor(said, dtype=torch.float32),
        shape=SampleShape(
            replica_rank=0,
            num_prompt_tokens=len(prompt),
            num_completion_tokens=len(said),
            is_trained=is_trained,
            **fields,
        ),
    )


SAMPLES = {
    3: sample([11, 12], [21, 22, 23]),
    5: sample([13], [24], is_trained=False),
    8: sample([14, 15, 16], [25, 26]),
}


def test_index_t_belongs_to_the_token_that_is_predicted_there() -> None:
    limits = PackingLimits(max_tokens=16, multiple=4, sample_multiple=2)
    batch = make_microbatch(SAMPLES, [3, 5, 8], limits, ALONE, CPU)
    # 4 + 1 + 4 positions, padded to 4 + 2 + 4, and the row to 12.
    assert batch.shape == (1, 12)
    assert batch.spans == (SampleSpan(3, 4, 4), SampleSpan(5, 1, 2), SampleSpan(8, 4, 4))
    assert batch.place_T.tolist() == [0, 1, 2, 3, 0, 0, 0, 1, 2, 3, 0, 0]
    assert batch.inputs.tokens_Bs.tolist() == [[11, 12, 21, 22, 13, 0, 14, 15, 16, 25, 0, 0]]
    assert batch.inputs.position_ids_Bs.tolist() == [[0, 1, 2, 3, 0, 1, 0, 1, 2, 3, 0, 1]]
    assert batch.inputs.labels_Bs[0][batch.mask_T].tolist() == [21, 22, 23, 25, 26]
    assert batch.rollout_logprobs_T[batch.mask_T].tolist() == [-21, -22, -23, -25, -26]
    assert batch.inputs.labels_Bs[0][batch.completion_mask_T].tolist() == [21, 22, 23, 24, 25, 26]
    assert batch.sequence_T[batch.mask_T].tolist() == [0, 0, 0, 2, 2]
    assert batch.lengths_N.tolist() == [3, 0, 2]
    assert batch.inputs.is_padding_Bs[0].nonzero().flatten().tolist() == [5, 10, 11]
    assert batch.inputs.packed.lengths == (4, 2, 4, 2)


def test_tokens_of_an_environment_are_read_and_neither_trained_on_nor_counted() -> None:
    said = [21, 22, 91, 92, 23, 93, 24]
    turns = ((0, 2), (4, 5), (6, 7))
    conversation = sample([11, 12], said, sampled_spans=turns)
    assert conversation.shape.sampled_C.tolist() == [True, True, False, False, True, False, True]
    limits = PackingLimits(max_tokens=32, multiple=1, sample_multiple=1)
    samples = {0: conversation, 1: SAMPLES[3], 2: sample([11, 12], said, sampled_spans=turns, is_trained=False)}
    batch = make_microbatch(samples, [0, 1, 2], limits, ALONE, CPU)
    assert batch.inputs.tokens_Bs[0, :8].tolist() == [11, 12, *said[:-1]]
    assert batch.inputs.labels_Bs[0][batch.mask_T].tolist() == [21, 22, 23, 24, 21, 22, 23]
    assert batch.rollout_logprobs_T[batch.mask_T].tolist() == [-21, -22, -23, -24, -21, -22, -23]
    assert batch.completion_mask_T.sum() == 4 + 3 + 4
    assert torch.equal(batch.inputs.rows_N, batch.mask_T.nonzero()[:, 0])
    assert torch.equal(batch.completion_rows_N, batch.completion_mask_T.nonzero()[:, 0])
    assert batch.lengths_N.tolist() == [4, 3, 0]
    shape = conversation.shape
    assert (shape.num_positions, shape.num_sampled, shape.num_trained) == (8, 4, 4)
    assert shape.sampled_positions.tolist() == batch.completion_mask_T[:8].nonzero().flatten().tolist()
    at_positions_P = at_positions(torch.tensor([1.0, 2.0, 3.0, 4.0, 0.0]), shape)
    assert at_positions_P.tolist() == [0, 1, 2, 0, 0, 3, 0, 4]


def test_advantages_and_loss_weights_come_by_the_samples_indices() -> None:
    batch = make_microbatch(SAMPLES, [8, 3], PackingLimits(max_tokens=16, multiple=1, sample_multiple=1), ALONE, CPU)
    numbers_N = torch.arange(10, dtype=torch.float64)
    weighted = batch.with_advantages({3: numbers_N[3].expand(4), 8: numbers_N[8].expand(4)}, 10 * numbers_N)
    assert weighted.advantages_T.tolist() == [0, 0, 8, 8, 0, 3, 3, 3]
    assert weighted.loss_weights_T.tolist() == [0, 0, 80, 80, 0, 30, 30, 30]


def test_advantages_of_tokens_lie_where_the_tokens_are_predicted() -> None:
    limits = PackingLimits(max_tokens=16, multiple=4, sample_multiple=4)
    by_position = {8: torch.tensor([0.0, 0.0, 4.0, 5.0]), 3: torch.tensor([0.0, 1.0, 2.0, 3.0])}
    held = []
    for rank in (0, 1):
        batch = make_microbatch(SAMPLES, [8, 3], limits, Axis(None, rank, 2), CPU)
        weighted = batch.with_advantages(by_position, torch.ones(10))
        labels = batch.inputs.labels_Bs[0][batch.mask_T].tolist()
        held += zip(labels, weighted.advantages_T[batch.mask_T].tolist(), strict=True)
    assert sorted(held) == [(21, 1), (22, 2), (23, 3), (25, 4), (26, 5)]
    whole = make_microbatch(SAMPLES, [8, 3], limits, ALONE, CPU).with_advantages(by_position, torch.ones(10))
    assert whole.advantages_T.tolist()[:8] == [0, 0, 4, 5, 0, 1, 2, 3]


def test_a_microbatch_without_samples_is_padding_that_counts_for_nothing() -> None:
    for is_fixed, length in ((False, 4), (True, 16)):
        limits = PackingLimits(max_tokens=16, multiple=4, sample_multiple=1, is_fixed=is_fixed)
        batch = make_microbatch({}, [], limits, ALONE, CPU).with_advantages({}, torch.ones(3))
        assert batch.shape == (1, length) and not batch.mask_T.any()
        assert batch.inputs.is_padding_Bs.all() and batch.loss_weights_T.sum() == 0


@pytest.mark.parametrize("rank", [0, 1])
def test_context_parallel_ranks_hold_their_chunks_of_each_sample(rank: int) -> None:
    limits = PackingLimits(max_tokens=16, multiple=4, sample_multiple=4)
    batch = make_microbatch(SAMPLES, [3, 8], limits, Axis(None, rank, 2), CPU)
    whole = make_microbatch(SAMPLES, [3, 8], limits, ALONE, CPU)
    places = [0, 3, 4, 7] if rank == 0 else [1, 2, 5, 6]
    assert batch.shape == whole.shape == (1, 8)
    assert batch.inputs.tokens_Bs[0].tolist() == whole.inputs.tokens_Bs[0][places].tolist()
    assert batch.rollout_logprobs_T.tolist() == whole.rollout_logprobs_T[places].tolist()
    assert batch.mask_T.tolist() == whole.mask_T[places].tolist()
    assert batch.lengths_N.tolist() == [3, 2], "of whole samples"


def test_stale_tokens_are_the_first_of_a_completion() -> None:
    """Two of three tokens; none; all. Routes of the prompt are stale with the first token."""
    samples = {
        3: sample([11, 12], [21, 22, 23], stale_spans=((0, 2),)),
        5: sample([13], [24]),
        8: sample([14, 15, 16], [25, 26], stale_spans=((0, 2),)),
    }
    limits = PackingLimits(max_tokens=16, multiple=4, sample_multiple=2)
    batch = make_microbatch(samples, [3, 5, 8], limits, ALONE, CPU)
    assert batch.inputs.labels_Bs[0][batch.is_stale_T].tolist() == [21, 22, 25, 26]
    assert [span.first_current for span in batch.spans] == [3, 0, 4]
    assert [len(samples[n].tokens_T) - 1 for n in (3, 8)] == [4, 4]  # one position is current, and none


def test_stale_tokens_lead_each_segment_and_the_positions_before_them_have_older_routes(one_rank: Mesh) -> None:
    """The first segment has two of three tokens from older weights, the second all, and the third none."""
    fields = {"segments": (3, 6), "stale_spans": ((0, 2), (3, 6)), "sampled_spans": ((0, 3), (4, 6), (7, 9))}
    samples = {0: sample([10, 11], [21, 22, 23, 40, 31, 32, 50, 33, 34], **fields)}
    limits = PackingLimits(max_tokens=16, multiple=4, sample_multiple=1)
    batch = make_microbatch(samples, [0], limits, ALONE, CPU)
    assert batch.inputs.labels_Bs[0][batch.is_stale_T & batch.mask_T].tolist() == [21, 22, 31, 32]
    tokens = local_tokens(layout_of(batch, of_engine=True), one_rank)
    # The tokens 10, 11, 21 predict what older weights sampled, and 40, 31 too.
    assert batch.inputs.tokens_Bs[0][~tokens.is_current_t].tolist() == [10, 11, 21, 40, 31]
    assert local_tokens(layout_of(batch), one_rank).is_current_t.all()


SEGMENTS = ([[11, 12, 21, 22, 91, 23], [41, 42, 43, 31, 32]], [[13, 24, 92, 25], [51, 33], [61, 62, 34, 35]])
"""The tokens of each segment of two samples; tokens of 20 to 39 are sampled, the prompts are the first 2 and 1."""


def segmented(number: int, **fields: Any) -> TrainedSample:
    """A sample of `SEGMENTS`, whose tokens have their negative as logprob."""
    tokens, num_prompt = [*chain(*SEGMENTS[number])], 2 - number
    said = tokens[num_prompt:]
    starts = [sum(map(len, SEGMENTS[number][:n])) - num_prompt for n in range(1, len(SEGMENTS[number]))]
    spans = tuple((n, n + 1) for n, token in enumerate(said) if 20 <= token < 40)
    return sample(tokens[:num_prompt], said, segments=tuple(starts), sampled_spans=spans, **fields)


@pytest.mark.parametrize("multiple", [1, 4])
def test_segments_are_sequences_of_their_own_without_their_last_token(multiple: int, one_rank: Mesh) -> None:
    limits = PackingLimits(max_tokens=64, multiple=4, sample_multiple=multiple)
    batch = make_microbatch({0: segmented(0), 1: segmented(1)}, [0, 1], limits, ALONE, CPU)
    segments = [*SEGMENTS[0], *SEGMENTS[1]]
    lengths = [-(-(len(tokens) - 1) // multiple) * multiple for tokens in segments]
    starts = [sum(lengths[:n]) for n in range(5)]
    assert batch.inputs.packed.lengths[:5] == tuple(lengths)
    real = [start + n for start, tokens in zip(starts, segments, strict=True) for n in range(len(tokens) - 1)]
    assert (~batch.inputs.is_padding_Bs[0]).nonzero().flatten().tolist() == real
    assert batch.inputs.tokens_Bs[0][real].tolist() == [t for tokens in segments for t in tokens[:-1]]
    assert batch.inputs.labels_Bs[0][real].tolist() == [t for tokens in segments for t in tokens[1:]]
    assert batch.inputs.position_ids_Bs[0][real].tolist() == [n for tokens in segments for n in range(len(tokens) - 1)]
    assert batch.place_T[real].tolist() == [*range(5 + 4), *range(3 + 1 + 3)], "places go on, unlike positions"
    assert batch.inputs.labels_Bs[0][batch.mask_T].tolist() == [21, 22, 23, 31, 32, 24, 25, 33, 34, 35]
    assert batch.rollout_logprobs_T[batch.mask_T].tolist() == [-21, -22, -23, -31, -32, -24, -25, -33, -34, -35]
    assert batch.lengths_N.tolist() == [5, 5]
    tokens = local_tokens(layout_of(batch), one_rank)
    assert tokens.lengths == (9, 7) and tokens.is_real_t.nonzero().flatten().tolist() == real
    assert tokens.position_t[real].tolist() == batch.place_T[real].tolist()
    assert tokens.sample_index_t[real].tolist() == [0] * 9 + [1] * 7


@pytest.mark.parametrize("rank", [0, 1])
def test_numbers_of_each_token_come_to_their_segment(rank: int) -> None:
    """Under context parallelism, whose ranks have two quarters of each segment."""
    limits = PackingLimits(max_tokens=64, multiple=4, sample_multiple=4)
    samples = {0: segmented(0), 1: segmented(1)}
    batch = make_microbatch(samples, [1, 0], limits, Axis(None, rank, 2), CPU)
    tokens = {index: [float(t) for t in chain(*SEGMENTS[index]) if 20 <= t < 40] for index in samples}
    numbers = {index: at_positions(torch.tensor(tokens[index]), samples[index].shape) for index in samples}
    weighted = batch.with_advantages(numbers, torch.ones(2)).with_returns(numbers)
    labels_T = batch.inputs.labels_Bs[0][batch.mask_T]
    assert weighted.advantages_T[batch.mask_T].tolist() == labels_T.tolist()
    assert weighted.returns_T[batch.mask_T].tolist() == labels_T.tolist()
    other = make_microbatch(samples, [1, 0], limits, Axis(None, 1 - rank, 2), CPU)
    both = labels_T.tolist() + other.inputs.labels_Bs[0][other.mask_T].tolist()
    assert sorted(both) == [21, 22, 23, 24, 25, 31, 32, 33, 34, 35]
