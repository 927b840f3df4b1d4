"""Conversations in packed sequences: each once an epoch, by index alone, labels within their spans."""

import random
from fractions import Fraction

import pytest
import torch

from mcore_rl.config.changes import config_changes
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.config.sft import SFTConfig
from mcore_rl.data.batch import BatchSource
from mcore_rl.data.examples import Examples
from mcore_rl.data.packing import (
    Mixture,
    PackedSequences,
    PackingLimits,
    PackingOptions,
    ShuffledSources,
    pack,
    padded,
    plan_epoch,
    plan_minibatches,
)
from mcore_rl.data.tokenizer import load_tokenizer
from mcore_rl.errors import DataError
from mcore_rl.programs.sft import packed_train
from tests.unit.data.conftest import write_lines

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
    packing = PackingOptions(row_length=ROW, length_multiple=multiple, buffer=16, seed=seed, pad_id=7, weights=weights)
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


@pytest.mark.parametrize("seed", range(20))
def test_each_index_is_packed_once_no_row_is_overfull_and_few_are_more_than_the_tokens_need(seed):
    lengths = lengths_of(500, seed)
    rows = pack(lengths, ROW)
    assert sorted(index for row in rows for index in row) == list(range(500))
    assert all(sum(lengths[index] for index in row) <= ROW for row in rows)
    assert len(rows) <= 1.03 * sum(lengths) / ROW + 1


def test_two_that_fill_a_row_share_it():
    assert pack([40, 30, 24, 34, 64], ROW) == [[4], [0, 2], [3, 1]]


@pytest.mark.parametrize("seed", range(20))
def test_each_sample_is_in_one_microbatch_of_one_rank_within_the_limits(seed: int) -> None:
    draw = random.Random(seed)
    multiple, rows = draw.choice([1, 2, 4]), draw.choice([1, 2, 3])
    limits = PackingLimits(max_tokens=64, multiple=4, sample_multiple=multiple, microbatch_multiple=rows)
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
        assert len({len(of_rank) for of_rank in plan.microbatches}) == 1, "ranks must compute as many microbatches"
        assert len(plan.microbatches[0]) % limits.microbatch_multiple == 0 and len(plan.microbatches[0]) >= 1
        for of_rank in plan.microbatches:
            for microbatch in of_rank:
                total = sum(-(-lengths_of_samples[sample] // multiple) * multiple for sample in microbatch)
                assert total <= limits.max_tokens
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
    # A rank without samples has microbatches, too.
    (plan,) = plan_minibatches({0: 5}, 1, 3, PackingLimits(max_tokens=8, multiple=1, sample_multiple=1))
    assert sorted(plan.microbatches) == [((),), ((),), ((0,),)]


def random_weights(seed):
    draw = random.Random(seed)
    # Many small weights beside a large one are where a greedy choice of the largest deficit leaves the bound.
    return [round(draw.choice((0.05, 1, 30)) * draw.uniform(0.5, 1), 3) for _ in range(draw.randint(1, 12))]


@pytest.mark.parametrize("weights", [[3, 1], [0.7, 0.3], [1], [1e-3, 1], *map(random_weights, range(12))])
def test_after_every_draw_each_source_is_within_one_of_its_share(weights):
    shares = [Fraction(str(weight)) for weight in weights]
    shares = [share / sum(shares) for share in shares]
    mixture, drawn = Mixture(weights), [0] * len(weights)
    for n in range(1500):
        source, before = mixture.draw(n)
        assert before == drawn[source]
        drawn[source] += 1
        assert all(abs(d - (n + 1) * share) < 1 for d, share in zip(drawn, shares, strict=True))


def test_a_draw_depends_on_its_number_alone_also_far_on():
    fresh, run = Mixture([3, 1, 1.5]), Mixture([3, 1, 1.5])
    all_draws = [run.draw(n) for n in range(500)]
    assert [fresh.draw(n) for n in range(499, 250, -1)] == all_draws[499:250:-1]
    # 11 draws are 6, 2 and 3 of the sources: a multiple of 11 draws later all is as it was.
    source, before = all_draws[7]
    assert Mixture([3, 1, 1.5]).draw(11 * 10**9 + 7) == (source, 10**9 * (6, 2, 3)[source] + before)


def test_a_source_is_read_whole_in_another_order_each_time():
    sources = ShuffledSources([4, 7], [1, 3], seed=5)
    items = list(sources.items(0, 400))
    for of_source, size in (([i for i in items if i < 4], 4), ([i - 4 for i in items if i >= 4], 7)):
        readings = [of_source[begin : begin + size] for begin in range(0, len(of_source) - size, size)]
        assert len(readings) > 20
        assert all(sorted(reading) == list(range(size)) for reading in readings)
        assert len(set(map(tuple, readings))) > 10
    assert list(ShuffledSources([4, 7], [1, 3], seed=5).items(123, 200)) == items[123:323]


def test_each_window_of_packed_conversations_has_the_shares_of_the_mixture():
    rows = packed_sequences(lengths_of(50), sizes=(10, 40), weights=(3, 1))
    sequences = [rows.members(index) for index in range(3 * rows.sequences_per_epoch)]
    drawn = [member for members in sequences for member in members]
    # An epoch is 50 draws in windows of 16, 16, 16 and 2.
    for end in (16, 32, 48, 50, 66, 82):
        assert abs(sum(member < 10 for member in drawn[:end]) - 0.75 * end) < 1
    late = packed_sequences(lengths_of(50), sizes=(10, 40), weights=(3, 1))
    assert [late.members(index) for index in range(7, len(sequences))] == sequences[7:]


def chats(path, name, count):
    return write_lines(path, *({"prompt": name, "response": f"{i}"} for i in range(count)))


def test_chats_are_mixed_by_weight_and_a_resume_reads_the_following_sequences(tokenizer, tmp_path):
    data = {
        "train": (chats(tmp_path / "a.jsonl", "etao", 30), chats(tmp_path / "b.jsonl", "shrdlu", 10)),
        "train_weights": (0.2, 0.8),
        "chat_template": "raw",
        "seq_length": 64,
        "pack_buffer": 20,
        "tokenizer": tokenizer,
    }
    config = SFTConfig.model_validate({"data": data, "train": {"steps": 50, "global_batch": 2}})
    words = load_tokenizer(tokenizer)
    source, resumed = (BatchSource(packed_train(config, words), micro_batch=2) for _ in range(2))
    tokens = [source.microbatches(cursor, 2)[0].tokens_BS for cursor in range(0, 24, 2)]
    texts = [words.decode(row.tolist()) for batch in tokens for row in batch]
    # The first 100 conversations or so; where a window is cut, the share is off by a packed sequence or two.
    num_a, num_b = (sum(text.count(word) for text in texts) for word in ("etao", "shrdlu"))
    assert num_a / (num_a + num_b) == pytest.approx(0.2, abs=0.03)
    later = [resumed.microbatches(cursor, 2)[0].tokens_BS for cursor in range(10, 24, 2)]
    assert torch.equal(torch.stack(later), torch.stack(tokens[5:]))


def test_a_file_with_a_weight_and_no_conversation_that_fits_is_refused(tokenizer, tmp_path):
    files = (chats(tmp_path / "a.jsonl", "etao", 3), chats(tmp_path / "b.jsonl", "shrdlu " * 90, 3))
    data = {"train": files, "train_weights": (1, 2), "chat_template": "raw", "seq_length": 64, "too_long": "skip"}
    config = SFTConfig.model_validate({"data": data | {"tokenizer": tokenizer}})
    with pytest.raises(DataError, match=r"b\.jsonl has the weight 2.0 in data\.train_weights"):
        packed_train(config, load_tokenizer(tokenizer))


@pytest.mark.parametrize(
    ("before", "now", "field"),
    [
        (SFTConfig(), {"data": {"train_weights": (1, 2)}}, "data.train_weights"),
        (RlRunConfig(), {"rl": {"prompts": {"file_weights": (1, 2)}}}, "rl.prompts.file_weights"),
    ],
)
def test_a_resume_with_other_weights_is_refused_unless_allowed(before, now, field):
    (change,) = config_changes(before.model_dump(mode="json"), type(before).model_validate(now))
    assert (change.key, change.breaks_exactness) == (field, True)
    assert change.is_allowed((field,)) and not change.is_allowed(("train.seed",))
