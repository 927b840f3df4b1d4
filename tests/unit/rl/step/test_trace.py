"""Texts of single tokens: together they are the text."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import sentencepiece
import tokenizers

from mcore_rl.rl.step.trace import pieces_of

TEXT = "The cat sat on the mat, and the dog did not. Ein Bär läuft; 猫が座る 🙂🙃! "
Coder = tuple[Callable[[str], list[int]], Callable[[Sequence[int]], str]]


@pytest.fixture(scope="module")
def sentencepieces(tmp_path_factory: pytest.TempPathFactory) -> Coder:
    prefix = tmp_path_factory.mktemp("tokens") / "tokens"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([TEXT.encode("ascii", "ignore").decode()] * 20),
        model_prefix=str(prefix),
        vocab_size=285,
        byte_fallback=True,
        minloglevel=2,
    )
    model = sentencepiece.SentencePieceProcessor(model_file=str(Path(f"{prefix}.model")))
    return model.encode, lambda ids: model.decode(list(ids))


@pytest.fixture(scope="module")
def bytes_in_pairs() -> Coder:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [TEXT.lower()], tokenizers.trainers.BpeTrainer(vocab_size=270, initial_alphabet=alphabet)
    )
    return lambda text: tokenizer.encode(text).ids, lambda ids: tokenizer.decode(list(ids))


@pytest.mark.parametrize("coder", ["sentencepieces", "bytes_in_pairs"])
def test_pieces_are_the_text_one_for_each_token(coder: str, request: pytest.FixtureRequest) -> None:
    encode, decode = request.getfixturevalue(coder)
    draw = random.Random(0)
    for _ in range(100):
        tokens_T = encode("".join(draw.choice(TEXT) for _ in range(draw.randrange(1, 30))))
        tokens_T = tokens_T[: draw.randrange(len(tokens_T) + 1)]  # also within a character
        pieces = pieces_of(tokens_T, decode)
        assert len(pieces) == len(tokens_T)
        assert "".join(pieces) == decode(tokens_T)


def test_a_word_keeps_its_space(sentencepieces: Coder) -> None:
    encode, decode = sentencepieces
    pieces = pieces_of(encode("the cat sat on the mat"), decode)
    assert "".join(pieces) == "the cat sat on the mat"
    assert any(piece.startswith(" ") for piece in pieces) and "\ufffd" not in "".join(pieces)
