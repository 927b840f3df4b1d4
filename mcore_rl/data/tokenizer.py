"""Text to token ids and back: sentencepiece, Hugging Face's tokenizer.json, and tiktoken.model (Moonlight, Kimi)."""

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import sentencepiece
import tokenizers
from tokenizers import AddedToken

from mcore_rl.config.data import TokenizerConfig
from mcore_rl.data.records import required_package
from mcore_rl.errors import DataError

TOKENIZER_JSON, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
ADDED = "added_tokens_decoder"
"""Key of tokenizer_config.json for added tokens by id; where it is absent, older files count for transformers."""
END_OF_TEXT = "<|endoftext|>"
"""Ends documents in the tokenizers that have it, even where a chat variant names another token as `eos`."""
TIKTOKEN_END = "[EOS]"
"""Ends documents in the tokenizers of Moonlight and Kimi; the chat variants name the end of a turn as `eos`."""
TIKTOKEN_MODEL = "tiktoken.model"
"""File of lines `token rank`, the token's bytes in base64; the rank is the token's id."""
CODE_MODULES = ("tokenization_moonshot", "tokenization_kimi")
"""Modules of published models with the pattern below and the reserved tokens in their class."""
PATTERN_PARTS = (
    r"[\p{Han}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
)
"""Alternatives of the pattern that cuts a text before its parts are merged to tokens."""
NUM_RESERVED = 256
"""Ids after the ranks that are added tokens, even if tokenizer_config.json does not name them. Moonlight's code has two
more, for which its embedding has no row."""
MAX_CHARACTERS = 400_000
"""The models' code cuts longer texts into pieces that are encoded separately."""
LONG_RUN = re.compile(r"\s{25000}(?=\s)|\S{25000}(?=\S)")
"""Long runs of white space, or of other text, after which the models' code cuts as well."""


class Encoded(NamedTuple):
    """Tokens, and where each token is in the text."""

    ids: list[int]
    offsets: list[tuple[int, int]]


class TiktokenFile:
    """The encoding of a folder with tiktoken.model, which has only the ranks. Pattern and reserved tokens are in the
    folder's Python code, which is not run: it must be of a known class, and tokenizer_config.json names tokens.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / TIKTOKEN_MODEL
        tiktoken = required_package("tiktoken", "tiktoken", str(path))
        content, settings = path.read_bytes(), _json_object(folder / TOKENIZER_CONFIG)
        if not (folder / TOKENIZER_CONFIG).is_file():
            raise DataError(
                f"{folder} has a {TIKTOKEN_MODEL} and no tokenizer_config.json, which names its special tokens. Copy "
                "it from where the model was published."
            )
        _refuse_other_code(folder, settings)
        ranks = _ranks(path, content)
        names = _added_tokens(folder, settings)
        reserved = range(len(ranks), len(ranks) + NUM_RESERVED)
        unnamed = {index: AddedToken(f"<|reserved_token_{index}|>", special=True) for index in reserved}
        self.added: dict[int, AddedToken] = dict(sorted((unnamed | names).items()))
        """Tokens that are found in a text before it is cut, by id."""
        self.ids: dict[str, int] = {token.content: index for index, token in self.added.items()}
        """Their ids, by text."""
        self._encoding = tiktoken.Encoding(
            name=str(path), pat_str="|".join(PATTERN_PARTS), mergeable_ranks=ranks, special_tokens=self.ids
        )
        self._all = frozenset(self.ids)
        self._always = frozenset(token.content for token in self.added.values() if not token.special)
        self.vocab_size: int = self._encoding.n_vocab
        self.digest = hashlib.sha256(content + json.dumps(self.ids).encode()).hexdigest()

    def ids_of(self, text: str, *, is_marked: bool) -> list[int]:
        """Return the ids of a text, in which names of special tokens are text unless it `is_marked`."""
        names = self._all if is_marked else self._always
        ids: list[int] = []
        for start in range(0, len(text), MAX_CHARACTERS):
            part = text[start : start + MAX_CHARACTERS]
            for begin, end in pairwise([0, *(found.end() for found in LONG_RUN.finditer(part)), len(part)]):
                ids += self._encoding.encode(part[begin:end], allowed_special=names, disallowed_special=())
        return ids

    def marked(self, text: str) -> Encoded:
        return self._with_offsets(text, self.ids_of(text, is_marked=True))

    def plain(self, text: str, *, is_first: bool) -> Encoded:
        return self._with_offsets(text, self.ids_of(text, is_marked=False))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, with the names of added tokens; a model's ids after the last token are ignored."""
        text: str = self._encoding.decode([index for index in ids if index < self.vocab_size])
        return text

    def _with_offsets(self, text: str, ids: list[int]) -> Encoded:
        """Return tokens with the characters that each has bytes of: a token may begin or end within a character."""
        character = [place for place, letter in enumerate(text) for _ in letter.encode()]
        ends = accumulate(map(len, self._encoding.decode_tokens_bytes(ids)), initial=0)
        return Encoded(ids, [(character[begin], character[end - 1] + 1) for begin, end in pairwise(ends)])


def _refuse_other_code(folder: Path, settings: dict[str, Any]) -> None:
    """Raise a DataError unless the folder's tokenizer is of a class with our pattern, which no file but code holds."""
    entry = settings.get("auto_map")
    entry = entry.get("AutoTokenizer") if isinstance(entry, dict) else None
    name = str(entry[0] if isinstance(entry, list) and entry else entry)
    # A copy may name the repository that has the code: OWNER/NAME--MODULE.CLASS.
    module = name.partition("--")[2] or name
    module = module.partition(".")[0]
    if module not in CODE_MODULES:
        raise DataError(
            f"{folder} has a {TIKTOKEN_MODEL}, and auto_map of its tokenizer_config.json names {name}: how that code "
            f"cuts a text is not known (known: {' and '.join(CODE_MODULES)}). Name a folder with the same tokenizer as "
            "tokenizer.json."
        )
    code = folder / f"{module}.py"
    text = code.read_text(encoding="utf-8") if code.is_file() else None
    if text is not None and not all(part in text for part in PATTERN_PARTS):
        raise DataError(
            f"{code} cuts a text by another pattern than the published models' code of this name, and its ids would be "
            "others. Name a folder with the same tokenizer as tokenizer.json."
        )


def _ranks(path: Path, content: bytes) -> dict[bytes, int]:
    try:
        lines = [line.split() for line in content.splitlines() if line]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
    except ValueError as error:  # also of base64, and of a line that is no pair
        raise DataError(
            f"{path} ({len(content)} bytes) is no file of tokens and ranks: {error}. Copy it again."
        ) from error
    if sorted(ranks.values()) != list(range(len(lines))) or not all(bytes([byte]) in ranks for byte in range(256)):
        raise DataError(
            f"{path} ({len(content)} bytes) is cut or damaged: it has {len(ranks)} tokens, whose ranks are not 0 to "
            f"{len(lines) - 1} with all single bytes among them. Copy it again."
        )
    return ranks


def _added_tokens(folder: Path, settings: dict[str, Any]) -> dict[int, AddedToken]:
    entries = settings.get(ADDED, {})
    try:
        return {
            int(index): AddedToken(entry["content"], special=bool(entry.get("special", False)))
            for index, entry in entries.items()
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{ADDED} of {folder / TOKENIZER_CONFIG} is no table of tokens by id: "
            f"{type(error).__name__}: {error}. Copy it again."
        ) from error


class Tokenizer(Protocol):
    """A tokenizer with ids in 0 .. vocab_size - 1."""

    @property
    def vocab_size(self) -> int:
        """Number of ids: one more than the largest."""

    @property
    def eod_id(self) -> int:
        """The token that ends a document."""

    @property
    def eos_id(self) -> int | None:
        """The token that the files call `eos`, in a chat model perhaps a turn's end; None when they name none."""

    @property
    def bos_id(self) -> int | None:
        """The token that begins a text; None when the tokenizer has none."""

    @property
    def pad_id(self) -> int | None:
        """The token that pads sequences; None when the tokenizer has none."""

    @property
    def special_ids(self) -> frozenset[int]:
        """The tokens that mark up a text but are not part of it, such as ends of turns."""

    @property
    def digest(self) -> str:
        """SHA-256 of the file that decides which ids a text has: equal digests, equal ids."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, without added tokens; the name of a special token in it is plain text."""

    def encode_marked(self, text: str) -> list[int]:
        """Return the ids of a text that was marked up by hand: the name of a special token in it is that token."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`."""


def load_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """Return the tokenizer that `config` names; DataError when its files are missing or unreadable."""
    if config.kind == "none":
        raise DataError(
            "data.tokenizer.kind is 'none', and this needs a tokenizer: set it to 'sentencepiece' (a "
            ".model file) or 'huggingface' (a folder with tokenizer.json or tiktoken.model), and data.tokenizer.path."
        )
    path = Path(config.path or "")
    if config.path is None or not path.exists():
        raise DataError(
            f"data.tokenizer.path={config.path!r} does not exist. Give "
            + ("a .model file." if config.kind == "sentencepiece" else "a folder with tokenizer.json.")
        )
    if config.kind == "sentencepiece":
        return SentencePieceTokenizer(path)
    return TiktokenTokenizer(path) if _has_only_ranks(path) else HuggingFaceTokenizer(path)


def digest_of_folder(folder: Path) -> str | None:
    """Return the `digest` of the tokenizer in a Hugging Face folder; None where it has no file that decides ids."""
    if _has_only_ranks(folder):
        return TiktokenFile(folder).digest
    path = folder / TOKENIZER_JSON
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def _has_only_ranks(folder: Path) -> bool:
    """Return whether a folder's tokenizer is its tiktoken.model: a tokenizer.json in the same folder goes first."""
    return (folder / TIKTOKEN_MODEL).is_file() and not (folder / TOKENIZER_JSON).is_file()


class SentencePieceTokenizer:
    """The tokenizer of a sentencepiece .model file; its end-of-sentence piece ends documents."""

    def __init__(self, path: Path) -> None:
        if path.is_dir():
            raise DataError(f"data.tokenizer.path={str(path)!r} is a folder; 'sentencepiece' wants a .model file.")
        content = path.read_bytes()
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
        except RuntimeError as error:
            raise DataError(
                f"{path} ({len(content)} bytes) is not a sentencepiece model: {error}. Copy it again, or "
                "train one with `mcore-rl data tokenizer`."
            ) from error
        self.digest = hashlib.sha256(content).hexdigest()
        self.vocab_size: int = self._processor.vocab_size()
        self.eod_id: int = self._processor.eos_id()
        if self.eod_id < 0:
            raise DataError(f"{path} has no end-of-sentence piece to end documents with; train it with an eos id.")
        self.eos_id = self.eod_id
        self.special_ids = frozenset(filter(self._processor.is_control, range(self.vocab_size)))
        # sentencepiece has -1 for a piece that is not there.
        bos_id, pad_id = self._processor.bos_id(), self._processor.pad_id()
        self.bos_id = None if bos_id < 0 else bos_id
        self.pad_id = None if pad_id < 0 else pad_id

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._processor.encode(text)
        return ids

    def encode_marked(self, text: str) -> list[int]:
        """Return the ids of `text`, as `encode` does: a .model file's control symbols are never read from a text."""
        return self.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._processor.decode(list(ids))
        return text


class HuggingFaceTokenizer:
    """A tokenizer of a folder: tokenizer.json decides the ids, tokenizer_config.json names the special tokens."""

    def __init__(self, folder: Path) -> None:
        path = folder / TOKENIZER_JSON
        if not path.is_file():
            found = ", ".join(sorted(entry.name for entry in folder.iterdir())) if folder.is_dir() else "a file"
            raise DataError(
                f"data.tokenizer.path={str(folder)!r} holds no tokenizer.json and no {TIKTOKEN_MODEL} (it is: "
                f"{found or 'empty'}). "
                "A folder with only a sentencepiece .model is read with kind = 'sentencepiece' and the "
                "file's path."
            )
        content = path.read_bytes()
        try:
            self._tokenizer = without_limits(tokenizers.Tokenizer.from_str(content.decode()))
        except Exception as error:  # the Rust side raises nothing narrower
            raise DataError(f"{path} ({len(content)} bytes) is not a tokenizer: {error}. Copy it again.") from error
        # Markup of a chat needs special tokens as tokens; a document that happens to contain them does not.
        self._tokenizer.encode_special_tokens = True
        self.digest = hashlib.sha256(content).hexdigest()
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(ids.values()) + 1
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        names = self.special_tokens = _special_names(folder)
        """Text of the special tokens, by name (`eos_token` and the like)."""
        _refuse_further_tokens(folder, names, ids)
        self.eod_id = _end_of_document(folder, END_OF_TEXT, names, ids)
        self.eos_id = ids.get(names.get("eos_token", ""))
        self.bos_id = ids.get(names.get("bos_token", ""))
        self.pad_id = ids.get(names.get("pad_token", ""))

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_marked(self, text: str) -> list[int]:
        self._tokenizer.encode_special_tokens = False
        try:
            return self.encode(text)
        finally:
            self._tokenizer.encode_special_tokens = True

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)


class TiktokenTokenizer:
    """A tokenizer of a folder with tiktoken.model; it gives the same ids as the model's own code."""

    def __init__(self, folder: Path) -> None:
        file = self.file = TiktokenFile(folder)
        """The encoding, which a chat reads with the places of tokens."""
        names = self.special_tokens = _special_names(folder)
        self.digest = file.digest
        self.vocab_size = file.vocab_size
        self.special_ids = frozenset(index for index, token in file.added.items() if token.special)
        self.eod_id = _end_of_document(folder, TIKTOKEN_END, names, file.ids)
        self.eos_id = file.ids.get(names.get("eos_token", ""))
        self.bos_id = file.ids.get(names.get("bos_token", ""))
        self.pad_id = file.ids.get(names.get("pad_token", ""))

    def encode(self, text: str) -> list[int]:
        return self.file.ids_of(text, is_marked=False)

    def encode_marked(self, text: str) -> list[int]:
        return self.file.ids_of(text, is_marked=True)

    def decode(self, ids: Sequence[int]) -> str:
        return self.file.decode(ids)


def _end_of_document(folder: Path, usual: str, names: Mapping[str, str], ids: Mapping[str, int]) -> int:
    end = usual if usual in ids else names.get("eos_token", "")
    if end not in ids:
        raise DataError(
            f"{folder} names no end-of-document token (eos_token is {end!r}, and there is no "
            f"{usual}). Set eos_token in its tokenizer_config.json to a token of the vocabulary."
        )
    return ids[end]


def _special_names(folder: Path) -> dict[str, str]:
    """Return special tokens by name (`eos_token`, ...), from the two files that may hold them. As in transformers,
    tokenizer_config.json wins if it lists the added tokens, and otherwise special_tokens_map.json.
    """
    config = _json_object(folder / TOKENIZER_CONFIG)
    files = [config, _json_object(folder / "special_tokens_map.json")]
    names: dict[str, str] = {}
    for entries in reversed(files) if ADDED in config else files:
        for key, value in entries.items():
            token = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(token, str):
                names[key] = token
    return names


def _refuse_further_tokens(folder: Path, names: Mapping[str, str], ids: Mapping[str, int]) -> None:
    """Raise DataError for a token that other files of the folder add to tokenizer.json's: it would be cut."""
    config = _json_object(folder / TOKENIZER_CONFIG)
    if ADDED in config:
        origin, listed = TOKENIZER_CONFIG, config[ADDED]
        items = listed.items() if isinstance(listed, dict) else ()
        added = [(str(token.get("content")), index) for index, token in items if isinstance(token, dict)]
    else:
        origin = "added_tokens.json"
        added = list(_json_object(folder / origin).items())
    wanted = [(token, f" as {index}", origin) for token, index in added if str(ids.get(token)) != str(index)]
    wanted += [
        (names[name], f" as {name}", "one of its files")
        for name in ("bos_token", "eos_token")
        if names.get(name) and names[name] not in ids
    ]
    if wanted:
        token, place, origin = wanted[0]
        raise DataError(
            f"{folder}/{TOKENIZER_JSON} does not have {token!r}{place}, which {origin} names and transformers adds. "
            f"Save the tokenizer with transformers, which writes such tokens to {TOKENIZER_JSON}: "
            f"AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained(FOLDER); or correct the name."
        )


def _json_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        entries: Any = json.loads(path.read_bytes())
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {error}. Copy it again.") from error
    if not isinstance(entries, dict):
        raise DataError(f"{path} is no JSON object. Copy it again.")
    return entries


def without_limits(tokenizer: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Return the tokenizer without the truncation and padding that its file keeps and transformers drops."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
