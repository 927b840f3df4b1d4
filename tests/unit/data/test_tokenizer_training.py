import re
from dataclasses import replace

import pytest
import sentencepiece

from mcore_rl.data.documents import DocumentFormat
from mcore_rl.data.tokenizer_training import TokenizerTraining, train_tokenizer
from mcore_rl.errors import DataError
from tests.unit.data.conftest import JSONL, made_up_documents, write_jsonl


@pytest.fixture
def training(tmp_path):
    inputs = write_jsonl(tmp_path / "text.jsonl", made_up_documents(8, words=60))
    return TokenizerTraining(inputs=(inputs,), output=tmp_path / "t.model", document_format=JSONL, vocab_size=330)


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_every_byte_digits_one_by_one_and_the_special_ids(training, model_type):
    train_tokenizer(replace(training, model_type=model_type, vocab_size=300))
    model = sentencepiece.SentencePieceProcessor(model_file=str(training.output))
    assert model.vocab_size() == 300
    assert (model.unk_id(), model.bos_id(), model.eos_id(), model.pad_id()) == (0, 1, 2, 3)
    assert [model.id_to_piece(4 + byte) for byte in range(256)] == [f"<0x{byte:02X}>" for byte in range(256)]
    text = "漢 never seen: \U0001f680 \x7f   "
    assert model.decode(model.encode(text)) == text


def test_no_piece_holds_two_digits_however_often_a_number_occurs(training, tmp_path):
    numbers = write_jsonl(tmp_path / "numbers.jsonl", ["2024 2025 x2024 " * 50] * 20)
    train_tokenizer(replace(training, inputs=(*training.inputs, numbers)))
    model = sentencepiece.SentencePieceProcessor(model_file=str(training.output))
    pieces = [model.id_to_piece(i) for i in range(model.vocab_size()) if not model.is_byte(i)]
    assert {"2", "0", "4"} <= {piece for piece in pieces if piece.isdigit()}
    assert max(sum(letter.isdigit() for letter in piece) for piece in pieces) == 1


@pytest.mark.parametrize(
    ("model_type", "wrong", "message"),
    [
        ("bpe", 90000, r"90000 is more than these \d+ lines(.|\n)*largest"),
        ("unigram", 90000, r"90000 is more than these \d+ lines(.|\n)*largest"),
        ("bpe", 100, r"100 is less than(.|\n)*smallest"),
    ],
)
def test_a_vocabulary_of_a_wrong_size_is_refused_and_one_that_fits_named(training, model_type, wrong, message):
    training = replace(training, model_type=model_type)
    with pytest.raises(DataError, match=f"--vocab-size {message} that fits is") as refusal:
        train_tokenizer(replace(training, vocab_size=wrong))
    assert not training.output.exists()
    fitting = int(re.search(r"that fits is (\d+)", str(refusal.value))[1])
    train_tokenizer(replace(training, vocab_size=fitting))
    assert sentencepiece.SentencePieceProcessor(model_file=str(training.output)).vocab_size() == fitting


def test_input_without_the_key_is_refused_with_the_keys_there_are(training):
    with pytest.raises(DataError, match=r"text\.jsonl:1: no key 'body' \(keys: id, text\)"):
        train_tokenizer(replace(training, document_format=DocumentFormat(kind="jsonl", key="body")))


def test_more_bad_documents_than_allowed_make_no_tokenizer(training):
    training.inputs[0].write_bytes(training.inputs[0].read_bytes() + b'{"text": "cut o')
    with pytest.raises(
        DataError, match=r"1 of 9 documents are bad, .* a share of 0\.01.* is .*text\.jsonl:9: not JSON"
    ):
        train_tokenizer(training)
    assert not training.output.exists()
    train_tokenizer(replace(training, max_bad=0.2))


def test_a_larger_corpus_is_sampled_and_every_run_draws_the_same(training):
    lines = train_tokenizer(training)
    half = replace(training, max_bytes=training.inputs[0].stat().st_size // 2, overwrite=True)
    sampled = train_tokenizer(half)
    first = training.output.read_bytes()
    assert 0 < sampled < lines
    assert train_tokenizer(half) == sampled
    assert training.output.read_bytes() == first
