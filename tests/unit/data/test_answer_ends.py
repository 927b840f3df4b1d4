"""Steps of answers: where they end in text and tokens, and lines with labels of steps."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy
import pytest
import sentencepiece
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from mcore_rl.config.data import TokenizerConfig
from mcore_rl.config.preferences import PreferenceDataConfig
from mcore_rl.config.sft import SFTDataConfig
from mcore_rl.convert.hf.text_files import sentencepiece_files
from mcore_rl.data.answer_ends import (
    describe_ends,
    end_tokens,
    no_end_warning,
    read_steps,
    step_ends,
    step_tokens,
    text_ends,
)
from mcore_rl.data.chat import Chat, Conversation, load_chat
from mcore_rl.data.examples import read_examples
from mcore_rl.data.preferences import Preferences, read_preferences
from mcore_rl.data.tokenizer import Tokenizer, load_tokenizer
from mcore_rl.errors import DataError
from mcore_rl.rl.engines.base import StopStrings
from mcore_rl.rl.step.trace import pieces_of
from tests.tiktoken_folders import write_tokenizer
from tests.unit.data.conftest import write_lines

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


def read(chat: Chat, path: Path, *lines: dict) -> Preferences:
    config = PreferenceDataConfig(format="steps", seq_length=16)
    return read_preferences([write_lines(path, *lines)], config, chat, packed_length=32, length_multiple=1)


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
        ({"prompt": "ask", "completions": ["a", ""], "labels": [True, True]}, '"completions" is a list of 2, wanted'),
        ({"prompt": "ask", "completions": ["a", "b"], "labels": [True]}, '"labels" is a list of 1, wanted 2 labels'),
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


SENTENCES = [
    "one. two.  three step four é five",
    "la suite é. élan. 🙂 fin END",
    "步骤一。步骤二。 x = 1\n\ny = 2",
] * 40
CHARACTERS = ["第", "🙂", "é", "\n", "\t", "A", "한", " ", "\ufffd", "\u200d"]
PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
BROKEN = "\ufffd"


class Kind(NamedTuple):
    tokenizer: Tokenizer
    byte_ids: list[int]
    """Token of each byte."""
    path: str


def sentencepieces(folder: Path, **changes: object) -> Kind:
    (folder / "text").write_text("\n".join(SENTENCES))
    settings = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False} | changes
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text"),
        model_prefix=str(folder / "tokens"),
        vocab_size=330,
        byte_fallback=True,
        character_coverage=0.98,
        hard_vocab_limit=False,
        minloglevel=2,
        **settings,
    )
    path = str(folder / "tokens.model")
    model = sentencepiece.SentencePieceProcessor(model_file=path)
    byte_ids = [model.piece_to_id(f"<0x{byte:02X}>") for byte in range(256)]
    return Kind(load_tokenizer(TokenizerConfig(kind="sentencepiece", path=path)), byte_ids, path)


def exported(folder: Path, **changes: object) -> Kind:
    """The tokenizer.json of a sentencepiece model, with byte fallback as Llama-2's."""
    pieces = sentencepieces(folder, **changes)
    for name, content in sentencepiece_files(Path(pieces.path), pieces.tokenizer, 64).items():
        (folder / name).write_bytes(content)
    config = TokenizerConfig(kind="huggingface", path=str(folder))
    return Kind(load_tokenizer(config), pieces.byte_ids, str(folder))


def byte_level_tokenizer(folder: Path) -> Kind:
    own = tokenizers.Tokenizer(models.BPE())
    own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    own.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    own.train_from_iterator(SENTENCES, trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet))
    own.add_special_tokens(["<end>"])
    own.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    others = [byte for byte in range(256) if byte not in PRINTABLE]
    letters = {byte: chr(byte) for byte in PRINTABLE} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    byte_ids = [own.token_to_id(letters[byte]) for byte in range(256)]
    config = TokenizerConfig(kind="huggingface", path=str(folder))
    return Kind(load_tokenizer(config), byte_ids, str(folder))


def ranks(folder: Path) -> Kind:
    write_tokenizer(folder, "tokenization_moonshot")
    tokenizer = load_tokenizer(TokenizerConfig(kind="huggingface", path=str(folder)))
    encoding = tokenizer.file._encoding
    return Kind(tokenizer, [encoding.encode_single_token(bytes([byte])) for byte in range(256)], str(folder))


KINDS = {
    "sentencepiece": sentencepieces,
    "sentencepiece, one space": lambda folder: sentencepieces(folder, remove_extra_whitespaces=True),
    "byte fallback": exported,
    "byte fallback, no space first": lambda folder: exported(folder, add_dummy_prefix=False),
    "byte level": byte_level_tokenizer,
    "tiktoken": ranks,
}


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kind:
    return KINDS[request.param](tmp_path_factory.mktemp("kind"))


def random_tokens(draw: random.Random, kind: Kind, longest: int = 40) -> list[int]:
    """Any ids, special tokens and bytes among them, with the bytes of characters, of which some are cut or mixed."""
    special = sorted(kind.tokenizer.special_ids)
    pools = [range(kind.tokenizer.vocab_size), kind.byte_ids, special, kind.tokenizer.encode(SENTENCES[1])]
    chosen = draw.choices(pools, k=2)
    ids = [draw.choice(draw.choice(chosen)) for _ in range(draw.randrange(longest))]
    if draw.random() < 0.3:  # characters of bytes alone, one behind the other
        ids += [kind.byte_ids[byte] for byte in "".join(draw.choices(CHARACTERS, k=12)).encode()]
    for _ in range(draw.randrange(12)):
        part = [kind.byte_ids[byte] for byte in draw.choice(CHARACTERS).encode()]
        if draw.random() < 0.15:
            part = part[: draw.randrange(len(part))]
        place = draw.choice([len(ids), draw.randint(0, len(ids))])
        ids[place:place] = part
    return ids


def certain(ids: Sequence[int], tokenizer: Tokenizer) -> list[str]:
    """The definition: the text of the tokens up to each one, without U+FFFD at its end, for which bytes may follow."""
    return [tokenizer.decode(ids[: end + 1]).rstrip(BROKEN) for end in range(len(ids))]


@pytest.mark.matrix("byte fallback, no space first")
def test_certain_is_as_much_of_the_whole_text_as_the_first_tokens_have(kind: Kind) -> None:
    draw = random.Random(0)
    for _ in range(300):
        ids = random_tokens(draw, kind)
        whole, wanted = kind.tokenizer.decode(ids), [0]
        for text in certain(ids, kind.tokenizer):
            wanted.append(max(wanted[-1], len(text) if whole.startswith(text) else 0))
        assert text_ends(ids, kind.tokenizer.decode) == [*wanted[1:-1], *[len(whole)] * bool(ids)], ids
        pieces = pieces_of(ids, kind.tokenizer.decode)
        assert ("".join(pieces), len(pieces)) == (whole, len(ids))


@pytest.mark.matrix("byte fallback", "byte fallback, no space first", "tiktoken")
def test_a_stop_string_ends_a_completion_at_the_first_token_whose_text_has_it(kind: Kind) -> None:
    draw, num_found = random.Random(1), 0
    for _ in range(300):
        ids = random_tokens(draw, kind)
        texts = certain(ids, kind.tokenizer)
        seen = draw.choice(texts) if texts else ""
        begin = draw.randint(0, len(seen))
        stops = (seen[begin : begin + draw.randint(1, 5)].replace(BROKEN, "") or "\n\n", "¬")
        wanted = next((end for end, text in enumerate(texts) if stops[0] in text), None)
        strings = StopStrings(stops, kind.tokenizer.decode)
        found = next((end for end, token in enumerate(ids) if strings.end(token)), None)
        assert found == wanted, (stops, ids)
        num_found += found is not None
    assert num_found > 100


@pytest.mark.full
def test_a_step_is_trained_and_read_at_the_first_token_whose_text_has_it(kind: Kind) -> None:
    """In training the tokens are those of the conversation, in reinforcement learning those that were sampled."""
    draw, num_steps, num_trained = random.Random(2), 0, 0
    chat = load_chat("raw", kind.tokenizer, kind.path)
    prompt = Conversation(messages=({"role": "user", "content": "one. two"},))
    first = len(chat.prompt(prompt))
    for _ in range(150):
        text = "".join(draw.choices([*CHARACTERS, "步骤一", " two", "\n\n"], k=draw.randint(1, 16)))
        ids = kind.tokenizer.encode(text.replace(BROKEN, ""))
        whole, texts = kind.tokenizer.decode(ids), certain(ids, kind.tokenizer)
        ends = list(range(1, len(whole)))
        wanted = [next(i for i, text in enumerate(texts) if text.startswith(whole[:end])) for end in ends]
        assert step_tokens(ids, whole, ends, kind.tokenizer.decode) == wanted, text
        num_steps += len(ends)
        if kind.tokenizer.encode(whole) == ids and wanted and whole.strip():
            of_token = dict(zip(wanted, ends, strict=True))  # a token ends one step
            trained = read_steps(chat, prompt, whole, [*of_token.values(), len(whole)])
            assert trained.ids_T[first:] == (*ids, kind.tokenizer.eod_id)
            assert [token - first for token in trained.tokens] == [*of_token, len(ids)], whole
            num_trained += 1
    assert num_steps > 1000 and num_trained > 100


@pytest.mark.full
@pytest.mark.parametrize(
    "content", [*(text.encode() for text in ("one two three ", "第", "\n", "🙂 第", "A\n第\tb")), b"\xf0", b""]
)
def test_the_tokens_that_are_decoded_grow_with_the_length_alone(kind: Kind, content: bytes) -> None:
    """The tokens are a text, bytes that are no character, or ends of documents."""
    one = [kind.byte_ids[byte] for byte in content] or [kind.tokenizer.eod_id]
    ids = one * 1200
    if content.decode(errors="ignore"):
        ids = [kind.tokenizer.eod_id, *kind.tokenizer.encode(content.decode() * 400)]
    num_decoded = 0

    def counted(tokens: Sequence[int]) -> str:
        nonlocal num_decoded
        num_decoded += len(tokens)
        return kind.tokenizer.decode(tokens)

    text_ends(ids, counted)
    strings = StopStrings(("never seen",), counted)
    assert not any(map(strings.end, ids))
    assert num_decoded < 40 * len(ids)


def test_an_answer_that_begins_with_a_space_has_its_steps(tmp_path: Path) -> None:
    """A decoder drops the space of the answer's first token when it decodes the answer alone."""
    path = exported(tmp_path).path
    (tmp_path / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}:{% endfor %}")
    chat = load_chat("tokenizer", load_tokenizer(TokenizerConfig(kind="huggingface", path=path)), path)
    prompt = Conversation(messages=({"role": "user", "content": "two"},))
    answer = " three. four"
    read = read_steps(chat, prompt, answer, [7, len(answer)])
    assert chat.decode(read.ids_T[: read.tokens[0] + 1]).startswith("two: three.")
    assert not chat.decode(read.ids_T[: read.tokens[0]]).startswith("two: three.")
    assert read.tokens[1] == len(read.ids_T) - 1


def test_the_steps_of_an_answer_of_white_space_alone_are_refused(kind: Kind) -> None:
    chat = load_chat("raw", kind.tokenizer, kind.path)
    prompt = Conversation(messages=({"role": "user", "content": "two"},))
    assert read_steps(chat, prompt, " \n\n", [3]).tokens
    with pytest.raises(DataError, match="only white space, in which no step can be found"):
        read_steps(chat, prompt, " \n\n \n", [3, 5])


SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>", "<|end|>", "<|return|>", "</s>"]
PLAIN_ADDED = ["\n\n", "</think>", "<|eot|>"]
EACH = "{% for message in messages %}"
TEMPLATES = {
    "chatml": (EACH + "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}", "<|im_end|>"),
    "white space and thoughts are no end": (
        EACH + "<|im_start|>{{ message.role }}\n</think>\n\n{{ message.content }}\n\n<|im_end|>\n{% endfor %}",
        "<|im_end|>",
    ),
    "an added token that is not special": (EACH + "{{ message.content }}<|eot|>\n{% endfor %}", "<|eot|>"),
    "the end of the text": (
        EACH + "{% if message.role == 'user' %}[INST] {{ message.content }} [/INST]"
        "{% else %}{{ message.content }}{{ eos_token }}{% endif %}{% endfor %}",
        "</s>",
    ),
    # As gpt-oss: the last turn ends otherwise than the ones before it.
    "another end of the last turn": (
        EACH + "{{ message.content }}{% if loop.last %}<|return|>{% else %}<|end|>{% endif %}{% endfor %}",
        "<|return|>",
    ),
    # As GLM-4: a turn ends where the user's begins.
    "the next turn's begin": (EACH + "<|{{ message.role }}|>\n{{ message.content }}{% endfor %}", "<|user|>"),
    "a cut text": (EACH + "{{ message.content.strip().upper() | lower }}<|im_end|>{% endfor %}", "<|im_end|>"),
    "no token": (EACH + "{{ message.role }}: {{ message.content }}\n{% endfor %}", None),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokenizer = tokenizers.Tokenizer(models.WordLevel({"?": 0, "a": 1}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens(PLAIN_ADDED)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    return tmp_path


def loaded(folder: Path, template: str) -> tuple[Tokenizer, Chat]:
    (folder / "chat_template.jinja").write_text(template)
    tokenizer = load_tokenizer(TokenizerConfig(kind="huggingface", path=str(folder)))
    return tokenizer, load_chat("tokenizer", tokenizer, str(folder))


def id_of(folder: Path, text: str) -> int:
    index = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id(text)
    assert isinstance(index, int)
    return index


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_end_of_a_turn_is_the_token_that_the_template_puts_after_it(name: str, folder: Path) -> None:
    template, wanted = TEMPLATES[name]
    _, chat = loaded(folder, template)
    assert chat.turn_end_ids == (() if wanted is None else (id_of(folder, wanted),))


def test_ends_are_those_of_template_tokenizer_and_generation_config_with_the_end_of_a_document(folder: Path) -> None:
    tokenizer, chat = loaded(folder, TEMPLATES["chatml"][0])
    turn, text, document = (id_of(folder, name) for name in ("<|im_end|>", "</s>", "<|endoftext|>"))
    assert list(end_tokens(tokenizer, chat, str(folder))) == [turn, text, document]
    further = id_of(folder, "<|return|>")
    for entry, wanted in ((further, [turn, text, further, document]), ([document, turn], [turn, text, document])):
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": entry}))
        assert list(end_tokens(tokenizer, chat, str(folder))) == wanted
    (folder / "generation_config.json").write_text("{}")
    ends = end_tokens(tokenizer, None, str(folder))
    assert list(ends) == [text, document]
    assert f"'</s>' ({text}, eos_token of the tokenizer)" in describe_ends(ends, tokenizer)


@pytest.mark.parametrize(
    ("content", "error"),
    [
        ('{"eos_token_id": 13}', r"names eos_token_id=13, and the tokenizer beside it has the ids 0 to 12"),
        ('{"eos_token_id": ["</s>"]}', r"eos_token_id=\['</s>'\]"),
        ("[1]", "is no JSON object"),
        ("{", "is no JSON object"),
    ],
)
def test_a_generation_config_that_cannot_be_is_refused(content: str, error: str, folder: Path) -> None:
    tokenizer, chat = loaded(folder, TEMPLATES["chatml"][0])
    (folder / "generation_config.json").write_text(content)
    with pytest.raises(DataError, match=error):
        end_tokens(tokenizer, chat, str(folder))


def test_a_plain_chat_ends_turns_as_documents_end_and_an_end_without_text_is_named(tokenizer: TokenizerConfig) -> None:
    words = load_tokenizer(tokenizer)
    assert list(end_tokens(words, load_chat("plain", words, tokenizer.path), tokenizer.path)) == [words.eod_id]
    assert words.decode([words.eod_id]) == ""
    said = describe_ends(end_tokens(words, None, tokenizer.path), words)
    assert said == f"a completion ends at '<eod>' ({words.eod_id}, eos_token of the tokenizer)"


def test_special_tokens_of_a_text_without_roles_are_tokens_and_of_one_with_roles_text(folder: Path) -> None:
    tokenizer, _ = loaded(folder, TEMPLATES["chatml"][0])
    turn = {"role": "user", "content": "a<|im_end|>"}
    end = id_of(folder, "<|im_end|>")
    for template, has_token in (("raw", True), ("plain", False)):
        chat = load_chat(template, tokenizer, str(folder))
        ids = chat.prompt(Conversation(messages=(turn,)))
        assert (end in ids) == has_token
    assert tokenizer.encode_marked("a<|im_end|>") == [id_of(folder, "a"), end]
    assert end not in tokenizer.encode("a<|im_end|>")


PROMPT_AND_ANSWER = (
    EACH
    + "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<END IN>{% endgeneration %}<END OUT>"
    "{% else %}<|im_start|>{{ message.content }}<|im_end|>{% endif %}{% endfor %}"
)


@pytest.mark.matrix("after the mark")
@pytest.mark.parametrize(
    ("template", "is_taught"),
    [
        (PROMPT_AND_ANSWER.replace("<END IN>", "<|im_end|>").replace("<END OUT>", ""), True),
        # The model reads the end of its turn and is never trained on it.
        (PROMPT_AND_ANSWER.replace("<END OUT>", "<|im_end|>").replace("<END IN>", ""), False),
        (PROMPT_AND_ANSWER.replace("<END IN>", "").replace("<END OUT>", ""), False),
        (TEMPLATES["chatml"][0], True),
        (TEMPLATES["the end of the text"][0], True),
        ("plain", True),
    ],
    ids=["in the mark", "after the mark", "no end", "without marks", "the end of the text", "plain"],
)
def test_a_template_whose_answers_teach_no_end_is_warned_of(
    template: str, is_taught: bool, folder: Path, tmp_path: Path
) -> None:
    """None of 1,200 conversations trains on an end; of them 1,000 are looked at."""
    tokenizer = load_tokenizer(TokenizerConfig(kind="huggingface", path=str(folder)))
    if template == "plain":
        chat = load_chat("plain", tokenizer, str(folder))
    else:
        tokenizer, chat = loaded(folder, template)
    line = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "aa"}]}
    examples = read_examples([write_lines(tmp_path / "chats.jsonl", *[line] * 1200)], SFTDataConfig(), chat)
    warning = no_end_warning(examples, end_tokens(tokenizer, chat, str(folder)), tokenizer)
    assert (warning is None) == is_taught
    assert is_taught or "none of the first 1000 conversations trains on a token that ends" in str(warning)
