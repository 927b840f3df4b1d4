"""Finding a chat template, and tokenizing what it renders; contents cannot spell special tokens."""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jinja2
import tokenizers
from tokenizers import AddedToken

from mcore_rl.data.tokenizer import Encoded, without_limits
from mcore_rl.errors import DataError
from mcore_rl.storage.folders import NO_TEMPLATE

TEMPLATE_ERRORS = (
    *(jinja2.TemplateError, TypeError, ValueError, AttributeError, LookupError, ArithmeticError, MemoryError),
    *(RecursionError,),
)
"""Errors of a template's own expressions on a conversation of another shape than it expects."""
DEFAULT, TOOL_USE = "default", "tool_use"
"""Names of the template of all conversations, and of the template of conversations with tools, where there are two."""
MORE_TEMPLATES = "additional_chat_templates"
"""Folder of a tokenizer's further chat templates, as transformers 5 saves them."""


def render(*args: Any, **options: Any) -> tuple[Any, Any]:
    """Call transformers' `render_jinja_template`, imported here as it takes a second, which not every run needs."""
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered: tuple[Any, Any] = render_jinja_template(*args, **options)
    return rendered


def load_template(name: str, folder: Path) -> str:
    """Return the jinja text that data.chat_template=`name` means; DataError if missing or not parsed."""
    found = _templates_of_tokenizer(folder).get(DEFAULT) if name == "tokenizer" else _template_in_file(Path(name))
    if found is None:
        raise DataError(NO_TEMPLATE.format(folder=folder))
    return _parsed(*found)


def load_tool_template(name: str, folder: Path) -> str | None:
    """Return the jinja text for a conversation with tools, if it has one of its own; DataError as above."""
    found = _templates_of_tokenizer(folder).get(TOOL_USE) if name == "tokenizer" else None
    return None if found is None else _parsed(*found)


def _parsed(origin: Path, text: str) -> str:
    if not text.strip():
        raise DataError(f"{origin} is empty. Copy or download it again, or name another with data.chat_template.")
    try:
        render([[]], chat_template=text)
    except jinja2.TemplateSyntaxError as error:
        raise DataError(
            f"{origin} holds no chat template that jinja can read: line {error.lineno}: {error}. Correct it, or name "
            "another with data.chat_template."
        ) from error
    except TEMPLATE_ERRORS:
        pass  # the template wants at least one turn, and a conversation has one
    return text


def has_template(folder: Path) -> bool:
    """Return whether a tokenizer's folder has a chat template; DataError when its tokenizer_config.json is damaged."""
    return DEFAULT in _templates_of_tokenizer(folder)


def _template_in_file(path: Path) -> tuple[Path, str]:
    try:
        return path, path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f'data.chat_template="{path}" cannot be read: {error}. Give "tokenizer", "plain", "raw", or a jinja file.'
        ) from error


def _templates_of_tokenizer(folder: Path) -> dict[str, tuple[Path, str]]:
    """Return a tokenizer's templates by name, with their files: files win over tokenizer_config.json."""
    files = {file.stem: file for file in sorted(folder.glob(f"{MORE_TEMPLATES}/*.jinja"))}
    if (folder / "chat_template.jinja").is_file():
        files[DEFAULT] = folder / "chat_template.jinja"
    if files:
        return {name: _template_in_file(file) for name, file in files.items()}
    path = folder / "tokenizer_config.json"
    entry = json.loads(path.read_bytes()).get("chat_template") if path.is_file() else None
    named = entry if isinstance(entry, list) else [{"name": DEFAULT, "template": entry}]
    return {
        str(template.get("name")): (path, text)
        for template in named
        if isinstance(template, dict) and isinstance(text := template.get("template"), str) and text
    }


MARK = "\U000f0000"
"""Character for private use in front of a hidden name's number."""
FIRST_NUMBER = 0xF0001


class _Part(NamedTuple):
    begin: int
    end: int
    token: int | None


class TextEncoder(Protocol):
    """A tokenizer by which texts are encoded with the places of their tokens."""

    added: dict[int, AddedToken]
    """Tokens that are found in a text before it is cut, by id."""

    def marked(self, text: str) -> Encoded:
        """Return the tokens of a text in which the names of special tokens are tokens."""
        ...

    def plain(self, text: str, *, is_first: bool) -> Encoded:
        """Return the tokens of a text with the names of special tokens as text; `is_first` if no text precedes it."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, with the names of special tokens."""
        ...


class JsonEncoder:
    """The encoder of a tokenizer.json."""

    def __init__(self, text: str) -> None:
        """Take the text of a tokenizer.json."""
        self._marked = without_limits(tokenizers.Tokenizer.from_str(text))
        self.added: dict[int, AddedToken] = self._marked.get_added_tokens_decoder()
        self._behind = without_limits(_never_first(text))
        self._first = without_limits(tokenizers.Tokenizer.from_str(text))
        self._first.encode_special_tokens = self._behind.encode_special_tokens = True

    def marked(self, text: str) -> Encoded:
        return _encoded(self._marked, text)

    def plain(self, text: str, *, is_first: bool) -> Encoded:
        # A tokenizer that puts a space before a text puts none after a special token.
        return _encoded(self._first if is_first else self._behind, text)

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._marked.decode(list(ids), skip_special_tokens=False)
        return text


class MarkedTokenizer:
    """A tokenizer that reads texts with contents that `hide` has made safe."""

    def __init__(self, encoder: TextEncoder) -> None:
        self._encoder = encoder
        self.added = encoder.added
        self._special = {token.content: index for index, token in self.added.items() if token.special}
        # A mark in a content is hidden as well, which makes hiding reversible for any content.
        self._names = [*sorted(self._special, key=len, reverse=True), MARK]
        self._hidden = {name: MARK + chr(FIRST_NUMBER + i) for i, name in enumerate(self._names)}
        self._names_pattern = re.compile("|".join(map(re.escape, self._names)))
        specials = "|".join(map(re.escape, self._names[:-1]))
        self._special_pattern = re.compile(specials) if specials else None

    def hide(self, content: str) -> str:
        """Return a text in which names of special tokens are hidden, for a template to put it in its place."""
        return self._names_pattern.sub(lambda found: self._hidden[found[0]], content)

    def encode(self, text: str) -> Encoded:
        """Return the tokens of a text, in which the names of special tokens are those tokens, and hidden names text."""
        if MARK not in text:
            return self._encoder.marked(text)
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        for part in self._parts(text):
            if part.token is not None:
                ids.append(part.token)
                offsets.append((part.begin, part.end))
                continue
            plain, places = self._shown(text, part)
            encoding = self._encoder.plain(plain, is_first=part.begin == 0)
            ids += encoding.ids
            offsets += [
                # All characters of a hidden name have the same place; a token of some of them covers this place.
                (places[begin], max(places[end], places[begin] + int(begin < end)))
                for begin, end in encoding.offsets
            ]
        return Encoded(ids, offsets)

    def decode(self, ids: Sequence[int]) -> str:
        return self._encoder.decode(ids)

    def _parts(self, text: str) -> Iterator[_Part]:
        """Yield the special tokens of a text and the texts between; some take the white space around them."""
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
        """Return a part with its hidden names in plain, and each character's (and the end's) place in `text`."""
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


def _encoded(tokenizer: Any, text: str) -> Encoded:
    encoding = tokenizer.encode(text, add_special_tokens=False)
    return Encoded(encoding.ids, encoding.offsets)


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
