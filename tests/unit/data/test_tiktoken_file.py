"""Ids of a folder with tiktoken.model against those of the class that such models are published with."""

import json
import random
import shutil
from itertools import pairwise

import pytest
import regex

from mcore_rl.config.data import TokenizerConfig
from mcore_rl.data import records
from mcore_rl.data.chat import Conversation, load_chat
from mcore_rl.data.tokenizer import digest_of_folder, load_tokenizer
from mcore_rl.errors import ConfigError, DataError
from tests.tiktoken_folders import PATTERN, SAMPLE, PublishedTokenizer, write_tokenizer

TEXTS = [
    "", " ", "   \n \r\n\t ", SAMPLE, "It's DON'T you'LL \u017f'\u017f x'S we'Re 'tis rock'n'roll",
    "1 12 123 1234 12345678901 \uff13\uff14\uff15 ②Ⅷ½ १२३४", "漢字English漢字 かな交じり カタカナ 々〇〻 𠀀𪚥 ﾊﾝｶｸ ㍿",
    "🙂🙂👩‍👩‍👧‍👦🇩🇪 ✈️ \u0301e\u0301 Ǆ ǅ ʰ ª", "\u00a0\u3000\u2028\u2029\u200b\ufeff x\x00\x1c\x1d\x85y",
    "[BOS]a[EOS] <|im_end|> <|im_user|>user<|im_middle|>x <|tool_call_begin|> <|reserved_token_405|> <|im_end|",
    "[BOS][BOS]<|im_end|><|im_end|>\n", "aaaaaaaaaaaaaaaaaaaaaaaaaaaabaaabaaab" * 3,
]  # fmt: skip
CHAT = [("user", "What is 2 + 2? <|im_end|>漢"), ("assistant", "  4🙂\n"), ("user", ""), ("assistant", "[EOS] it's é")]


@pytest.fixture(scope="module", params=["tokenization_moonshot", "tokenization_kimi"])
def folder(request, tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("tiktoken") / "model", request.param)


def loaded(folder):
    return load_tokenizer(TokenizerConfig(kind="huggingface", path=str(folder)))


def naive_ids(ranks, text):
    """Merge the parts of a text, the pair of the lowest rank and furthest left first."""
    ids = []
    # The library regex has the intersection of sets in its version 1 only, with two more signs.
    for part in regex.findall(PATTERN, text, regex.V1):
        tokens = [bytes([byte]) for byte in part.encode()]
        while pairs := [(ranks[a + b], i) for i, (a, b) in enumerate(pairwise(tokens)) if a + b in ranks]:
            _, at = min(pairs)
            tokens[at : at + 2] = [tokens[at] + tokens[at + 1]]
        ids += [ranks.get(part.encode())] if part.encode() in ranks else [ranks[token] for token in tokens]
    return ids


@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_those_of_the_published_class_and_lose_nothing(folder, text):
    ours, theirs = loaded(folder), PublishedTokenizer(folder)
    assert ours.encode_marked(text) == theirs.encode(text, allow_special_tokens=True)
    assert ours.decode(ours.encode_marked(text)) == text
    assert ours.decode(ours.encode(text)) == text
    if "<|tool" not in text:
        assert ours.encode(text) == theirs.encode(text, allow_special_tokens=False)
        assert ours.encode(text) == naive_ids(theirs.ranks, text)


def test_ids_of_random_texts_are_those_of_the_published_class(folder):
    ours, theirs = loaded(folder), PublishedTokenizer(folder)
    draw = random.Random(7)
    planes = [(0x20, 0x7F), (0xA0, 0x500), (0x900, 0x980), (0x2000, 0x2070), (0x3000, 0x3100), (0x4E00, 0x4F00)]
    for _ in range(300):
        text = "".join(chr(draw.randrange(*draw.choice(planes))) for _ in range(draw.randrange(60)))
        assert ours.encode(text) == theirs.encode(text, allow_special_tokens=False), text


@pytest.mark.matrix("tokenization_moonshot-ab ", "tokenization_kimi- ")
@pytest.mark.parametrize("unit", ["漢字", " ", "ab ", "x" * 24_999 + " ", "y" * 25_001 + "\n"])
def test_texts_of_more_than_400000_characters_are_cut_where_the_published_class_cuts(folder, unit):
    text = (unit * (410_000 // len(unit) + 1))[:410_000]
    expected = PublishedTokenizer(folder).encode(text, allow_special_tokens=True)
    assert loaded(folder).encode_marked(text) == expected


def test_names_ids_and_the_size_are_those_of_the_files(folder):
    ours, theirs = loaded(folder), PublishedTokenizer(folder)
    assert ours.vocab_size == theirs.model.n_vocab == 656
    assert (ours.bos_id, ours.eod_id, ours.eos_id, ours.pad_id) == (400, 401, 402, 655)
    assert ours.special_ids == set(range(400, 656)) - {411}
    assert ours.decode([403, 405, 655, 656, 9999]) == "<|im_user|><|reserved_token_405|>[PAD]"
    # A token that is not special is a token wherever it stands, as in a tokenizer.json.
    assert ours.encode("<|tool_call_begin|>[EOS]")[0] == 411 and 401 not in ours.encode("[EOS]")


def test_a_chat_has_the_ids_of_its_template_and_no_turn_forges_another(folder):
    tokenizer, theirs = loaded(folder), PublishedTokenizer(folder)
    chat = load_chat("tokenizer", tokenizer, str(folder))
    found = chat.encode(Conversation(messages=tuple({"role": role, "content": content} for role, content in CHAT)))

    def plain(text):
        return [(token, False) for token in theirs.encode(text, allow_special_tokens=False)]

    special = theirs.special
    expected = [(special["<|im_system|>"], False), *plain("system"), (special["<|im_middle|>"], False)]
    expected += [*plain("You are a helpful assistant"), (special["<|im_end|>"], False)]
    for role, content in CHAT:
        trained = role == "assistant"
        expected += [(special[f"<|im_{role}|>"], False), *plain(role), (special["<|im_middle|>"], False)]
        expected += [(token, trained) for token, _ in plain(content)]
        expected += [(special["<|im_end|>"], trained)]
    assert list(zip(found.ids_T, found.assistant_mask_T, strict=True)) == expected
    assert chat.turn_end_ids == (special["<|im_end|>"],)


def test_the_digest_changes_with_ranks_and_with_names(folder, tmp_path):
    other, named = (shutil.copytree(folder, tmp_path / name) for name in ("other", "named"))
    write_tokenizer(other, "tokenization_kimi", num_tokens=390)
    settings = json.loads((named / "tokenizer_config.json").read_text())
    settings["added_tokens_decoder"]["405"] = {"content": "<|new|>", "special": True}
    (named / "tokenizer_config.json").write_text(json.dumps(settings))
    digests = {loaded(path).digest for path in (folder, other, named)}
    assert len(digests) == 3 and {digest_of_folder(path) for path in (folder, other, named)} == digests


def test_a_tokenizer_json_beside_it_goes_first(folder, tmp_path):
    both = shutil.copytree(folder, tmp_path / "both")
    (both / "tokenizer.json").write_text("{")
    with pytest.raises(DataError, match=r"tokenizer\.json \(1 bytes\) is not a tokenizer"):
        loaded(both)


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("tiktoken.model", lambda text: text[:-20], "is cut or damaged|no file of tokens"),
        ("tiktoken.model", lambda text: "\n".join(text.splitlines()[:300:2]), "is cut or damaged"),
        ("tiktoken.model", lambda text: "", "is cut or damaged"),
        ("tiktoken.model", lambda text: "version https://git-lfs.github.com/spec/v1\n", "no file of tokens and ranks"),
        ("tokenizer_config.json", lambda text: "{", "is not JSON"),
        ("tokenizer_config.json", lambda text: "[]", "is no JSON object"),
        ("tokenizer_config.json", lambda text: text.replace("tokenization_", "other_"), "names other_.*is not known"),
        ("tokenizer_config.json", lambda text: text.replace('"content"', '"text"'), "no table of tokens by id"),
        ("tokenizer_config.json", lambda text: text.replace("[EOS]", "[E]").replace("|im_e", "|e").replace(
            '"eos_token": "<|end|>"', '"eos_token": "none"'), "names no end-of-document token"),
    ],
)  # fmt: skip
def test_files_that_are_damaged_or_of_another_class_are_refused(folder, tmp_path, file, change, message):
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / file).write_text(change((copy / file).read_text()))
    with pytest.raises(DataError, match=message):
        loaded(copy)


def test_code_with_another_pattern_and_an_absent_tokenizer_config_are_refused(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    (code,) = copy.glob("*.py")
    code.write_text(code.read_text().replace(r"\p{N}{1,3}", r"\p{N}"))
    with pytest.raises(DataError, match="cuts a text by another pattern"):
        loaded(copy)
    code.unlink()
    assert loaded(copy).vocab_size == 656
    (copy / "tokenizer_config.json").unlink()
    with pytest.raises(DataError, match=r"no tokenizer_config\.json, which names its special tokens"):
        loaded(copy)


def test_without_the_library_the_extra_is_named(folder, monkeypatch):
    def absent(module):
        raise ImportError(module)

    monkeypatch.setattr(records.importlib, "import_module", absent)
    with pytest.raises(ConfigError, match=r"read with the package tiktoken.*pip install 'mcore-rl\[tiktoken\]'"):
        loaded(folder)
