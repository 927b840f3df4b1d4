"""Reward for mathematics: compare answers as numbers, expressions, sets or intervals, in LaTeX or plain text.

The comparison is math-verify's.
"""

import re
from functools import partial
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify  # type: ignore[import-untyped]

from mcore_rl.config.rl.rollout import RewardConfig
from mcore_rl.rl.rewards import rules
from mcore_rl.rl.rewards.interface import RewardFunction, RewardInput

# A number followed by a unit or remark. Words that are mathematics, or that join two answers, are not a unit.
NUMBER_AND_REMARK = re.compile(
    r"([-+]?\$?\d[\d,]*(?:\.\d+)?)\s*(?:(?!(?:pi|sqrt|log|ln|sin|cos|tan|exp|mod|or|and|to)\b)[A-Za-z]{2}[^=+*/\\^]*"
    r"|\((?=.*[A-Za-z]{2})[^=+*/\\^]*\))"
)
MAX_EXPRESSION = 500
"""Longer texts are read as prose: a whole one of 30,000 characters takes the parser minutes."""
MARKED = re.compile(r"(?<!\\)\$.*(?<!\\)\$|\\[(\[]|(?i:answer)")
"""Delimiters and words by which math-verify finds an answer in a text."""
LEVEL = r"(?:\\.|[^{}\\]|\{%s*+\})"
BOX = rf"\\f?box(?:ed)?\s*\{{({LEVEL % (LEVEL % (LEVEL % (LEVEL % (LEVEL % '[^{}]'))))}*+)\}}"
"""A box, with braces of up to five levels in it."""
JOINED = r"(?:[\s$,;&]|\\[()\[\]]|\\q?quad|\\text\s*\{\s*(?:and|or)\s*\}|and\b|or\b)*"
BOXES = re.compile(f"{BOX}(?:{JOINED}{BOX})*", re.DOTALL)
"""Boxes that make one answer together."""
TEXT = r"\\(?:text(?:bf|it|rm|normal)?|mbox|mathrm)\s*\{([^{}]*)\}"
WORD = re.compile(r"(?i)(?<![\\a-z])(?!sqrt|frac|infinity)(?:[a-z]{4,}|yes|no|odd)(?![a-z])")
"""A word of a language; shorter ones, such as xy and abc, are products of variables."""
WORDS = re.compile(r"[A-Za-z][A-Za-z\s,.'\u2019-]*")
# In x^2+2e-3 the e may be Euler's number.
ALONE = re.compile(f"(?<![-+*/^])(?:{rules.FIGURE.pattern})")


def math_function(config: RewardConfig) -> RewardFunction:
    """Return the reward function of the part `math`."""
    return partial(math_equal, answer_pattern=config.answer_pattern or "")


def math_equal(scored: RewardInput, *, answer_pattern: str) -> float:
    """Return 1 if the answer equals the reference, else 0. The reference, an answer in a box, after `####` or in the
    match of `answer_pattern` are read whole; in other text math-verify finds the text after "answer is", or the last
    expression. Raises ValueError if the reference is empty.
    """
    reference, text = rules.after_marker(scored.answer), rules.answered(scored.completion, answer_pattern)
    if not reference:
        raise ValueError(f"the reference answer {scored.answer!r} is empty")
    wanted = _whole(reference)
    if answer_pattern or rules.GSM8K_MARKER in text:
        answer = rules.after_marker(text)
        if getattr(wanted[0], "is_Number", False):
            answer = rules.first_line(answer)
            answer = match[1] if (match := NUMBER_AND_REMARK.fullmatch(answer)) else answer
        given = _whole(answer)
    elif _boxed(text) is not None or text == reference:
        given = _whole(text)
    else:
        given = parse(_spelled(text), parsing_timeout=None)
    # math-verify's own time-outs use SIGALRM, which the worker needs.
    return float(verify(wanted, given, timeout_seconds=None))


def _boxed(text: str) -> str | None:
    """Return the content of the last box, after that of boxes which only a comma, "and" or "or" separates from it."""
    found = list(BOXES.finditer(text))
    contents = re.findall(BOX, found[-1][0], re.DOTALL) if found else []
    return ", ".join(dict.fromkeys(map(str.strip, contents))) if contents else None


def _whole(answer: str) -> list[Any]:
    """Read an isolated answer: words as text, prose with one number as the number, all else as one expression."""
    answer = " ".join((_boxed(answer) or answer).split()).rstrip(".")
    bare = re.sub(TEXT, r"\1", answer).strip(" .")
    if WORD.search(bare):
        if WORDS.fullmatch(bare):
            return [bare.casefold()]
        number = rules.stated_number(bare)
        answer = str(number) if number is not None and number == rules.last_number(bare) else answer
    answer, is_long = _spelled(answer), len(answer) > MAX_EXPRESSION
    found = parse(answer, parsing_timeout=None) if is_long or MARKED.search(answer) else []
    if found or is_long:
        return found or [answer]
    # math-verify removes all from the first \text to one at the end, as if it were a unit.
    expression = re.sub(TEXT + r"(?=\s*[^\s^])", r"\1", answer)
    return parse(f"${expression}$", [LatexExtractionConfig()], parsing_timeout=None) or [answer]


def _spelled(text: str) -> str:
    """Write exponents and mixed numbers, which math-verify misreads, as fractions, and minus signs in ASCII."""

    def fraction(figure: re.Match[str]) -> str:
        is_misread = (figure["exponent"] or figure["top"]) and not figure["after"]
        number = rules.number_of(figure) if is_misread else None
        before = figure[0][: figure.start("whole") - figure.start()].strip("+-")
        return figure[0] if number is None else f"{before}{number}"

    return ALONE.sub(fraction, text.translate(rules.MINUS_SIGNS))
