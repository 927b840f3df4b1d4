"""Reward for mathematics: compare answers as numbers, expressions, sets or intervals, in LaTeX or plain text.

The comparison is math-verify's.
"""

import re
from typing import Any

from math_verify import parse, verify  # type: ignore[import-untyped]

from mcore_rl.rl.rewards.interface import RewardInput
from mcore_rl.rl.rewards.rules import (
    GSM8K_MARKER,
    MINUS_SIGNS,
    NUMBER,
    after_marker,
    answered,
    first_line,
)

WORDS = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
# A number followed by a unit or remark. Words that are mathematics, or that join two answers, are not a unit.
NUMBER_AND_REMARK = re.compile(
    r"([-+]?\$?\d[\d,]*(?:\.\d+)?)\s*(?:(?!(?:pi|sqrt|log|ln|sin|cos|tan|exp|mod|or|and|to)\b)[A-Za-z]{2,}[^=+*/\\^]*"
    r"|\([^=+*/\\^]*[A-Za-z]{2,}[^=+*/\\^]*\))"
)
DELIMITERS = ("$", "\\boxed", "\\(", "\\[")


def math_equal(scored: RewardInput, *, answer_pattern: str) -> float:
    """Return 1 if the answer equals the reference, else 0.

    Without `answer_pattern` and `####`, math-verify extracts the answer from the text: a boxed expression, the text
    after "answer is", or the last expression.

    Raises:
        ValueError: if the reference answer cannot be parsed.
    """
    wanted = _parsed(after_marker(scored.answer).translate(MINUS_SIGNS))
    if not wanted:
        raise ValueError(f"the reference answer {scored.answer!r} is no mathematics")
    text = answered(scored.completion, answer_pattern)
    isolated = bool(answer_pattern) or GSM8K_MARKER in text
    is_number = NUMBER.fullmatch(first_line(after_marker(scored.answer))) is not None
    if isolated and is_number:
        given = _parsed(_without_unit(after_marker(text)))
    else:
        given = _parsed(after_marker(text)) if isolated else _free(text)
    # math-verify's own time-outs use SIGALRM, which the worker needs.
    return float(verify(wanted, given, timeout_seconds=None))


def _without_unit(answer: str) -> str:
    """Return the first line of an isolated answer, reduced to the number if it is a number with a unit or remark."""
    line = first_line(answer)
    match = NUMBER_AND_REMARK.fullmatch(line)
    return match[1] if match else line


def _parsed(answer: str) -> Any:
    """Parse an isolated answer: all of it is an expression, unless it contains delimiters or words."""
    is_text = any(mark in answer for mark in DELIMITERS) or WORDS.search(answer)
    return _free(answer if is_text else f"${answer}$")


def _free(text: str) -> Any:
    return parse(text, parsing_timeout=None)
