import json

import pytest

from mcore_rl.config.sft import SFTDataConfig
from mcore_rl.data.chat import load_chat
from mcore_rl.data.examples import read_examples
from mcore_rl.data.tokenizer import load_tokenizer
from mcore_rl.errors import DataError

CHAT = {"messages": [{"role": "user", "content": "etao"}, {"role": "assistant", "content": "in"}]}
PAIR = {"prompt": "etao", "response": "in"}


@pytest.fixture
def read(tmp_path, tokenizer):
    def read_lines(*lines, **settings):
        path = tmp_path / "chats.jsonl"
        content = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
        path.write_bytes(b"".join(line + b"\n" for line in content))
        config = SFTDataConfig(**settings)
        return read_examples(
            [str(path)], config, load_chat("plain", load_tokenizer(tokenizer), tokenizer.path)
        )

    return read_lines


def test_both_formats_say_the_same(read, tokenizer):
    examples = read(CHAT, PAIR, b"")
    assert len(examples) == 2
    first, second = (
        examples.ids_T[begin:end].tolist()
        for begin, end in ((0, examples.starts_N[1]), examples.starts_N[1:])
    )
    assert first == second
    said = examples.ids_T[: examples.starts_N[1]][examples.assistant_mask_T[: examples.starts_N[1]]].tolist()
    words = load_tokenizer(tokenizer)
    assert said == [*words.encode("in"), words.eod_id]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"{", "not JSON"),
        (b"\xff", "not JSON"),
        (b'{"prompt": "a", "response": "\\ud800"}', "a lone surrogate, which is not text"),
        (b"[]", "a JSON list, wanted an object"),
        ({"text": "a"}, '"text" without turns (keys: text)'),
        ({"messages": "a"}, '"messages" is a str'),
        ({"messages": [{"content": "a"}]}, 'turn 1 of "messages" is no object with a "role"'),
        ({"messages": CHAT["messages"][:1]}, 'no turn has the role "assistant"'),
        ({"messages": [{"role": "assistant", "content": None}]}, "it has no content and calls no tool"),
        ({"prompt": "a"}, '"response" is not there'),
        ({"prompt": "a", "response": 4}, '"response" is a int'),
        (CHAT | {"tools": [{"name": "look"}]}, '"tools", which a plain template cannot describe'),
    ],
)
def test_a_line_that_is_no_conversation_is_named(read, tmp_path, line, said):
    with pytest.raises(DataError) as raised:
        read(CHAT, line)
    assert f"{tmp_path}/chats.jsonl:2: " in str(raised.value) and said in str(raised.value)


SYSTEM = {"role": "system", "content": "etao"}


@pytest.mark.parametrize(
    ("line", "template", "is_warned"),
    [
        (CHAT, "raw", False),
        ({"messages": [SYSTEM, *CHAT["messages"]]}, "raw", True),
        ({"messages": [*CHAT["messages"], *CHAT["messages"]]}, "raw", True),
        ({"messages": [SYSTEM, *CHAT["messages"], *CHAT["messages"]]}, "plain", False),
    ],
)
def test_raw_warns_once_of_turns_that_it_joins(read, line, template, is_warned):
    notes = read(line, line, chat_template=template).notes
    assert sum("end to end" in note for note in notes) == is_warned


def test_all_bad_lines_are_counted(read):
    with pytest.raises(DataError, match="and 3 more like these"):
        read(*[{"text": "a"}] * 8)


def test_a_format_that_was_asked_for_is_not_guessed(read):
    with pytest.raises(DataError, match='"prompt" is not there'):
        read(CHAT, format="prompt_response")


def test_an_empty_and_a_missing_file_are_refused(read, tokenizer):
    with pytest.raises(DataError, match="is empty"):
        read()
    with pytest.raises(DataError, match=r"absent\.jsonl cannot be read: No such file"):
        chat = load_chat("plain", load_tokenizer(tokenizer), tokenizer.path)
        read_examples(["absent.jsonl"], SFTDataConfig(), chat)


def test_what_no_row_holds_is_refused_or_counted(read):
    long = {"prompt": "etao " * 200, "response": "in"}
    with pytest.raises(
        DataError, match=r'jsonl:2: \d+ tokens, and data.seq_length=64. Raise it, or set data.too_long="skip"'
    ):
        read(PAIR, long, seq_length=64)
    examples = read(PAIR, long, seq_length=64, too_long="skip")
    assert (len(examples), examples.num_skipped) == (1, 1)
    with pytest.raises(DataError, match="all 1 conversations are longer"):
        read(long, seq_length=64, too_long="skip")


def test_a_conversation_that_just_fits_is_kept(read):
    positions = int(read(PAIR).lengths_N[0])
    assert len(read(PAIR, seq_length=positions)) == 1
    with pytest.raises(DataError, match="Raise it"):
        read(PAIR, seq_length=positions - 1)
