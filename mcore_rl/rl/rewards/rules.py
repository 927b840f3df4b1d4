"""Rule-based rewards on text, numbers and lengths, and how numbers in text are read: whole or not at all."""

import ast
import operator
import re
from collections import Counter
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import partial
from numbers import Real
from typing import Any

from mcore_rl.config.rl.rollout import RewardConfig
from mcore_rl.rl.rewards.interface import RewardFunction, RewardInput

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
    """Return the number that a short answer states: the first in its first line, after the last "=" if any, as 12 in
    "12km", "**12**", "12 (in 3 days)" and "3 * 4 = 12". None for "12 or 13", an expression without "=", or no number.
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
    """Return the number in `text[begin:end]`, read whole even where it reaches beyond; 7/10 is 7 of 10. None if there
    is no number, or more than one, as in "7-8" and "7 or 8".
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


GSM8K_MARKER = "####"


def answered(text: str, pattern: str) -> str:
    """Return the answer in `text`, stripped: the first group of the last match of `pattern`, or "" without a match;
    with an empty pattern the whole text.
    """
    if not pattern:
        return text.strip()
    # A pattern such as (.*) also matches the empty text at the end.
    matches = [match for match in re.finditer(pattern, text, re.DOTALL) if match[0]]
    return (matches[-1].group(1) or "").strip() if matches else ""


def after_marker(text: str) -> str:
    """Return the text after the last `####`, GSM8K's answer marker, or the whole text without a marker."""
    return text.rpartition(GSM8K_MARKER)[2].strip()


def exact(scored: RewardInput, *, answer_pattern: str) -> float:
    """Return 1 if the answer equals the reference up to surrounding white space, else 0."""
    return float(answered(scored.completion, answer_pattern) == scored.answer.strip())


def positions(scored: RewardInput, *, answer_pattern: str) -> float:
    """Return 1 if the answer equals the reference, else half the fraction of characters at the correct position;
    missing and extra characters count as wrong.
    """
    given, wanted = answered(scored.completion, answer_pattern), scored.answer.strip()
    if given == wanted:
        return 1.0
    right = sum(character == target for character, target in zip(given, wanted, strict=False))
    return 0.5 * right / max(len(given), len(wanted))


def numeric(scored: RewardInput, *, answer_pattern: str) -> float:
    """Return 1 if the answer's number equals the reference's (1,000 = 1000.0 = 1e3, 1/2 = 0.5, 50% = 50), else 0. After
    `####` or in the match of `answer_pattern` this is the `stated_number`, else the text's last number. Raises
    ValueError if the reference answer is not one number.
    """
    reference = after_marker(scored.answer)
    wanted, last = stated_number(reference), last_number(reference)
    is_prose = GSM8K_MARKER not in scored.answer
    if wanted is None or (is_prose and last not in (None, wanted)):
        raise ValueError(
            f"the reference answer {scored.answer!r} is not one number. Write the number alone or after "
            f'{GSM8K_MARKER}, or take the part "math"'
        )
    text = answered(scored.completion, answer_pattern)
    is_isolated = answer_pattern or GSM8K_MARKER in text
    return float(wanted == (stated_number(after_marker(text)) if is_isolated else last_number(text)))


def format_matches(scored: RewardInput, *, pattern: str) -> float:
    """Return 1 if the whole stripped completion matches `pattern` (a dot matches line breaks too), else 0."""
    return float(re.fullmatch(pattern, scored.completion.strip(), re.DOTALL) is not None)


def regex_found(scored: RewardInput, *, pattern: str) -> float:
    """Return 1 if the pattern matches anywhere in the completion, else 0."""
    return float(re.search(pattern, scored.completion, re.DOTALL) is not None)


def length_within(scored: RewardInput, *, min_tokens: int, max_tokens: int | None) -> float:
    """Return 0 for a length between `min_tokens` and `max_tokens` (None: no limit), else minus the missing or excess
    tokens as a fraction of the limit, at least -1.
    """
    length = scored.num_tokens
    if length < min_tokens:
        return (length - min_tokens) / min_tokens
    return max(-1.0, (max_tokens - length) / max_tokens) if max_tokens and length > max_tokens else 0.0


OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
MAX_EXPRESSION = 200


def countdown(scored: RewardInput, *, answer_pattern: str) -> float:
    """Return 1 if the answer is an expression (+ - * /) that equals the prompt's `target` with each of its `numbers`
    exactly once, in decimal digits, else 0. A claim after an equals sign must equal the target too. Raises ValueError
    if these fields are not numbers.
    """
    target = _exactly(scored.fields["target"])
    wanted = Counter(map(_exactly, scored.fields["numbers"]))
    text, *claims = answered(scored.completion, answer_pattern).split("=")
    try:
        value, numbers = _evaluate(text)
        stated = [(stated_number(claim), claim) for claim in claims if claim.strip()]
        claimed = [_evaluate(claim)[0] if number is None else number for number, claim in stated]
    except (SyntaxError, ValueError, ZeroDivisionError):
        return 0.0
    return float({value, *claimed} == {target} and Counter(numbers) == wanted)


def _exactly(number: Any) -> Fraction:
    """Convert a number of a prompt's fields as it is written: 0.1 is exactly a tenth, not the nearest binary number."""
    if isinstance(number, bool) or not isinstance(number, Real):
        raise ValueError(f'{number!r} in the prompt\'s fields "target" and "numbers" is no number')
    return Fraction(str(number))


def _evaluate(text: str) -> tuple[Fraction, list[Fraction]]:
    """Return the value and the numbers used. Raises ValueError or SyntaxError for anything but + - * / on numbers."""
    # Python would also read 0b10, 1_0 and 1e1, which are not numbers as a prompt gives them.
    if len(text) > MAX_EXPRESSION or re.search(r"[^0-9.()+*/\s-]", text):
        raise ValueError(f"not arithmetic: {text[:MAX_EXPRESSION]}")
    text, numbers = text.strip(), []

    def value(node: ast.expr) -> Fraction:
        if isinstance(node, ast.Constant):
            numbers.append(Fraction(ast.get_source_segment(text, node) or ""))
            return numbers[-1]
        if not isinstance(node, ast.BinOp) or type(node.op) not in OPERATORS:
            raise ValueError(f"not arithmetic: {ast.dump(node)}")
        return OPERATORS[type(node.op)](value(node.left), value(node.right))

    return value(ast.parse(text, mode="eval").body), numbers


def _comparing(compare: Callable[..., float]) -> Callable[[RewardConfig], RewardFunction]:
    """Return the maker of a part that reads the answer by `rl.reward.answer_pattern`."""
    return lambda config: partial(compare, answer_pattern=config.answer_pattern or "")


RULES: Mapping[str, Callable[[RewardConfig], RewardFunction]] = {
    "exact": _comparing(exact),
    "positions": _comparing(positions),
    "numeric": _comparing(numeric),
    "countdown": _comparing(countdown),
    "format": lambda config: partial(format_matches, pattern=config.format_pattern or ""),
    "regex": lambda config: partial(regex_found, pattern=config.regex_pattern or ""),
    "length": lambda config: partial(
        length_within, min_tokens=config.length_min_tokens, max_tokens=config.length_max_tokens
    ),
}
"""Maker of each rule's reward function from the config."""
