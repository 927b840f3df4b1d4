"""Finding a chat template: in a file, or where Hugging Face tokenizers keep theirs."""

import json
from pathlib import Path
from typing import Any

import jinja2

from mcore_rl.errors import DataError

TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    AttributeError,
    LookupError,
    ArithmeticError,
    MemoryError,
    RecursionError,
)
"""Errors of a template's own expressions on a conversation of another shape than it expects."""
NO_TEMPLATE = (
    "{folder} has no chat template (neither chat_template.jinja nor chat_template in tokenizer_config.json). Name a "
    'jinja file with data.chat_template, or set it to "plain" or "raw".'
)


def render(*args: Any, **options: Any) -> tuple[Any, Any]:
    """Call transformers' `render_jinja_template`.

    It is imported in this function because the import takes a second or two, for which runs without a template, and
    runs that are refused, need not wait.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered: tuple[Any, Any] = render_jinja_template(*args, **options)
    return rendered


def load_template(name: str, folder: Path) -> str:
    """Return the jinja text that data.chat_template=`name` means for a tokenizer in `folder`.

    Raises:
        DataError: the template is missing or does not parse.
    """
    found = _template_of_tokenizer(folder) if name == "tokenizer" else _template_in_file(Path(name))
    if found is None:
        raise DataError(NO_TEMPLATE.format(folder=folder))
    origin, text = found
    if not text.strip():
        raise DataError(
            f"{origin} is empty. Copy or download it again, or name another with data.chat_template."
        )
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
    return _template_of_tokenizer(folder) is not None


def _template_in_file(path: Path) -> tuple[Path, str]:
    try:
        return path, path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f'data.chat_template="{path}" cannot be read: {error}. Give "tokenizer", "plain", "raw", or a jinja file.'
        ) from error


def _template_of_tokenizer(folder: Path) -> tuple[Path, str] | None:
    """Return a template file next to the tokenizer before the entry in tokenizer_config.json, as transformers does;
    None where there is neither.
    """
    if (folder / "chat_template.jinja").is_file():
        return _template_in_file(folder / "chat_template.jinja")
    path = folder / "tokenizer_config.json"
    entry = json.loads(path.read_bytes()).get("chat_template") if path.is_file() else None
    if isinstance(entry, list):
        named = [
            template for template in entry if isinstance(template, dict) and template.get("name") == "default"
        ]
        entry = named[0].get("template") if named else None
    return (path, entry) if isinstance(entry, str) and entry else None
