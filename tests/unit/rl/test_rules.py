"""Rules that judge text."""

from fractions import Fraction

import pytest
from math_verify import parse, verify

from mcore_rl.rl.rewards import sandbox
from mcore_rl.rl.rewards.interface import RewardInput
from mcore_rl.rl.rewards.mathematics import math_equal
from mcore_rl.rl.rewards.rules import (
    answered,
    countdown,
    exact,
    format_matches,
    last_number,
    length_within,
    numeric,
    positions,
    regex_found,
)
from tests.unit.rl.references import FORMS

TAG = r"<answer>(.*?)</answer>"


def scored(completion, answer="", num_tokens=5, **fields):
    return RewardInput(
        prompt="?", completion=completion, answer=answer, num_tokens=num_tokens, is_truncated=False, fields=fields
    )


@pytest.mark.parametrize(
    ("text", "pattern", "wanted"),
    [
        (" a b \n", "", "a b"),
        ("<answer>1</answer> no, <answer> 2\n</answer>", TAG, "2"),
        ("nothing", TAG, ""),
        ("x", r"x|(y)", ""),
        ("12", "(.*)", "12"),  # this pattern matches the end of the text too
    ],
)
def test_the_answer_is_the_last_match_or_all(text, pattern, wanted):
    assert answered(text, pattern) == wanted


@pytest.mark.parametrize(
    ("completion", "pattern", "reward"),
    [("dcba", "", 1), (" dcba\n", "", 1), ("dcb", "", 0), ("<answer>dcba</answer>", TAG, 1), ("dcba", TAG, 0)],
)
def test_exact(completion, pattern, reward):
    assert exact(scored(completion, "dcba"), answer_pattern=pattern) == reward


@pytest.mark.parametrize(
    ("completion", "reward"),
    [("dcba", 1), ("dcbb", 0.375), ("dcb", 0.375), ("dcbaxxxx", 0.25), ("", 0), ("abcd", 0), ("dxbx", 0.25)],
)
def test_positions(completion, reward):
    assert positions(scored(completion, "dcba"), answer_pattern="") == reward


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("12", 12),
        ("it is 1,234,567.50 in all.", Fraction("1234567.5")),
        ("from 3 to -4", -4),
        ("$1,000.", 1000),
        ("-$5", -5),
        (".5", Fraction(1, 2)),
        ("7-5", 5),
        ("3.", 3),
        ("x2 and 10th", None),
        ("none", None),
        ("it is 1/2", Fraction(1, 2)),
        ("3 1/2 cups", Fraction(7, 2)),
        ("-3 1/2", Fraction(-7, 2)),
        ("1e-05", Fraction(1, 100_000)),
        ("2.5e-3.", Fraction(1, 400)),
        ("6.02E23", 602 * 10**21),
        (r"$6.02 \times 10^{23}$", 602 * 10**21),
        (r"\boxed{\frac{1}{2}}", Fraction(1, 2)),
        (r"-3\frac{1}{2}", Fraction(-7, 2)),
        (r"$1{,}000$ or 1,\!000", 1000),
        ("x = \N{MINUS SIGN} 3", -3),
        ("x = - 3", -3),
        ("- 3 apples\n- 4 pears", 4),  # a list
        ("5 \N{MINUS SIGN} 3", 3),
        ("12km", 12),
        ("x^2 + y^{-3}", None),
        ("42%", 42),
        # What cannot be read whole is not read in parts.
        ("12, or 70,0000", None),
        ("2^3", None),
        ("2^{n+1}", None),
        ("1/2/3", None),
        ("1/0", None),
        ("1.2.3", None),
        ("1e999", None),
        ("9" * 5000, None),
    ],
)
def test_the_last_number_of_a_text(text, number):
    assert last_number(text) == number


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("3 * 4 = 12", "12", 1),
        ("so 12.0", "a long way\n#### 12", 1),
        ("12 it is #### 13", "12", 0),
        ("1000", "1,000", 1),
        ("nothing", "12", 0),
        ("-12", "12", 0),
        ("#### 12km", "12", 1),
        ("#### 12 (in 3 days)", "12", 1),
        ("#### 12 (in 3 days)", "3", 0),
        ("#### \N{MINUS SIGN}12", "-12", 1),
        ("12", "#### \N{MINUS SIGN}12", 0),
        ("it is \N{MINUS SIGN}12", "-12", 1),
        ("#### **12**", "12", 1),
        ("#### 3 * 4 = 12", "12", 1),
        ("#### 3 * 4", "4", 0),
        ("#### 1/2", "0.5", 1),
        ("#### 1/2", "2", 0),
        ("#### 12\n\nIn 3 days.", "12", 1),
        ("#### $1,200.50 each", "1200.5", 1),
        ("#### none", "12", 0),
        ("1/2", "1/2", 1),
        ("2", "1/2", 0),
        ("0.00001", "1e-05", 1),
        ("5", "1e-05", 0),
        ("0.0025", "2.5e-3", 1),
        ("602000000000000000000000", "6.02e23", 1),
        ("3.5", "3 1/2", 1),
        ("0.5", r"\frac{1}{2}", 1),
        ("#### 1e3", "1000", 1),
        ("#### 3 1/2", "3.5", 1),
        ("#### - 3", "-3", 1),
        ("#### 70,0000", "70", 0),
        ("#### 12 or 13", "12", 0),
        ("#### 12, 13", "12", 0),
        (r"#### 2\sqrt{3}", "2", 0),
        # A unit, also percent, is left out.
        ("50%", "50", 1),
        ("50", "50%", 1),
        ("0.5", "50%", 0),
        ("12 dollars", "$12", 1),
    ],
)
def test_numeric(completion, answer, reward):
    assert numeric(scored(completion, answer), answer_pattern="") == reward


@pytest.mark.parametrize("rule", [numeric, math_equal])
def test_a_reference_that_cannot_be_compared_is_an_error_not_a_zero(rule):
    with pytest.raises(ValueError, match="reference answer"):
        rule(scored("12", " "), answer_pattern="")


@pytest.mark.parametrize(
    "answer", ["2 and 3", "3 * 4", "(1, 2)", "3:30", "2x + 5", r"2\sqrt{3}", "70,0000", "1 000", "x^2"]
)
def test_a_reference_that_is_not_one_number_is_an_error_not_one_of_its_numbers(answer):
    with pytest.raises(ValueError, match="is not one number"):
        numeric(scored("3", answer), answer_pattern="")


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("Thus \\boxed{\\frac{1}{2}}.", "0.5", 1),
        ("The answer is $1{,}000$.", "1,000", 1),
        ("#### 72 dollars", "so many\n#### 72", 1),
        ("#### 73", "so many\n#### 72", 0),
        ("\\boxed{1+2x}", "2x+1", 1),
        ("\\boxed{2x}", "2x+1", 0),
        ("\\boxed{(1, 2]}", "(1,2]", 1),
        ("I do not know", "3", 0),
        ("", "3", 0),
        ("#### 12km", "12", 1),
        ("#### 12 (in 3 days)", "12", 1),
        ("#### 12 (in 3 days)", "3", 0),
        ("#### \N{MINUS SIGN}12", "-12", 1),
        ("#### **12**", "12", 1),
        ("#### 12 km in 3 days", "#### 12", 1),
        ("#### 12 or 13", "12", 0),
        ("#### 3\\pi", "3", 0),
        ("#### 1/2", "0.5", 1),
        ("\\boxed{0.00001}", "1e-05", 1),
        ("\\boxed{5}", "1e-05", 0),
        ("\\boxed{6.02 \\times 10^{23}}", "6.02e23", 1),
        ("\\boxed{2^3 \\times 10^2x}", "800x", 1),
        ("#### \\frac{1}{2}\\pi", "\\frac{\\pi}{2}", 1),
        ("\\boxed{\\{\\frac{\\sqrt{x^{2}}}{3}\\}}", "\\{\\frac{\\sqrt{x^{2}}}{3}\\}", 1),
        ("The answer is 3 1/2.", "3.5", 1),
        ("\\boxed{3\\frac{1}{2}}", "3 1/2", 1),
        ("\\boxed{2}", "3 1/2", 0),  # math-verify's own reading of 3 1/2
        # Of several boxes the last counts, and those that are joined to it.
        ("First \\boxed{3}, then \\boxed{4}", "4", 1),
        ("First \\boxed{3}, then \\boxed{4}", "3", 0),
        ("First \\boxed{3}, then \\boxed{4}", "3,4", 0),
        ("$\\boxed{3}$ and $\\boxed{4}$", "3,4", 1),
        ("$\\boxed{3}$ or $\\boxed{4}$", "4", 0),
        ("\\boxed{4}\n\\boxed{4}", "4", 1),
        ("\\boxed{\\text{so } \\boxed{4}}", "4", 1),
        ("\\boxed{4} or \\boxed{", "4", 1),
        # Percent is either the number or its hundredth.
        ("\\boxed{50\\%}", "50", 1),
        ("\\boxed{50\\%}", "0.5", 1),
        ("\\boxed{60}", "60 miles per hour", 1),
        ("\\boxed{12 km}", "12", 1),
        ("\\boxed{5}", "The price is 5 dollars.", 1),
        ("\\boxed{12}", "Since 3 is odd, the answer is 12", 1),
        # A part of an answer is wrong.
        ("\\boxed{-14}", r"\begin{pmatrix} -2 \\ -14 \end{pmatrix}", 0),
        ("\\boxed{2}", r"\begin{cases} 1 \\ 2 \end{cases}", 0),
        ("\\boxed{3}", "3xy", 0),
        ("\\boxed{5}", "2ab+5", 0),
        ("\\boxed{3}", r"x=2 \text{ and } y=3", 0),
        ("\\boxed{15}", "12 and 15", 0),
        ("\\boxed{3x}", "3", 0),
        ("\\boxed{3(x+1)}", "3", 0),
        ("\\boxed{3!}", "3", 0),
        ("\\boxed{4}", "between 3 and 4", 0),
        ("\\boxed{4}", r"4\text{ hours } 30\text{ minutes}", 0),
        # Words are compared as text.
        ("\\boxed{\\text{No solution.}}", "no solution", 1),
        ("no solution", "no solution", 1),
        ("#### Monday", "Tuesday", 0),
        ("\\boxed{no}", "yes", 0),
        ("\\boxed{listen}", "silent", 0),  # as products of variables they are equal
    ],
)
def test_mathematics(completion, answer, reward):
    assert math_equal(scored(completion, answer), answer_pattern="") == reward


@pytest.mark.matrix("numbers, units and words")
@pytest.mark.parametrize("form", FORMS)
def test_a_reference_is_read_as_math_verify_reads_it_between_dollars(form):
    rows = [row.split(" | ") for row in FORMS[form].strip().splitlines()]
    assert len(rows) == 40
    places = [("So \\boxed{%s}.", ""), ("So\n#### %s", ""), ("<answer>%s</answer>", TAG)]
    for index, (reference, equal, other) in enumerate(
        (row[0], row[-1], following[0]) for row, following in zip(rows, rows[1:] + rows[:1], strict=True)
    ):
        wanted = parse(f"${reference}$", parsing_timeout=None)
        place, pattern = places[index % len(places)]
        for answer in (equal, other)[: 2 - index % 2]:
            oracle = verify(wanted, parse(f"${answer}$", parsing_timeout=None), timeout_seconds=None)
            found = math_equal(scored(place % answer, reference), answer_pattern=pattern)
            assert found == oracle, (reference, answer)
            assert oracle or answer is other, (reference, answer)


@pytest.mark.parametrize("rule", [numeric, math_equal])
@pytest.mark.parametrize("part", ["9", "1,", "{", "(", "(a", "\\boxed{1},", "a ", "^{"])
def test_a_long_answer_without_sense_is_wrong(rule, part):
    assert rule(scored("#### 13 and (" + 30_000 * part, "12"), answer_pattern="") == 0


def test_an_answer_within_a_tag_may_have_a_unit_or_be_mathematics():
    assert numeric(scored("in 3 days <answer>12km (2 h)</answer>", "12"), answer_pattern=TAG) == 1
    assert math_equal(scored("7 <answer>1/2</answer> 9", "0.5"), answer_pattern=TAG) == 1
    assert math_equal(scored("0.5", "0.5"), answer_pattern=TAG) == 0


def test_format_is_of_the_whole_and_regex_of_any_part():
    pattern = r"<think>.*</think>\s*<answer>.*</answer>"
    good = "<think>a\nb</think>\n<answer>1</answer>"
    assert format_matches(scored(good + "\n"), pattern=pattern) == 1
    assert format_matches(scored(good + " more"), pattern=pattern) == 0
    assert regex_found(scored(good + " more"), pattern=pattern) == 1
    assert regex_found(scored("<think>"), pattern=pattern) == 0


@pytest.mark.parametrize(("length", "reward"), [(4, -0.5), (8, 0), (20, 0), (25, -0.25), (100, -1), (0, -1)])
def test_length(length, reward):
    assert length_within(scored("", num_tokens=length), min_tokens=8, max_tokens=20) == reward


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("(3 + 5) * 3", 1),
        ("3*3 + 5*3", 0),  # a 3 too many
        ("3 * (5 + 3) = 24", 1),
        ("5 * 3 + 3", 0),  # 18
        ("24", 0),
        ("3 ** 5 - 3", 0),
        ("3 / (5 - 5)", 0),
        ("__import__('os')", 0),
        ("(((", 0),
        ("(3+5)*3" + "+0" * 200, 0),
        ("", 0),
        ("3 * (5 + 3) =", 1),
        ("3 * (5 + 3) = 3 * 8 = 24.", 1),
        ("3 * (5 + 3) = 25", 0),
        ("3 * (5 + 3) = 3 * 9 = 24", 0),
        ("3 * (5 + 3) = 24 or 25", 0),
        ("3 * (0b101 + 3)", 0),
        ("3 * (0x5 + 3)", 0),
        ("3 * (50e-1 + 3)", 0),
        ("3 * (5_ + 3)", 0),
        ("3 * (5j + 3)", 0),
        ("3 * (\u0665 + 3)", 0),  # an Arabic digit 5
        ("3 * (5.0000000000000000001 + 3)", 0),  # a binary number could not tell it from 5
    ],
)
def test_countdown_takes_any_expression_of_the_numbers_that_makes_the_target(completion, reward):
    assert countdown(scored(completion, target=24, numbers=[3, 5, 3]), answer_pattern="") == reward


def test_numbers_of_countdown_are_those_that_are_written_and_are_divided_exactly():
    assert countdown(scored("8 / (3 - 8 / 3)", target=24, numbers=[3, 3, 8, 8]), answer_pattern="") == 1
    assert countdown(scored("1 / 10", target=0.1, numbers=[1, 10]), answer_pattern="") == 1
    assert countdown(scored("1 / 10", target=0.1, numbers=[1.0, 10]), answer_pattern="") == 1
    assert countdown(scored("1 / 10 = 0.1", target=0.1, numbers=[1, 10]), answer_pattern="") == 1
    assert countdown(scored("3 - 8 = -5", target=-5, numbers=[3, 8]), answer_pattern="") == 1
    assert countdown(scored("5 * 1_0 = 50", target=50, numbers=[5, 10]), answer_pattern="") == 0
    assert countdown(scored("2 * 5 = 11", target=10, numbers=[2, 5]), answer_pattern="") == 0
    assert countdown(scored("0b10 * 5", target=10, numbers=[2, 5]), answer_pattern="") == 0


@pytest.mark.parametrize("fields", [{"target": "24"}, {"target": None}, {"target": True}, {"numbers": ["3", 5, 3]}])
def test_fields_of_countdown_that_no_answer_could_equal_are_an_error(fields):
    given = {"target": 24, "numbers": [3, 5, 3]} | fields
    with pytest.raises(ValueError, match="is no number"):
        countdown(scored("3 * (5 + 3)", **given), answer_pattern="")


def test_a_program_reads_nothing_where_the_input_of_a_test_is_null():
    """It read the text None."""
    pairs = [{"input": None, "output": 0}, {"input": [1, 2], "output": None}]
    assert sandbox.tests_of({"tests": pairs}, "tests") == [("", "0"), ("1\n2", "")]
