"""The part `code` of a reward, in bubblewrap."""

import json
import sys
from pathlib import Path

import pytest

from mcore_rl.config.rl.rollout import CodeConfig, RewardConfig
from mcore_rl.rl.rewards.interface import RewardInput
from mcore_rl.rl.rewards.sandbox import code_function
from mcore_rl.rl.rewards.score import Reward
from mcore_rl.rl.types import Completion, Group, Problem, Prompt, single_version

SQUARE = "Here it is:\n```python\ndef square(x):\n    return x * x\n```\nDone."
ASSERTS = ["assert square(3) == 9", "assert square(-2) == 4"]
PAIRS = [{"input": "3\n", "output": "9"}, {"input": "-2\n", "output": "4\n"}]
NOT_DATA = "test 4: TypeError: an object of the program, of class A, is not compared with values"
READS = "x = int(input())\nprint(x * abs(x), ' ')"


def given(completion, tests, **fields):
    return RewardInput(
        prompt="?",
        completion=completion,
        answer="",
        num_tokens=1,
        is_truncated=False,
        fields={"tests": tests, **fields},
    )


@pytest.mark.parametrize(
    ("completion", "tests", "share", "reason"),
    [
        (SQUARE, ASSERTS, 1.0, ""),
        (SQUARE, json.dumps(ASSERTS), 1.0, ""),
        (SQUARE, "\n".join(ASSERTS), 1.0, ""),
        ("def square(x):\n    return 3 * x", ASSERTS, 0.5, "test 2: AssertionError"),
        # Programs that try to pass without passing.
        ("import os; os._exit(0)", ASSERTS, 0.0, "test 1: EOFError: the program has ended"),
        ("import sys; sys.exit(0)", ASSERTS, 0.0, "test 1: not reached"),
        ("print('0'); print('1')\ndef square(x): raise SystemExit", ASSERTS, 0.0, "test 1: SystemExit"),
        ("def square(x)", ASSERTS, 0.0, "test 1: SyntaxError: expected ':'"),
        (READS, PAIRS, 0.5, "for '-2' the output is '-4', wanted '4'"),
        (READS, {"inputs": ["3", ["2", "5"]], "outputs": ["9", "4"]}, 1.0, ""),
        ("print(9)\nraise SystemExit(1)", PAIRS, 0.0, "for '3': status 1"),
    ],
)
def test_the_program_of_a_completion_is_scored_by_the_tests_of_its_prompt(completion, tests, share, reason):
    for partial, wanted in ((True, share), (False, float(share == 1))):
        function = code_function(RewardConfig(parts=("code",), code=CodeConfig(partial=partial)))
        assert function(given(completion, tests)) == (wanted, reason)


def programs(name):
    """The programs of a file with their tests, by name."""
    cases = Path(__file__).with_name(name).read_text(encoding="utf-8").split("\n=== ")[1:]
    texts = {title: text.rstrip("\n").split("\n---\n") for title, _, text in (case.partition("\n") for case in cases)}
    return [pytest.param(program, tests, id=title) for title, (program, *tests) in texts.items()]


@pytest.mark.parametrize(("program", "tests"), programs("honest.txt"))
def test_a_program_that_solves_its_tests_passes_all(program, tests):
    function = code_function(RewardConfig(parts=("code",), code=CodeConfig(timeout_s=20.0)))
    assert function(given(program, tests)) == (1.0, "")


@pytest.mark.parametrize(("program", "tests"), programs("attacks.txt"))
def test_a_program_that_does_not_solve_its_tests_passes_none(program, tests):
    """Whatever it does to its interpreter, to its pipes and to what its functions return."""
    function = code_function(RewardConfig(parts=("code",), code=CodeConfig(timeout_s=20.0, partial=True)))
    share, reason = function(given(program, tests))
    assert share == 0
    assert reason.startswith("test 1: ")


def test_the_tests_of_a_program_with_packages_take_arrays_as_data():
    program = (
        "import numpy as np\nclass A(np.ndarray):\n    __eq__ = lambda self, other: np.array([True])\n"
        "def double(x): return 2 * x\ndef mean(x): return x.mean()\n"
        "def count(x): return np.int64(len(x))\ndef fake(x): return x.view(A)"
    )
    tests = [
        "import numpy as np\nx = np.array([[1.0, 2.0]])\nassert np.allclose(double(x), [[2, 4]])",
        "assert double(x).shape == (1, 2) and double(x).dtype == x.dtype",
        "assert mean(x) == 1.5 and abs(mean(x) - 1.5) < 1e-9 and count(x) == 1 and count(x) + 1 == 2",
        "assert (fake(x) == x + 1).all()",
    ]
    function = code_function(
        RewardConfig(
            parts=("code",), code=CodeConfig(python=sys.executable, partial=True, timeout_s=60.0, memory_mib=4096)
        )
    )
    assert function(given(program, tests)) == (0.75, NOT_DATA)


def test_a_program_that_does_not_end_is_wrong_and_one_without_tests_fails():
    code = CodeConfig(timeout_s=1.5, tests_field="checks")
    function = code_function(RewardConfig(parts=("code",), code=code))
    assert function(given("while True: pass", None, checks=ASSERTS)) == (0.0, "test 1: the time was over")
    with pytest.raises(ValueError, match='field "checks" is 3; wanted tests'):
        function(given(SQUARE, ASSERTS, checks=3))


def test_a_reward_has_code_as_a_part_that_decides_what_is_correct():
    problem = Problem(problem_id="p", prompt="?", answer="", fields={"tests": ASSERTS})
    completions = tuple(
        Completion(text=text, tokens_T=(1,), logprobs_T=(0.0,), versions=single_version(0, 1), finish="stop")
        for text in (SQUARE, "def square(x): return 9")
    )
    group = Group(prompt=Prompt(problem=problem, tokens_T=(1,)), completions=completions)
    with Reward(
        RewardConfig(parts=("length", "code"), correct="code", length_max_tokens=4), max_new_tokens=8
    ) as reward:
        scores = reward([group])
    assert scores.parts["code"].tolist() == [[1.0, 0.0]]
    assert scores.correct_PG is not None
    assert scores.correct_PG.tolist() == [[1.0, 0.0]]
    assert scores.reasons_PG[0][1] == {"code": "test 2: AssertionError"}
