"""Adapters of reasoning-gym and TextArena, with the packages themselves: pip install 'mcore-rl[environments]'."""

import pickle

import pytest
import reasoning_gym
import textarena

from mcore_rl.config.rl.rollout import EnvironmentConfig
from mcore_rl.rl.environments.interface import EnvironmentAnswer, EnvironmentCall, EnvironmentWorkers, environment_maker
from mcore_rl.rl.types import Problem


def problem(seed: int) -> Problem:
    return Problem(problem_id=str(seed), prompt="", answer="", fields={"seed": seed, "size": 2})


def workers(name: str, **arguments: str | int) -> EnvironmentWorkers:
    config = EnvironmentConfig(name=name, arguments=dict(arguments), timeout_s=60.0)  # type: ignore[arg-type]
    return EnvironmentWorkers(environment_maker(config), config)


@pytest.mark.parametrize("dataset", ["chain_sum", "leg_counting", "spell_backward", "basic_arithmetic"])
def test_problems_and_scores_are_those_of_reasoning_gym(dataset: str) -> None:
    theirs = [reasoning_gym.create_dataset(dataset, size=1, seed=seed) for seed in range(4)]
    with workers("reasoning_gym", dataset=dataset) as pool:
        starts = pool.run([EnvironmentCall(None, problem(seed)) for seed in range(4)])
        for start, dataset_of_seed in zip(starts, theirs, strict=True):
            entry = dataset_of_seed[0]
            assert [message["role"] for message in start.messages] == ["system", "user"]
            assert start.messages[1]["content"] == entry["question"]
            for given in (entry["answer"], "0", "no"):
                (scored,) = pool.run([EnvironmentCall(start.state, f"So: <answer>{given}</answer>")])
                assert scored.is_done and scored.reward == dataset_of_seed.score_answer(given, entry)
            (right,) = pool.run([EnvironmentCall(start.state, f"<answer>{entry['answer']}</answer>")])
            (none,) = pool.run([EnvironmentCall(start.state, "I do not know")])
            assert right.reward == 1.0 and none.reward < 1.0


def test_fields_of_a_dataset_are_arguments_and_an_unknown_dataset_fails_by_name() -> None:
    with workers("reasoning_gym", dataset="chain_sum", min_terms=2, max_terms=2, help="") as pool:
        (start,) = pool.run([EnvironmentCall(None, problem(1))])
        assert len(start.messages) == 1
        assert sum(start.messages[0]["content"].count(sign) for sign in "+-") == 1
    with workers("reasoning_gym", dataset="no_such") as pool:
        (failed,) = pool.run([EnvironmentCall(None, problem(1))])
        assert "'no_such' not registered" in failed.text


def test_a_game_is_won_by_halving_and_says_what_is_new() -> None:
    """The same moves in TextArena itself give the same reward."""
    with workers("textarena", game="GuessTheNumber-v0") as pool:
        (start,) = pool.run([EnvironmentCall(None, problem(3))])
        assert "between 1 and 20" in start.messages[0]["content"]
        low, high, state, moves = 1, 20, start.state, []
        while True:
            moves.append(f"I say [{(low + high) // 2}]")
            (answer,) = pool.run([EnvironmentCall(state, moves[-1])])
            assert isinstance(answer, EnvironmentAnswer)
            state = answer.state
            if answer.is_done:
                break
            (message,) = answer.messages
            assert "between 1 and 20" not in message["content"]  # the first observation is not said again
            middle = (low + high) // 2
            low, high = (middle + 1, high) if "is higher" in message["content"] else (low, middle - 1)
    assert answer.reward == 1.0 and len(pickle.dumps(state)) < 2000
    game = textarena.make("GuessTheNumber-v0")
    game.reset(num_players=1, seed=3)
    for move in moves:
        game.get_observation()
        is_done, _ = game.step(action=move)
    assert is_done and game.close()[0] == {0: 1.0}
