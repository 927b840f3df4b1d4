"""Values of fields as TOML writes them, in files and on the command line."""

import json
import tomllib
from typing import Any


def parse_value(text: str) -> Any:
    """Read the TOML value `text`; a bare word is a string, also in a list, because shells take quotes away."""
    try:
        table = tomllib.loads(f"value = {text}")
    except ValueError:  # no TOML; also, with no class of its own, an integer of more digits than Python reads
        if text.startswith("[") and text.endswith("]"):
            return [parse_value(item.strip()) for item in text[1:-1].split(",") if item.strip()]
        return text
    return table["value"] if table.keys() == {"value"} else text


def toml_value(value: Any) -> str:
    """Write a field's value as TOML, on one line; None is `"none"`, for which TOML has no word of its own."""
    if value is None:
        return '"none"'
    if isinstance(value, str):
        # A basic string has JSON's escapes; only DEL may stand bare in JSON and not in TOML.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{toml_value(key)} = {toml_value(item)}' for key, item in value.items())}}}"
    assert isinstance(value, int | float), f"TOML cannot hold {value!r}"
    return repr(value)
