import json
import re
from hashlib import sha256
from pathlib import Path

import pytest
import sentencepiece
import tokenizers
import transformers

from mcore_rl.config.data import TokenizerConfig
from mcore_rl.data.tokenizer import load_tokenizer
from mcore_rl.errors import DataError

TEXTS = [
    "the quick brown fox", "  two  spaces \n\n\tand a tab ", "12345 6", "é 漢字 😀 \x00 \r\n \u2028",
    "<s> </s> <pad> <unk> are words here", "",
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A byte-level BPE tokenizer as transformers saves one."""
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<end>", "<begin>", "<fill>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    inner.train_from_iterator(TEXTS * 3, trainer)
    path = tmp_path_factory.mktemp("hf")
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<end>", bos_token="<begin>", pad_token="<fill>"
    ).save_pretrained(path)
    return path


def huggingface(folder):
    return load_tokenizer(TokenizerConfig(kind="huggingface", path=str(folder)))


@pytest.mark.parametrize("text", TEXTS)
def test_sentencepiece_ids_are_those_of_its_own_library_and_lose_nothing(tokenizer, text):
    ours, theirs = load_tokenizer(tokenizer), sentencepiece.SentencePieceProcessor(model_file=tokenizer.path)
    assert ours.encode(text) == theirs.encode(text)
    assert ours.decode(ours.encode(text)) == text


def test_facts_are_those_of_the_libraries(tokenizer, folder):
    pieces, ours = load_tokenizer(tokenizer), huggingface(folder)
    assert (pieces.vocab_size, pieces.bos_id, pieces.eod_id, pieces.pad_id) == (400, 1, 2, 3)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert ours.vocab_size == len(theirs)
    assert (ours.eod_id, ours.bos_id, ours.pad_id) == (theirs.eos_token_id, theirs.bos_token_id, theirs.pad_token_id)


@pytest.mark.parametrize("text", TEXTS)
def test_huggingface_ids_are_those_of_transformers(folder, text):
    ours, theirs = huggingface(folder), transformers.AutoTokenizer.from_pretrained(folder)
    assert ours.encode(text) == theirs.encode(text, add_special_tokens=False)
    assert ours.decode(ours.encode(text)) == text


def test_a_document_that_names_the_end_token_does_not_end_there(folder):
    ours = huggingface(folder)
    assert ours.eod_id not in ours.encode("a <end> b")
    assert ours.decode(ours.encode("a <end> b")) == "a <end> b"


def test_the_digest_is_that_of_the_file_that_decides_the_ids(tokenizer, folder):
    assert load_tokenizer(tokenizer).digest == sha256(Path(tokenizer.path).read_bytes()).hexdigest()
    assert huggingface(folder).digest == sha256((folder / "tokenizer.json").read_bytes()).hexdigest()


def with_files(folder, tmp_path, **files):
    """A copy of the tokenizer with other contents of its JSON files."""
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    return tmp_path


@pytest.mark.parametrize("limit", ["truncation", "padding"])
def test_limits_of_an_earlier_use_cut_and_fill_no_text(folder, tmp_path, limit):
    path = with_files(folder, tmp_path)
    inner = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    inner.enable_truncation(3) if limit == "truncation" else inner.enable_padding(length=40, pad_id=2)
    inner.save(str(path / "tokenizer.json"))
    ours, theirs = huggingface(path), transformers.AutoTokenizer.from_pretrained(path)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False)
        assert ours.encode_marked(text + "<end>") == theirs.encode(text + "<end>", add_special_tokens=False)
    assert ours.decode(ours.encode(TEXTS[0])) == TEXTS[0]


@pytest.mark.parametrize("lists_added", [False, True])
def test_where_two_files_name_a_token_the_file_that_counts_for_transformers_counts(folder, tmp_path, lists_added):
    added = {"0": {"content": "<end>", "special": True}} if lists_added else None
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}
    path = with_files(
        folder,
        tmp_path,
        tokenizer_config=config | ({"added_tokens_decoder": added} if added else {}),
        special_tokens_map={"eos_token": "<fill>", "bos_token": {"content": "<begin>"}},
    )
    theirs = transformers.AutoTokenizer.from_pretrained(path)
    assert huggingface(path).eos_id == theirs.eos_token_id == (0 if lists_added else 2)


def further(content, index):
    return {"added_tokens_decoder": {str(index): {"content": content, "special": True}}}


@pytest.mark.parametrize(
    ("files", "token"),
    [
        ({"tokenizer_config": {"eos_token": "<end>"} | further("<|im_end|>", 400)}, "<|im_end|>"),
        ({"tokenizer_config": {"eos_token": "<end>"} | further("<begin>", 400)}, "<begin>"),
        ({"tokenizer_config": {"eos_token": "<end>"}, "added_tokens": {"<|im_end|>": 400}}, "<|im_end|>"),
        ({"tokenizer_config": {"eos_token": "<|im_end|>"}}, "<|im_end|>"),
        ({"tokenizer_config": {"eos_token": "<end>", "bos_token": "<s>"}}, "<s>"),
    ],
)
def test_tokens_that_only_transformers_would_add_are_refused(folder, tmp_path, files, token):
    with pytest.raises(DataError, match=rf"does not have '{re.escape(token)}' as .*save_pretrained"):
        huggingface(with_files(folder, tmp_path, **files))
    same = {"<end>": 0, "<begin>": 1, "<fill>": 2}  # listed twice
    path = with_files(folder, tmp_path, tokenizer_config={"eos_token": "<end>"}, added_tokens=same)
    assert huggingface(path).eod_id == 0


def write_bytes(folder, content):
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_bytes(content)


@pytest.mark.parametrize(
    ("kind", "make", "message"),
    [
        ("sentencepiece", lambda path: None, "does not exist"),
        ("sentencepiece", lambda path: path.mkdir(), "is a folder"),
        ("sentencepiece", lambda path: path.write_bytes(b""), "0 bytes"),
        ("sentencepiece", lambda path: path.write_text("not a model"), "is not a sentencepiece model"),
        ("huggingface", lambda path: None, "does not exist"),
        ("huggingface", lambda path: path.mkdir(), "holds no tokenizer.json"),
        ("huggingface", lambda path: path.write_text("x"), "holds no tokenizer.json"),
        ("none", lambda path: None, "needs a tokenizer"),
        *(
            ("huggingface", lambda path, content=content: write_bytes(path, content), "is not a tokenizer")
            for content in (b"", b"{", b'{"version": "1.0"}', b"\xff\xfe")
        ),
    ],
)
def test_files_that_are_no_tokenizer_are_refused_with_a_remedy(tmp_path, kind, make, message):
    path = tmp_path / "tokenizer"
    make(path)
    with pytest.raises(DataError, match=message):
        load_tokenizer(TokenizerConfig(kind=kind, path=str(path)))


@pytest.mark.parametrize(
    ("config", "message"),
    [([], r"tokenizer_config\.json is no JSON object"), ({"bos_token": "<begin>"}, "names no end-of-document token")],
)
def test_a_tokenizer_config_without_an_end_of_document_is_refused(folder, tmp_path, config, message):
    write_bytes(tmp_path, (folder / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match=message):
        huggingface(tmp_path)
