"""Steps of answers: where they end in text and tokens, and lines with labels of steps."""

import json
from pathlib import Path

import numpy
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from mcore_rl.config.data import TokenizerConfig
from mcore_rl.config.preferences import PreferenceDataConfig
from mcore_rl.data.chat import Chat, load_chat
from mcore_rl.data.preferences import Preferences, read_preferences
from mcore_rl.data.steps import step_ends
from mcore_rl.data.tokenizer import load_tokenizer
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
