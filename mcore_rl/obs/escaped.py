"""Text of models and data as a terminal may show it."""

import re

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
r"""Control characters but for newline and tab: with these a text could clear a terminal or set its title."""


def escaped(text: str) -> str:
    r"""Return the text with its control characters as `\x1b`; newline and tab stay."""
    return CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)
