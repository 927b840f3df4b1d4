"""Shares of a mixture against exact fractions, and its order from any draw on."""

import json
import random
from fractions import Fraction

import pytest
import torch

from mcore_rl.config.changes import config_changes
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.config.sft import SFTConfig
from mcore_rl.data.loader import BatchSource
from mcore_rl.data.mixture import Mixture, ShuffledSources
from mcore_rl.data.tokenizer import load_tokenizer
from mcore_rl.errors import DataError
from mcore_rl.programs.sft import packed_train
from tests.unit.data.test_packed_sequences import lengths_of, packed_sequences


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
    path.write_text(
        "".join(json.dumps({"prompt": f"{name}", "response": f"{i}"}) + "\n" for i in range(count))
    )
    return str(path)


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
    data = {
        "train": files,
        "train_weights": (1, 2),
        "chat_template": "raw",
        "seq_length": 64,
        "too_long": "skip",
    }
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
