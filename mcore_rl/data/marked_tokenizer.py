"""Tokens of a text in which a template's special tokens are tokens, and those that its contents spell are not."""

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken

MARK = "\U000f0000"
"""Character for private use in front of a hidden name's number."""
FIRST_NUMBER = 0xF0001


class Encoded(NamedTuple):
    """Tokens, and where each lies in the text."""

    ids: list[int]
    offsets: list[tuple[int, int]]


class _Part(NamedTuple):
    """A special token of a text, or what lies between two."""

    begin: int
    end: int
    token: int | None


class MarkedTokenizer:
    """A tokenizer.json that reads texts whose contents were made safe by `hide`."""

    def __init__(self, text: str) -> None:
        """Take the text of a tokenizer.json."""
        self._tokenizer = _plain(tokenizers.Tokenizer.from_str(text))
        self.added: dict[int, AddedToken] = self._tokenizer.get_added_tokens_decoder()
        """Tokens that are found in a text before it is cut, by id."""
        self._special = {token.content: index for index, token in self.added.items() if token.special}
        # A mark in a content is hidden as well, which makes hiding reversible whatever the content.
        self._names = [*sorted(self._special, key=len, reverse=True), MARK]
        self._hidden = {name: MARK + chr(FIRST_NUMBER + i) for i, name in enumerate(self._names)}
        self._names_pattern = re.compile("|".join(map(re.escape, self._names)))
        specials = "|".join(map(re.escape, self._names[:-1]))
        self._special_pattern = re.compile(specials) if specials else None
        self._behind, self._inside = _plain(_never_first(text)), _plain(tokenizers.Tokenizer.from_str(text))
        self._inside.encode_special_tokens = self._behind.encode_special_tokens = True

    def hide(self, content: str) -> str:
        """Return a text whose names of special tokens are no names, for a template to put it in its place."""
        return self._names_pattern.sub(lambda found: self._hidden[found[0]], content)

    def encode(self, text: str) -> Encoded:
        """Return the tokens of a text, in which the names of special tokens are those tokens, and hidden names text."""
        if MARK not in text:
            encoding = self._tokenizer.encode(text, add_special_tokens=False)
            return Encoded(encoding.ids, encoding.offsets)
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        for part in self._parts(text):
            if part.token is not None:
                ids.append(part.token)
                offsets.append((part.begin, part.end))
                continue
            plain, places = self._shown(text, part)
            # A tokenizer that puts a blank in front of a text puts none behind a special token.
            encoding = (self._behind if part.begin else self._inside).encode(plain, add_special_tokens=False)
            ids += encoding.ids
            offsets += [(places[begin], places[end]) for begin, end in encoding.offsets]
        return Encoded(ids, offsets)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, with the names of special ones."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    def _parts(self, text: str) -> Iterator[_Part]:
        """Yield the special tokens of a text and what lies between; some take the white space beside them."""
        begin = 0
        for found in self._special_pattern.finditer(text) if self._special_pattern else ():
            index = self._special[found[0]]
            start, end, token = found.start(), found.end(), self.added[index]
            if token.lstrip:
                start = begin + len(text[begin:start].rstrip())
            if token.rstrip:
                end += len(text[end:]) - len(text[end:].lstrip())
            if begin < start:
                yield _Part(begin, start, None)
            yield _Part(start, end, index)
            begin = end
        if begin < len(text):
            yield _Part(begin, len(text), None)

    def _shown(self, text: str, part: _Part) -> tuple[str, list[int]]:
        """Return a part with its hidden names in plain, and the place in `text` of each of its characters and of its
        end.
        """
        plain: list[str] = []
        places: list[int] = []
        at = part.begin
        while at < part.end:
            is_hidden = text[at] == MARK
            shown = self._names[ord(text[at + 1]) - FIRST_NUMBER] if is_hidden else text[at]
            plain.append(shown)
            places += [at] * len(shown)
            at += 2 if is_hidden else 1
        return "".join(plain), [*places, part.end]


def _plain(tokenizer: Any) -> Any:
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _never_first(text: str) -> Any:
    """Return the tokenizer for a text that is not the first: without the blank that is put in front of the first."""
    settings = json.loads(text)

    def change(value: Any) -> None:
        if isinstance(value, dict):
            if value.get("prepend_scheme") == "first":
                value["prepend_scheme"] = "never"
            value = list(value.values())
        if isinstance(value, list):
            for part in value:
                change(part)

    # The decoder has the setting too, which is about decoding.
    change(settings.get("pre_tokenizer"))
    return tokenizers.Tokenizer.from_str(json.dumps(settings))
