"""The environments that ship, as a worker calls them, and what is refused before a run starts."""

import pickle
import shutil

import numpy
import pytest

from mcore_rl.config.rl.rollout import EnvironmentConfig
from mcore_rl.errors import ConfigError
from mcore_rl.rl.environments.builtin import Calculator, Guessing, computed
from mcore_rl.rl.environments.interface import EnvironmentCall, EnvironmentWorkers, environment_maker
from mcore_rl.rl.types import Problem

SUM = Problem(problem_id="p", prompt="12 + 30 =", answer="42")


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("12 + 30", "42"),
        ("-(3 - 10) * 2", "14"),
        ("7 / 2 * 2", "7"),
        ("0.1 + 0.2", "3/10"),
        ("1 / 0", "error: ZeroDivisionError"),
        ("2 ** 9", "error: ValueError"),
        ("__import__('os')", "error: ValueError"),
        ("1 +", "error: SyntaxError"),
        ("(" * 150, "error: "),
        ("9 * " * 60, "error: longer than 200 characters"),
    ],
)
def test_the_calculator_computes_arithmetic_and_nothing_else(expression: str, value: str) -> None:
    assert computed(expression).startswith(value)


def test_a_turn_without_a_call_is_the_answer() -> None:
    calculator = Calculator()
    system, user = calculator.start(SUM)
    assert (system["role"], user) == ("system", {"role": "user", "content": SUM.prompt})
    calculator = pickle.loads(pickle.dumps(calculator))
    call = "I ask: <calculator>1+1</calculator> and <calculator> 12 + 30 </calculator>"
    assert calculator.step(call) == ([{"role": "tool", "content": "42"}], 0.0, False)
    assert calculator.step("42") == ([], 0.0, True)
    short = Calculator(begin="?", end="", help="", role="user")
    assert list(short.start(SUM)) == [user]
    assert short.step("?2*3") == ([{"role": "user", "content": "6"}], 0.0, False)


def test_the_game_is_won_by_halving_and_lost_without_numbers() -> None:
    for seed in range(20):
        problem = Problem(problem_id="p", prompt="", answer="", fields={"seed": seed, "size": 2})
        game = Guessing(guesses=7)
        (message,) = game.start(problem)
        assert "from 0 to 99" in message["content"]
        low, high, is_done, reward = 0, 99, False, 0.0
        while not is_done:
            guess = (low + high) // 2
            messages, reward, is_done = game.step(f"perhaps {guess}")
            if not is_done:
                low, high = (guess + 1, high) if messages[0]["content"] == "higher" else (low, guess - 1)
        assert reward == 1.0
    game = Guessing(guesses=2)
    game.start(problem)
    assert game.step("none") == ([{"role": "user", "content": "no number"}], 0.0, False)
    assert game.step("none")[1:] == (0.0, True)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("textarena", {"game": "GuessTheNumber-v0"}, r"needs `pip install 'mcore-rl\[environments\]'`"),
        ("reasoning_gym", {"dataset": "chain_sum"}, r"needs `pip install 'mcore-rl\[environments\]'`"),
        ("calculator", {"start": "<"}, "do not fit.*unexpected keyword argument 'start'"),
        ("no.such.module:Game", {}, "rl.environment.name names .*No module named 'no'"),
    ],
)
def test_what_cannot_be_made_is_refused_by_name(name: str, arguments: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        environment_maker(EnvironmentConfig(name=name, arguments=dict(arguments)))


def test_without_a_sandbox_no_program_of_the_policy_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda program: None)
    with pytest.raises(ConfigError, match=r'name="python": bubblewrap \(bwrap\) is not'):
        environment_maker(EnvironmentConfig(name="python", arguments={"seconds": 1.5}))


class Comparing:
    """An environment whose reward and end are comparisons of numpy's numbers."""

    def start(self, prompt: Problem) -> list[dict[str, str]]:
        return [{"role": "user", "content": prompt.prompt}]

    def step(self, completion: str) -> tuple[list[dict[str, str]], object, object]:
        is_right = numpy.int64(len(completion)) == numpy.int64(2)
        return [{"role": "user", "content": "again"}], is_right, is_right


@pytest.mark.full
def test_numpy_s_bools_are_rewards_and_ends() -> None:
    assert not isinstance(Comparing().step("ab")[2], bool)
    problem = Problem(problem_id="p", prompt="?", answer="")
    with EnvironmentWorkers(Comparing, EnvironmentConfig()) as workers:
        (start,) = workers.run([EnvironmentCall(None, problem)])
        answers = workers.run([EnvironmentCall(start.state, text) for text in ("ab", "abc")])
    assert [(one.reward, one.is_done) for one in answers] == [(1.0, True), (0.0, False)]
    assert [type(one.is_done) for one in answers] == [bool, bool]
