"""Rule-based rewards on text, numbers and lengths."""

import ast
import operator
import re
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from numbers import Real
from typing import Any

from mcore_rl.rl.rewards.interface import RewardInput
from mcore_rl.rl.rewards.numbers import last_number, stated_number

GSM8K_MARKER = "####"


def answered(text: str, pattern: str) -> str:
    """Return the answer in `text`, stripped: the first group of the last match of `pattern`, or "" without a match.

    With an empty pattern the answer is the whole text.
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
    """Return 1 if the answer equals the reference, else half the fraction of characters at the correct position.

    This gives a slope towards the exact answer. Missing and extra characters count as wrong.
    """
    given, wanted = answered(scored.completion, answer_pattern), scored.answer.strip()
    if given == wanted:
        return 1.0
    right = sum(character == target for character, target in zip(given, wanted, strict=False))
    return 0.5 * right / max(len(given), len(wanted))


def numeric(scored: RewardInput, *, answer_pattern: str) -> float:
    """Return 1 if the answer's number equals the reference's (1,000 = 1000.0 = 1e3, 1/2 = 0.5, 50% = 50), else 0.

    After `####`, or in the match of `answer_pattern`, the number is the stated number (`stated_number`); in other text
    it is the last number.

    Raises:
        ValueError: if the reference answer is not one number.
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
    """Return 0 for a length between `min_tokens` and `max_tokens` (None: no limit), else a penalty down to -1.

    The penalty is minus the missing or excess tokens as a fraction of the limit.
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
    """Return 1 if the answer is an arithmetic expression (+ - * /) that equals the target, else 0.

    It must use each of the prompt's numbers exactly once. `numbers` and `target` are fields of the prompt. Text after
    an equals sign is ignored.

    Raises:
        ValueError: if the prompt's `numbers` or `target` are not numbers.
    """
    target = _exactly(scored.fields["target"])
    wanted = Counter(map(_exactly, scored.fields["numbers"]))
    text = answered(scored.completion, answer_pattern).partition("=")[0].strip()
    if len(text) > MAX_EXPRESSION:
        return 0.0
    try:
        tree = ast.parse(text, mode="eval").body
        value, numbers = _evaluate(tree)
    except (SyntaxError, ValueError, ZeroDivisionError):
        return 0.0
    return float(value == target and Counter(map(Fraction, numbers)) == wanted)


def _exactly(number: Any) -> Fraction:
    """Convert a number of a prompt's fields as it is written: 0.1 is exactly a tenth, not the nearest binary number."""
    if isinstance(number, bool) or not isinstance(number, Real):
        raise ValueError(f'{number!r} in the prompt\'s fields "target" and "numbers" is no number')
    return Fraction(str(number))


def _evaluate(node: ast.expr) -> tuple[Fraction, list[int]]:
    """Return the value and the numbers used. Raises ValueError for anything but + - * / on whole numbers."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return Fraction(node.value), [node.value]
    if not isinstance(node, ast.BinOp) or type(node.op) not in OPERATORS:
        raise ValueError(f"not arithmetic: {ast.dump(node)}")
    left, left_numbers = _evaluate(node.left)
    right, right_numbers = _evaluate(node.right)
    return OPERATORS[type(node.op)](left, right), left_numbers + right_numbers
