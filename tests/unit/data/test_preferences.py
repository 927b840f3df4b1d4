"""Preferences in the layouts that people have, as the tokens that a model reads, and the microbatches they lie in."""

from itertools import pairwise

import numpy
import pytest

from mcore_rl.config.preferences import PreferenceDataConfig
from mcore_rl.data.packing import PackingLimits, padded
from mcore_rl.data.preference_batches import PreferenceOrder, pack_groups, plan_batch
from mcore_rl.data.preferences import read_preferences
from mcore_rl.data.tokenizer import load_tokenizer
from mcore_rl.errors import DataError
from tests.unit.data.conftest import chat_of, write_lines

PROMPT, GOOD, BAD = "etao shrdlu", "nit oats", "sun"
PAIR = {"prompt": PROMPT, "chosen": GOOD, "rejected": BAD}


def said(role, content):
    return {"role": role, "content": content}


@pytest.fixture
def read(tmp_path, tokenizer):
    def read_lines(*lines, template="plain", packed_length=256, length_multiple=1, **settings):
        path = write_lines(tmp_path / "pairs.jsonl", *lines)
        return read_preferences(
            settings.pop("paths", [path]),
            PreferenceDataConfig(**settings),
            chat_of(tokenizer, template),
            packed_length=packed_length,
            length_multiple=length_multiple,
        )

    return read_lines


def texts(preferences, tokenizer):
    """Text before the answer, and the answer, of each sequence, by the tokenizer alone."""
    words, found = load_tokenizer(tokenizer), []
    for first, last in pairwise(preferences.starts_N.tolist()):
        ids, is_answer = preferences.ids_T[first:last].tolist(), preferences.is_answer_T[first:last].tolist()
        begin = is_answer.index(True)
        assert all(is_answer[begin:]) and ids[-1] == words.eod_id
        found.append((words.decode(ids[:begin]), words.decode(ids[begin:-1])))
    return found


TURNS = [said("user", PROMPT), said("assistant", "two"), said("user", "three")]
HH = "\n\nHuman: etao shrdlu\n\nAssistant: two\n\nHuman: three\n\nAssistant: "
LAYOUTS = {
    "texts": ({"prompt": PROMPT, "chosen": GOOD, "rejected": BAD}, 1),
    "an implicit prompt of text": ({"chosen": f"{PROMPT} {GOOD}", "rejected": f"{PROMPT} {BAD}"}, 1),
    "turns": ({"prompt": TURNS[:1], "chosen": [said("assistant", GOOD)], "rejected": [said("assistant", BAD)]}, 1),
    "a prompt of turns and texts": ({"prompt": TURNS, "chosen": GOOD, "rejected": BAD}, 3),
    "messages": ({"messages": TURNS, "chosen": GOOD, "rejected": BAD}, 3),
    "an implicit prompt of turns": (
        {"chosen": [*TURNS, said("assistant", GOOD)], "rejected": [*TURNS, said("assistant", BAD)]},
        3,
    ),
    "a prompt that its sides repeat": (
        {
            "prompt": PROMPT,
            "chosen": [TURNS[0], said("assistant", GOOD)],
            "rejected": [TURNS[0], said("assistant", BAD)],
        },
        1,
    ),
    "HH-RLHF": ({"chosen": HH + GOOD, "rejected": HH + BAD}, 3),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_prompt_and_answers(read, tokenizer, layout):
    line, num_turns = LAYOUTS[layout]
    preferences = read(line, template="plain")
    prompt = "user:\netao shrdlu\n\n"
    if num_turns == 3:
        prompt += "assistant:\ntwouser:\nthree\n\n"  # the end token after "two" has no text
    (before, good), (before_bad, bad) = texts(preferences, tokenizer)
    # An implicit prompt ends before the space that parts it from the answers.
    assert (good.strip(), bad.strip()) == (GOOD, BAD)
    assert before == before_bad == prompt + "assistant:\n"
    assert preferences.pairs_P2.tolist() == [[0, 1]]
    assert (preferences.margins_P.tolist(), preferences.probabilities_P.tolist()) == ([0.0], [1.0])


def test_an_implicit_prompt_is_not_cut_inside_a_word(read, tokenizer):
    preferences = read({"chosen": "etao shrdlu", "rejected": "etao shrike"}, template="raw")
    assert texts(preferences, tokenizer) == [("etao", " shrdlu"), ("etao", " shrike")]


def test_margins_and_ties(read):
    lines = [PAIR | {"margin": 0.5}, PAIR | {"tie": True}, PAIR]
    preferences = read(*lines)
    assert preferences.margins_P.tolist() == [0.5, 0.0, 0.0]
    assert preferences.probabilities_P.tolist() == [1.0, 0.5, 1.0]
    assert read(*lines, margin_field=None).margins_P.tolist() == [0.0, 0.0, 0.0]
    without = read(*lines, ties="skip")
    assert (len(without), without.num_skipped_ties) == (2, 1)


def test_a_ranking_is_all_its_pairs_with_each_answer_once(read, tokenizer):
    ranked = {"prompt": PROMPT, "responses": ["a", "b", "c"]}
    preferences = read(ranked, PAIR)
    assert [answer for _, answer in texts(preferences, tokenizer)] == ["a", "b", "c", GOOD, BAD]
    assert preferences.pairs_P2.tolist() == [[0, 1], [0, 2], [1, 2], [3, 4]]
    assert preferences.sequence_starts_G.tolist() == [0, 3, 5]
    assert preferences.pair_starts_G.tolist() == [0, 3, 4]
    scored = read(ranked | {"scores": [1, 3.5, 1]}, margin_field="scores")
    assert scored.pairs_P2.tolist() == [[1, 0], [0, 2], [1, 2]]
    assert scored.margins_P.tolist() == [2.5, 0.0, 2.5]
    assert scored.probabilities_P.tolist() == [1.0, 0.5, 1.0]
    # Without the tie both answers are still in other pairs; of three equal scores nothing is left.
    assert read(ranked | {"scores": [1, 3.5, 1]}, ties="skip").pairs_P2.tolist() == [[1, 0], [1, 2]]
    two = read(ranked | {"responses": ["a", "b"], "scores": [2, 2]}, PAIR, ties="skip")
    assert (len(two), two.pairs_P2.tolist()) == (1, [[0, 1]])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "not JSON"),
        ({"prompt": "a", "chosen": "b"}, '"rejected" is not there, and a pair has two sides'),
        (PAIR | {"rejected": None}, '"rejected" is empty, and a pair has two sides'),
        (PAIR | {"chosen": ""}, '"chosen" is empty'),
        (PAIR | {"rejected": GOOD}, '"chosen" and "rejected" are the same'),
        (PAIR | {"rejected": [said("assistant", "b")]}, '"chosen" a str, "rejected" a list: wanted text'),
        (PAIR | {"chosen": 3, "rejected": 4}, '"chosen" a int'),
        (PAIR | {"prompt": 3}, '"prompt" is a int, wanted text or a list of turns'),
        (PAIR | {"margin": "much"}, "\"margin\" is 'much', wanted a finite number"),
        (PAIR | {"tie": 1}, '"tie" is 1, wanted true or false'),
        ({"chosen": TURNS, "rejected": TURNS[:2]}, '"chosen" does not end in a turn of the assistant'),
        ({"chosen": [{"content": "a"}], "rejected": TURNS}, 'turn 1 of "chosen" is no object with a "role"'),
        (
            {"prompt": "other"} | {key: [*TURNS, said("assistant", key)] for key in ("chosen", "rejected")},
            "turns that are not those of its prompt",
        ),
        ({"responses": ["a"]}, '"responses" is a list of 1, wanted a list of two answers or more'),
        ({"responses": ["a", "b", "a"]}, '"responses[0]" and "responses[2]" are the same'),
        ({"responses": ["a", ""]}, '"responses[1]" is empty'),
        ({"responses": ["a", "b"], "scores": [1]}, '"scores" is a list of 1, wanted a list of 2 finite numbers'),
        # Turns that differ in what the template does not read.
        (
            {"chosen": [said("assistant", "a")], "rejected": [said("assistant", "a") | {"name": "b"}]},
            "two sides have the same tokens",
        ),
    ],
)
def test_a_line_that_is_no_comparison_is_named_or_counted(read, tmp_path, line, message):
    with pytest.raises(DataError) as raised:
        read(PAIR, line)
    assert f"{tmp_path}/pairs.jsonl:2: " in str(raised.value) and message in str(raised.value)
    allowed = read(PAIR, line, max_bad=1)
    assert len(allowed) == 1 and message in allowed.bad_lines[0]


def test_a_format_that_was_asked_for_is_not_guessed(read):
    with pytest.raises(DataError, match='"chosen" does not begin with "Human:"'):
        read(PAIR, format="hh")
    with pytest.raises(DataError, match='"responses" is not there'):
        read(PAIR, format="ranking")


def test_what_is_too_long_is_refused_or_counted(read):
    long = PAIR | {"prompt": "etao " * 100}
    with pytest.raises(DataError, match=r"jsonl:2: the prompt alone has \d+ tokens, and data.seq_length=64. Raise it"):
        read(PAIR, long, seq_length=64)
    with pytest.raises(DataError, match=r"jsonl:2: prompt and answer have \d+ \+ \d+ tokens"):
        read(PAIR, PAIR | {"chosen": "etao " * 100}, seq_length=64)
    skipping = read(PAIR, long, seq_length=64, too_long="skip")
    assert (len(skipping), skipping.num_skipped) == (1, 1)
    with pytest.raises(DataError, match=r"no comparison is left \(1 are too long\)"):
        read(long, seq_length=64, too_long="skip")
    total = int(read(PAIR).lengths_N.sum())
    assert len(read(PAIR, packed_length=total)) == 1
    with pytest.raises(DataError, match=f"its 2 answers with their prompts have {total} tokens together"):
        read(PAIR, packed_length=total - 1)
    with pytest.raises(DataError, match=r"pairs.jsonl is empty"):
        read()


RANKED = [{"prompt": f"{'etao ' * (n % 5)}{n}", "responses": [f"{n} {k}" for k in range(2 + n % 3)]} for n in range(17)]


def test_an_epoch_has_each_group_once_and_a_batch_depends_on_its_cursor_alone(read):
    preferences = read(*RANKED)
    sizes = numpy.diff(preferences.pair_starts_G)
    assert sizes.tolist() == [[1, 3, 6][n % 3] for n in range(17)]
    order = PreferenceOrder(preferences, seed=1)
    cursor, batches = 0, []
    while cursor < 3 * preferences.num_pairs:
        batches.append((cursor, order.batch(cursor, 5)))
        cursor += order.num_pairs(batches[-1][1])
    # The last group of a batch may add pairs beyond 5, and nothing more.
    assert all(sizes[groups].sum() >= 5 > sizes[groups[:-1]].sum() for _, groups in batches)
    flat = [group for _, groups in batches for group in groups]
    epochs = [flat[first : first + 17] for first in (0, 17, 34)]
    assert all(sorted(epoch) == list(range(17)) for epoch in epochs) and epochs[0] != epochs[1]
    again = PreferenceOrder(preferences, seed=1)
    for begin, groups in reversed(batches):
        assert again.batch(begin, 5) == groups
    assert PreferenceOrder(preferences, seed=2).batch(0, 50) != PreferenceOrder(preferences, seed=1).batch(0, 50)


def test_weights_mix_files_by_prompts(read, tmp_path):
    paths = [
        write_lines(tmp_path / f"{name}.jsonl", *(PAIR | {"prompt": f"{name} {n}"} for n in range(count)))
        for name, count in (("a", 3), ("b", 40))
    ]
    preferences = read(paths=paths)
    assert preferences.source_sizes == (3, 40)
    groups = PreferenceOrder(preferences, seed=1, weights=[1.0, 1.0]).batch(0, 80)
    assert sum(group < 3 for group in groups) == 40


@pytest.mark.parametrize("multiple", [1, 4])
def test_microbatches_hold_whole_groups_and_lose_nothing(read, multiple):
    preferences = read(*RANKED)
    longest = 4 * int(preferences.lengths_N.max() + multiple)
    limits = PackingLimits(max_tokens=padded(longest, 8), multiple=8, sample_multiple=multiple)
    groups = PreferenceOrder(preferences, seed=3).batch(0, 2 * preferences.num_pairs)  # every group twice
    plan = plan_batch(preferences, groups, 2, limits)
    assert len(plan) == 2 and len(plan[0]) == len(plan[1])
    assert sorted(group for rank in plan for microbatch in rank for group in microbatch) == sorted(groups)
    found = []
    for microbatch in (microbatch for rank in plan for microbatch in rank):
        packed = pack_groups(preferences, microbatch, limits, pad_id=0)
        found += check_packed(preferences, packed, multiple)
    wanted = [
        pair_content(preferences, p)
        for group in groups
        for p in range(preferences.pair_starts_G[group], preferences.pair_starts_G[group + 1])
    ]
    assert sorted(found) == sorted(wanted)


def sequence_content(preferences, n):
    ids = preferences.ids_T[preferences.starts_N[n] : preferences.starts_N[n + 1]].tolist()
    is_answer = preferences.is_answer_T[preferences.starts_N[n] : preferences.starts_N[n + 1]].tolist()
    return tuple(ids), tuple(is_answer)


def pair_content(preferences, p):
    return tuple(sequence_content(preferences, n) for n in preferences.pairs_P2[p])


def check_packed(preferences, packed, multiple):
    """The pairs of one microbatch, read back from its tensors by their definitions."""
    batch = packed.microbatch
    tokens, labels = batch.tokens_BS[0], batch.labels_BS[0]
    bounds = batch.packed.cu_seqlens.tolist()
    assert bounds[-1] == len(tokens) and len(tokens) % 8 == 0
    sequences = []
    for n, begin in zip(range(len(packed.sequences)), bounds, strict=False):
        here = (packed.sequence_S == n) & ~batch.is_padding_BS[0]
        positions = here.nonzero().flatten().tolist()
        assert positions == list(range(begin, begin + len(positions)))
        assert padded(len(positions), multiple) == bounds[n + 1] - begin
        assert batch.position_ids_BS[0, positions].tolist() == list(range(len(positions)))
        assert packed.is_last_S[positions].nonzero().flatten().tolist() == [len(positions) - 1]
        assert labels[positions[:-1]].tolist() == tokens[positions[1:]].tolist()
        is_answer = [False, *(batch.loss_mask_BS[0, positions[:-1]] > 0).tolist()]
        assert sum(is_answer) == packed.answer_lengths_N[n]
        sequences.append((tuple(tokens[positions].tolist()), tuple(is_answer)))
    assert batch.loss_mask_BS.sum() == packed.answer_lengths_N.sum()
    assert packed.is_last_S.sum() == len(sequences)
    assert [sequence_content(preferences, n) for n in packed.sequences] == sequences
    pairs = [(sequences[chosen], sequences[rejected]) for chosen, rejected in packed.pairs_P2.tolist()]
    assert [pair_content(preferences, p) for p in packed.pairs] == pairs
    assert packed.margins_P.tolist() == preferences.margins_P[list(packed.pairs)].tolist()
    assert packed.probabilities_P.tolist() == preferences.probabilities_P[list(packed.pairs)].tolist()
    return pairs


def test_a_microbatch_without_groups_is_padding(read):
    limits = PackingLimits(max_tokens=16, multiple=4, sample_multiple=1)
    packed = pack_groups(read(PAIR), [], limits, pad_id=0)
    assert packed.microbatch.is_padding_BS.all() and packed.microbatch.tokens_BS.shape == (1, 4)
    assert packed.pairs_P2.shape == (0, 2) and not packed.microbatch.loss_mask_BS.any()
