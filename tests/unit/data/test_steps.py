"""Steps of answers: where they end in text and tokens, and lines with labels of steps."""

import json
from pathlib import Path

import numpy
import pytest
import sentencepiece
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from mcore_rl.config.data import TokenizerConfig
from mcore_rl.config.preferences import PreferenceDataConfig
from mcore_rl.data.chat import Chat, Conversation, load_chat
from mcore_rl.data.preferences import Preferences, read_preferences
from mcore_rl.data.steps import read_steps, step_ends, step_tokens
from mcore_rl.data.tokenizer import Tokenizer, load_tokenizer
from mcore_rl.errors import DataError

WORDS = ["<unk>", "<end>", "ask", "a", "b", "c", "d"]


@pytest.mark.parametrize(
    ("text", "separator", "ends"),
    [
        ("one\ntwo", "\n", [4, 7]),
        ("one\n\n\ntwo\n", "\n", [6, 10]),
        ("\n one", "\n", [5]),
        ("one\n\ntwo\nmore", "\n\n", [5, 13]),
        ("a<s>b<s>", "<s>", [4, 8]),
        (" \n\n", "\n", []),
        ("", "\n", []),
    ],
)
def test_a_step_ends_after_its_separator_and_the_last_one_with_the_text(text, separator, ends):
    assert step_ends(text, separator) == ends


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Chat:
    folder = tmp_path_factory.mktemp("tokenizer")
    own = tokenizers.Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    own.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    own.add_special_tokens(["<end>"])
    own.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    config = TokenizerConfig(kind="huggingface", path=str(folder))
    return load_chat("raw", load_tokenizer(config), str(folder))


def read(chat: Chat, path: Path, *lines: dict, **changes) -> Preferences:
    path.write_text("\n".join(map(json.dumps, lines)))
    config = PreferenceDataConfig(format="steps", seq_length=16, **changes)
    return read_preferences([str(path)], config, chat, packed_length=32, length_multiple=1)


def test_labels_stand_at_the_last_tokens_of_steps(chat, tmp_path):
    found = read(
        chat,
        tmp_path / "steps.jsonl",
        {"prompt": "ask", "completions": ["a b", "c", "d"], "labels": [True, None, False]},
        {"messages": [{"role": "user", "content": "ask ask"}], "completions": ["d"], "labels": [0.25]},
    )
    nan = numpy.nan
    assert found.ids_T.tolist() == [2, 3, 4, 5, 6, 1, 2, 2, 6, 1]
    assert found.labels_T is not None
    numpy.testing.assert_array_equal(found.labels_T, [nan, nan, 1, nan, nan, 0, nan, nan, nan, 0.25])
    assert found.is_answer_T.tolist() == [False] + [True] * 5 + [False, False, True, True]
    assert (len(found), found.num_pairs, found.starts_N.tolist()) == (2, 2, [0, 6, 10])


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ({"completions": ["a"], "labels": [True]}, "it has no prompt"),
        ({"prompt": "ask", "labels": [True]}, '"completions" is not there, wanted a list of texts'),
        (
            {"prompt": "ask", "completions": ["a", ""], "labels": [True, True]},
            '"completions" is a list of 2, wanted',
        ),
        (
            {"prompt": "ask", "completions": ["a", "b"], "labels": [True]},
            '"labels" is a list of 1, wanted 2 labels',
        ),
        (
            {"prompt": "ask", "completions": ["a"], "labels": [1.5]},
            '"labels" is a list of 1, wanted 1 labels: true, false, null or a number',
        ),
        ({"prompt": "ask", "completions": ["a"], "labels": [None]}, '"labels" has no label'),
        (
            {"prompt": "ask", "completions": ["a", " ", "b"], "labels": [1, 1, 1]},
            "step 2 ends in the same token as step 1",
        ),
        ({"prompt": "ask", "chosen": "a", "rejected": "b"}, '"completions" is not there'),
    ],
)
def test_a_line_without_steps_is_named_with_its_reason(chat, tmp_path, line, reason):
    good = {"prompt": "ask", "completions": ["a"], "labels": [True]}
    with pytest.raises(DataError) as caught:
        read(chat, tmp_path / "steps.jsonl", good, line)
    assert f"steps.jsonl:2: {reason}" in str(caught.value)


CORPUS = [
    "one. two. three step four é five",
    "la suite é. élan. 🙂 fin",
    "步骤一。步骤二。 x = 1\n\ny = 2",
] * 40
SEPARATORS = ("\n", "\n\n", ". ", " ", " step ", "é", "。", "🙂")


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of bytes with merges, as most models have."""
    own = tokenizers.Tokenizer(models.BPE())
    own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    own.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    own.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet))
    own.add_special_tokens(["<end>"])
    folder = tmp_path_factory.mktemp("bytes")
    own.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    return folder


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sentencepiece model, with bytes for characters that it does not know."""
    path = tmp_path_factory.mktemp("pieces")
    (path / "text").write_text("\n".join(CORPUS))
    sentencepiece.SentencePieceTrainer.train(
        input=str(path / "text"),
        model_prefix=str(path / "model"),
        vocab_size=340,
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return path / "model.model"


def tokens_by_bytes(tokenizer: Tokenizer, ids: list[int], before: str) -> int:
    """The first token at which the tokens have all bytes of `before`, by the bytes that each has."""
    wanted, total = len(before.encode()), 0
    for index, token in enumerate(ids):
        if hasattr(tokenizer, "_processor"):
            piece = tokenizer._processor.id_to_piece(token)
            is_byte = tokenizer._processor.is_byte(token)
            # The first blank is put in front of a text, and is no part of it.
            total += (
                1 if is_byte else len(piece.replace("▁", " ").encode()) - (index == 0 and piece[0] == "▁")
            )
        else:
            total += len(tokenizer._tokenizer.id_to_token(token))
        if total >= wanted:
            return index
    return len(ids) - 1


TEXTS = st.lists(
    st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="▁"), max_size=6), max_size=6
)


@pytest.mark.parametrize("kind", ["huggingface", "sentencepiece"])
@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(parts=TEXTS, separator=st.sampled_from(SEPARATORS))
def test_a_step_is_trained_and_read_at_the_token_that_completes_its_bytes(
    kind: str, parts: list[str], separator: str, byte_level: Path, pieces: Path
) -> None:
    """Of any text: in training by the conversation, in reinforcement learning by the tokens that were sampled."""
    config = TokenizerConfig(kind=kind, path=str(byte_level if kind == "huggingface" else pieces))  # type: ignore[arg-type]
    tokenizer = load_tokenizer(config)
    text = tokenizer.decode(tokenizer.encode(separator.join(["a", *parts])))
    ids, ends = tokenizer.encode(text), step_ends(text, separator)
    assert tokenizer.decode(ids) == text
    wanted = [tokens_by_bytes(tokenizer, ids, text[:end]) for end in ends[:-1]]
    sampled = [*ids, tokenizer.eod_id]
    found = step_tokens(sampled, text, [*ends[:-1], len(text)], tokenizer.decode)
    assert found == [*wanted, len(ids)]
    if len(set(wanted)) == len(wanted) and (not wanted or wanted[-1] < len(ids)):
        chat = load_chat("raw", tokenizer, config.path)
        prompt = Conversation(messages=({"role": "user", "content": "b. c"},))
        answered = read_steps(chat, prompt, text, [*ends[:-1], len(text)])
        first = len(chat.prompt(prompt))
        assert answered.ids_T[first:] == tuple(sampled)
        assert [token - first for token in answered.tokens] == [*wanted, len(ids)]


def test_a_character_of_several_tokens_ends_with_its_last(byte_level: Path) -> None:
    tokenizer = load_tokenizer(TokenizerConfig(kind="huggingface", path=str(byte_level)))
    each = [
        tokenizer._tokenizer.token_to_id(one)
        for one in pre_tokenizers.ByteLevel(False).pre_tokenize_str("🙂🙂🙂 x")[0][0]
    ]
    x = tokenizer.encode(" x")
    ids = [*each, *x]
    assert len(each) == 12 and tokenizer.decode(ids) == "🙂🙂🙂 x"
    assert step_tokens(ids, "🙂🙂🙂 x", [1, 3], tokenizer.decode) == [3, 11]
