"""Values of fields in TOML syntax, in files and on the command line."""

import json
import tomllib
from typing import Any


def parse_value(text: str) -> Any:
    """Parse `text` as a TOML value; a bare word is a string, also in a list, because shells remove quotes."""
    try:
        table = tomllib.loads(f"value = {text}")
    except ValueError:  # no TOML, or an integer of more digits than Python reads, which has no error class of its own
        if text.startswith("[") and text.endswith("]"):
            return [parse_value(item.strip()) for item in text[1:-1].split(",") if item.strip()]
        return text
    return table["value"] if table.keys() == {"value"} else text


def toml_value(value: Any) -> str:
    """Return a field's value in TOML syntax, on a single line; None is `"none"`, because TOML has no null."""
    if value is None:
        return '"none"'
    if isinstance(value, str):
        # TOML's basic strings have JSON's escapes; only DEL needs an escape in TOML but not in JSON.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{toml_value(key)} = {toml_value(item)}' for key, item in value.items())}}}"
    assert isinstance(value, int | float), f"TOML cannot hold {value!r}"
    return repr(value)
