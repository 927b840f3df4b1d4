"""Rewards that are rules on text, numbers and lengths."""

import ast
import operator
import re
from collections import Counter
from collections.abc import Callable
from fractions import Fraction

from mcore_rl.rl.rewards.interface import RewardInput

# A number with or without thousands' commas. What a letter or digit stands right before is part of a name.
NUMBER = re.compile(r"(?<![\w.])[-+]?\$?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+|(?<=\d))(?![\w])")
GSM8K_MARKER = "####"


def answered(text: str, pattern: str) -> str:
    """What a completion answers: the first group of the last match of `pattern`, "" without a match; with an empty
    pattern all of it. Without white space around.
    """
    if not pattern:
        return text.strip()
    matches = list(re.finditer(pattern, text, re.DOTALL))
    return (matches[-1].group(1) or "").strip() if matches else ""


def after_marker(text: str) -> str:
    """What follows the last `####`, as GSM8K marks its answers; the whole text where there is none."""
    return text.rpartition(GSM8K_MARKER)[2].strip()


def exact(judged: RewardInput, *, answer_pattern: str) -> float:
    """1 when the answer is the reference to the letter, white space around apart."""
    return float(answered(judged.completion, answer_pattern) == judged.answer.strip())


def positions(judged: RewardInput, *, answer_pattern: str) -> float:
    """1 when the answer is the reference, otherwise half the share of its characters that stand where they should:
    a slope towards the exact answer. Missing characters and those in excess count as wrong.
    """
    given, wanted = answered(judged.completion, answer_pattern), judged.answer.strip()
    if given == wanted:
        return 1.0
    right = sum(one == other for one, other in zip(given, wanted, strict=False))
    return 0.5 * right / max(len(given), len(wanted))


def numeric(judged: RewardInput, *, answer_pattern: str) -> float:
    """1 when the last number of the answer is the reference's last number, as in 1,000 = 1000.0."""
    wanted = last_number(after_marker(judged.answer))
    if wanted is None:
        raise ValueError(f"the reference answer {judged.answer!r} holds no number")
    return float(last_number(after_marker(answered(judged.completion, answer_pattern))) == wanted)


def last_number(text: str) -> Fraction | None:
    """The last decimal number of a text, exactly."""
    matches = NUMBER.findall(text)
    return Fraction(matches[-1].replace(",", "").replace("$", "")) if matches else None


def format_matches(judged: RewardInput, *, pattern: str) -> float:
    """1 when the whole completion, white space around apart, matches; a dot matches a line's end too."""
    return float(re.fullmatch(pattern, judged.completion.strip(), re.DOTALL) is not None)


def regex_found(judged: RewardInput, *, pattern: str) -> float:
    """1 when the pattern is found anywhere."""
    return float(re.search(pattern, judged.completion, re.DOTALL) is not None)


def length_within(judged: RewardInput, *, min_tokens: int, max_tokens: int | None) -> float:
    """0 from `min_tokens` to `max_tokens` (None: no limit); outside minus the share that is missing or in excess, down
    to -1.
    """
    length = judged.num_tokens
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


def countdown(judged: RewardInput, *, answer_pattern: str) -> float:
    """1 when the answer is an expression with + - * / of exactly the prompt's numbers that makes its target; both
    are fields of the prompt. What follows an equals sign is not read.
    """
    text = answered(judged.completion, answer_pattern).partition("=")[0].strip()
    if len(text) > MAX_EXPRESSION:
        return 0.0
    try:
        tree = ast.parse(text, mode="eval").body
        value, numbers = _evaluate(tree)
    except (SyntaxError, ValueError, ZeroDivisionError):
        return 0.0
    return float(value == judged.fields["target"] and Counter(numbers) == Counter(judged.fields["numbers"]))


def _evaluate(node: ast.expr) -> tuple[Fraction, list[int]]:
    """The value and the numbers used; ValueError for anything but the four operations on whole numbers."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return Fraction(node.value), [node.value]
    if not isinstance(node, ast.BinOp) or type(node.op) not in OPERATORS:
        raise ValueError(f"not arithmetic: {ast.dump(node)}")
    left, left_numbers = _evaluate(node.left)
    right, right_numbers = _evaluate(node.right)
    return OPERATORS[type(node.op)](left, right), left_numbers + right_numbers
