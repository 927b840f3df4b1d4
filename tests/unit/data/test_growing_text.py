"""The text of the first of random tokens, compared with decodes of all of them by every kind of tokenizer."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import sentencepiece
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from mcore_rl.config.data import TokenizerConfig
from mcore_rl.convert.hf.text_files import sentencepiece_files
from mcore_rl.data.chat import Conversation, load_chat
from mcore_rl.data.growing_text import text_ends
from mcore_rl.data.steps import read_steps, step_tokens
from mcore_rl.data.tokenizer import Tokenizer, load_tokenizer
from mcore_rl.rl.engines.base import StopStrings
from mcore_rl.rl.passes.trace import pieces_of
from tests.tiktoken_folders import write_tokenizer

CORPUS = [
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
    (folder / "text").write_text("\n".join(CORPUS))
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


def byte_level(folder: Path) -> Kind:
    own = tokenizers.Tokenizer(models.BPE())
    own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    own.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    own.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet))
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
    "byte level": byte_level,
    "tiktoken": ranks,
}


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kind:
    return KINDS[request.param](tmp_path_factory.mktemp("kind"))


def random_tokens(draw: random.Random, kind: Kind, longest: int = 40) -> list[int]:
    """Any ids, special tokens and bytes among them, with the bytes of characters, of which some are cut or mixed."""
    special = sorted(kind.tokenizer.special_ids)
    pools = [range(kind.tokenizer.vocab_size), kind.byte_ids, special, kind.tokenizer.encode(CORPUS[1])]
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


def test_a_step_ends_at_the_first_token_whose_text_has_it(kind: Kind) -> None:
    draw, num_steps = random.Random(2), 0
    for _ in range(150):
        text = "".join(draw.choices([*CHARACTERS, "步骤一", " two", "\n\n"], k=draw.randint(1, 16)))
        ids = kind.tokenizer.encode(text.replace(BROKEN, ""))
        whole, texts = kind.tokenizer.decode(ids), certain(ids, kind.tokenizer)
        ends = list(range(1, len(whole)))
        wanted = [next(i for i, text in enumerate(texts) if text.startswith(whole[:end])) for end in ends]
        assert step_tokens(ids, whole, ends, kind.tokenizer.decode) == wanted, text
        num_steps += len(ends)
    assert num_steps > 1000


@pytest.mark.parametrize(
    "content",
    [*(text.encode() for text in ("one two three ", "第", "\n", "🙂 第", "A\n第\tb")), b"\xf0", b""],
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
    (tmp_path / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ message.content }}:{% endfor %}"
    )
    chat = load_chat("tokenizer", load_tokenizer(TokenizerConfig(kind="huggingface", path=path)), path)
    prompt = Conversation(messages=({"role": "user", "content": "two"},))
    answer = " three. four"
    read = read_steps(chat, prompt, answer, [7, len(answer)])
    assert chat.decode(read.ids_T[: read.tokens[0] + 1]).startswith("two: three.")
    assert not chat.decode(read.ids_T[: read.tokens[0]]).startswith("two: three.")
    assert read.tokens[1] == len(read.ids_T) - 1
