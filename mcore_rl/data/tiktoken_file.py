"""The tokenizer of a folder with tiktoken.model, as Moonlight and Kimi have instead of a tokenizer.json."""

import base64
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from mcore_rl.data.marked_tokenizer import Encoded
from mcore_rl.data.packages import required_package
from mcore_rl.errors import DataError

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


class TiktokenFile:
    """The encoding of a folder with tiktoken.model, by the library tiktoken.

    The file has only the ranks. Pattern and reserved tokens are in the Python code of the model's folder, which is not
    executed: it must be of a known class, and added_tokens_decoder of tokenizer_config.json names tokens.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / TIKTOKEN_MODEL
        tiktoken = required_package("tiktoken", "tiktoken", str(path))
        content, settings = path.read_bytes(), _settings(folder)
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
            name=str(path),
            pat_str="|".join(PATTERN_PARTS),
            mergeable_ranks=ranks,
            special_tokens=self.ids,
        )
        self._all = frozenset(self.ids)
        self._always = frozenset(token.content for token in self.added.values() if not token.special)
        self.vocab_size: int = self._encoding.n_vocab
        self.digest = hashlib.sha256(content + json.dumps(self.ids).encode()).hexdigest()

    def ids_of(self, text: str, *, is_marked: bool) -> list[int]:
        """Return the ids of a text. Names of special tokens become these tokens if it `is_marked`, else they are text;
        names of other added tokens always become tokens.
        """
        names = self._all if is_marked else self._always
        ids: list[int] = []
        for piece in _pieces(text):
            ids += self._encoding.encode(piece, allowed_special=names, disallowed_special=())
        return ids

    def marked(self, text: str) -> Encoded:
        """Return the tokens of a text in which the names of special tokens are tokens."""
        return self._with_offsets(text, self.ids_of(text, is_marked=True))

    def plain(self, text: str, *, is_first: bool) -> Encoded:
        """Return the tokens of a text in which the names of special tokens are text; `is_first` makes no difference."""
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


def _pieces(text: str) -> Iterator[str]:
    """Yield the pieces in which the models' code encodes a text."""
    for start in range(0, len(text), MAX_CHARACTERS):
        part = text[start : start + MAX_CHARACTERS]
        cuts = [0, *(found.end() for found in LONG_RUN.finditer(part)), len(part)]
        yield from (part[begin:end] for begin, end in pairwise(cuts))


def _settings(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    try:
        settings: Any = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise DataError(
            f"{folder} has a {TIKTOKEN_MODEL} and no tokenizer_config.json, which names its special tokens. Copy it "
            "from where the model was published."
        ) from None
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {error}. Copy it again.") from error
    if not isinstance(settings, dict):
        raise DataError(f"{path} is no JSON object. Copy it again.")
    return settings


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
    if sorted(ranks.values()) != list(range(len(lines))) or not all(
        bytes([byte]) in ranks for byte in range(256)
    ):
        raise DataError(
            f"{path} ({len(content)} bytes) is cut or damaged: it has {len(ranks)} tokens, whose ranks are not 0 to "
            f"{len(lines) - 1} with all single bytes among them. Copy it again."
        )
    return ranks


def _added_tokens(folder: Path, settings: dict[str, Any]) -> dict[int, AddedToken]:
    """Return the tokens that tokenizer_config.json names, by id."""
    entries = settings.get("added_tokens_decoder", {})
    try:
        return {
            int(index): AddedToken(entry["content"], special=bool(entry.get("special", False)))
            for index, entry in entries.items()
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"added_tokens_decoder of {folder / 'tokenizer_config.json'} is no table of tokens by id: "
            f"{type(error).__name__}: {error}. Copy it again."
        ) from error
