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
DEFAULT, TOOL_USE = "default", "tool_use"
"""Names of the template of all conversations, and of the template of conversations with tools, where there are two."""
MORE_TEMPLATES = "additional_chat_templates"
"""Folder of a tokenizer's further chat templates, as transformers 5 saves them."""
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
    found = (
        _templates_of_tokenizer(folder).get(DEFAULT) if name == "tokenizer" else _template_in_file(Path(name))
    )
    if found is None:
        raise DataError(NO_TEMPLATE.format(folder=folder))
    return _parsed(*found)


def load_tool_template(name: str, folder: Path) -> str | None:
    """Return the jinja text that transformers takes instead of `load_template` for a conversation with tools; None if
    there is none. DataError where it does not parse.
    """
    found = _templates_of_tokenizer(folder).get(TOOL_USE) if name == "tokenizer" else None
    return None if found is None else _parsed(*found)


def _parsed(origin: Path, text: str) -> str:
    """Return the text of a template. DataError where it is empty or jinja cannot read it."""
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
    return DEFAULT in _templates_of_tokenizer(folder)


def _template_in_file(path: Path) -> tuple[Path, str]:
    try:
        return path, path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f'data.chat_template="{path}" cannot be read: {error}. Give "tokenizer", "plain", "raw", or a jinja file.'
        ) from error


def _templates_of_tokenizer(folder: Path) -> dict[str, tuple[Path, str]]:
    """Return the templates of a tokenizer by their names, each with its file: files next to the tokenizer if there are
    any, else the entry in tokenizer_config.json, as transformers does.
    """
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
