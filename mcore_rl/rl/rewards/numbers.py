"""Numbers in text, read whole or not at all: sign, thousands commas, decimals, exponent, fraction, mixed number."""

import re
from fractions import Fraction

MINUS_SIGNS = str.maketrans({"\u2212": "-", "\u2013": "-", "\ufe63": "-", "\uff0d": "-"})
"""Characters that mean minus before a number: minus sign, en dash, small and full-width hyphen."""
MAX_LENGTH = 200
"""Maximum number of characters of a number. With two digits of exponent, none is too large for a float."""
# All characters that may belong to a number are matched at once, and never again in parts: 70,0000 is not 70.
FIGURE = re.compile(
    r"[\^_](?:\{[^{}]*\}|[-+]?\w+)|"  # an exponent or index, which is no number of its own
    r"(?P<sign>(?<![\w.)\]}])[-+])?(?:\\?\$)?(?<![\w.])(?P<whole>\.?\d(?:[\d,.]*\d)?)"
    r"(?:(?:[eE]|\s?(?:\\times|\\cdot|[*x\u00d7\u00b7])\s?10\s?\^\s?\{?)(?P<exponent>[-+]?\d\d?)\}?)?"
    r"(?:(?:\s(?P<top>\d+))?\s?/\s?(?P<bottom>\d(?:[\d,.]*\d)?))?(?P<after>(?:\w|/\d)*)"
    r"(?P<power>\s?\^(?:\{[^{}]*\}|[-+]?\w*))?"
)
DECIMAL = re.compile(r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+")
NAME = re.compile(r"st|nd|rd|th|.")
"""Letters right after digits that make a name, such as 10th or 3x, instead of a number with a unit, such as 12km."""
MORE = re.compile(r"[^\S\n]*(?:[-+*/^x,\u00d7\u00b7\u00f7]{1,2}|and|or|to)[^\S\n]*[\d(]")
EXPRESSION = re.compile(r"\\(?!f?box|text|mbox|math)[a-z]|[a-z]\(|\u221a")
"""LaTeX command, function or root, of which a number is a part."""
OTHER_SPELLINGS = [
    (re.compile(r"(^\u2212|[,:] ?\u2212|[=(\[{$] ?[-\u2212])\s(?=[\d.$\\])", re.MULTILINE), r"\1"),  # "= - 3"
    (re.compile(r"(?<![\w*)])(?:\*\*|__)|(?:\*\*|__)(?![\w*(])|`"), ""),  # Markdown's emphasis
    (re.compile(r"(?<=\d)(?:\{,\}|,?\\[!,])(?=\d)"), ","),
    (re.compile(r"(?<=\d)(?=\\[dtc]?frac)"), " "),
    (re.compile(r"\\[dtc]?frac\{(-?[\d,.]+)\}\{([\d,.]+)\}"), r"\1/\2"),
    (re.compile(r"\s?\^\s?\{?\\circ\}?"), ""),
]


def plain(text: str) -> str:
    """Return a text with the numbers of Markdown and LaTeX in plain characters, and with ASCII minus signs."""
    for pattern, replacement in OTHER_SPELLINGS:
        text = pattern.sub(replacement, text)
    return text.translate(MINUS_SIGNS)


def first_line(text: str) -> str:
    """Return the first non-blank line of a text, in plain characters."""
    return plain((text.strip().splitlines() or [""])[0]).strip()


def stated_number(text: str) -> Fraction | None:
    """Return the number that a short answer states; None if it has no number or is an expression without "=".

    This is the first number in the first line, after the last "=" if any: 12 in "12km", "**12**", "12 (in 3 days)" and
    "3 * 4 = 12". "12 or 13" states none.
    """
    line = first_line(text).rpartition("=")[2].strip()
    figure = next((found for found in FIGURE.finditer(re.sub(r"^-\s", "-", line)) if found["whole"]), None)
    if figure is None or EXPRESSION.search(line) or MORE.match(figure.string, figure.end()):
        return None
    return number_of(figure)


def last_number(text: str) -> Fraction | None:
    """Return the last number in a text, exactly; None without a number, or if the last cannot be read whole."""
    figures = [figure for figure in FIGURE.finditer(plain(text)) if figure["whole"]]
    figures = [figure for figure in figures if not NAME.fullmatch(figure["after"])]
    return number_of(figures[-1]) if figures else None


def rating(text: str, begin: int, end: int) -> Fraction | None:
    """Return the number in `text[begin:end]`, read whole even where it reaches beyond; 7/10 is 7 of 10.

    None if there is no number, or more than one, as in "7-8" and "7 or 8".
    """
    text = text.translate(MINUS_SIGNS)
    found = [figure for figure in FIGURE.finditer(text) if figure.start() < end and figure.end() > begin]
    numbers = {number_of(figure, is_rating=True) for figure in found if figure["whole"]}
    is_one = len(numbers) == 1 and not any(MORE.match(text, figure.end()) for figure in found)
    return numbers.pop() if is_one else None


def number_of(figure: re.Match[str], *, is_rating: bool = False) -> Fraction | None:
    """Return the number of a match of FIGURE that has digits; None if it cannot be read whole."""
    texts = [figure[name] or "0" for name in ("whole", "top", "bottom")]
    is_more = figure["power"] or (figure["after"] and not figure["after"].isalpha())
    if is_more or len(figure[0]) > MAX_LENGTH or not all(map(DECIMAL.fullmatch, texts)):
        return None
    number, top, bottom = (Fraction(text.replace(",", "")) for text in texts)
    number *= Fraction(10) ** int(figure["exponent"] or 0)
    if figure["bottom"] and (figure["top"] or not is_rating):
        if not bottom:
            return None
        number = number + top / bottom if figure["top"] else number / bottom
    return -number if figure["sign"] == "-" else number
