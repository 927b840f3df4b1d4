"""Built-in tasks judged by their own rewards, and prompt files."""

import json

import pytest

from mcore_rl.config.rl.rollout import PromptConfig, RewardConfig
from mcore_rl.errors import DataError
from mcore_rl.rl.rewards.interface import RewardInput
from mcore_rl.rl.rewards.score import part_function
from mcore_rl.rl.rollouts.prompts import TASKS, make_problem, read_problems

GOLDEN = ("make 2112 from 24 11 8:", "(11 * 8) * 24")
"""Of countdown with 3 to 4 numbers, seed 5, number 77; a later version that changed it would break resumed runs."""
PARTS = {
    "arithmetic": "numeric",
    "sorting": "exact",
    "copying": "exact",
    "reversing": "positions",
    "countdown": "countdown",
}


def as_judged(problem, completion):
    return RewardInput(
        prompt=problem.prompt, completion=completion, answer=problem.answer, num_tokens=1, is_truncated=False,
        fields=problem.fields,
    )  # fmt: skip


@pytest.mark.parametrize("task", PARTS)
def test_the_answer_of_every_problem_earns_the_reward_and_another_does_not(task):
    config = PromptConfig(task=task, smallest=2, largest=5)
    reward = part_function(PARTS[task], RewardConfig())
    problems = [make_problem(config, seed=1, index=number) for number in range(200)]
    assert len({problem.prompt for problem in problems}) > 150
    assert [reward(as_judged(problem, problem.answer)) for problem in problems] == [1.0] * 200
    best_of_wrong = 0.5 if task == "reversing" else 0.0
    assert max(reward(as_judged(problem, problem.answer + "1")) for problem in problems) <= best_of_wrong


def test_seeds_are_of_an_environment_and_all_other_tasks_have_answers():
    assert set(TASKS) - set(PARTS) == {"seeds"}
    problems = [make_problem(PromptConfig(task="seeds"), 1, number) for number in range(200)]
    assert len({problem.fields["seed"] for problem in problems}) == 200
    assert {problem.fields["size"] for problem in problems} == {2, 3, 4}


def test_answers_are_what_the_prompts_ask_for():
    for number in range(50):
        left, sign, right, _ = make_problem(PromptConfig(task="arithmetic"), 0, number).prompt.split()
        value = {"+": int(left) + int(right), "-": int(left) - int(right), "*": int(left) * int(right)}[sign]
        assert make_problem(PromptConfig(task="arithmetic"), 0, number).answer == str(value)
        problem = make_problem(PromptConfig(task="sorting", largest=9), 0, number)
        shown = problem.prompt.removeprefix("sort ").removesuffix(":").split()
        assert problem.answer.split() == sorted(shown, key=int)


def test_a_problem_depends_on_task_sizes_seed_and_number_alone():
    config = PromptConfig(task="countdown", smallest=3, largest=4)
    here = make_problem(config, 5, 77)
    assert (here.prompt, here.answer) == GOLDEN
    assert here == make_problem(config, 5, 77)
    assert len({make_problem(config, seed, number).prompt for seed in range(3) for number in range(3)}) == 9


def write(path, *lines):
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines))
    return str(path)


def test_lines_of_a_file_are_problems_and_bad_lines_are_told(tmp_path):
    name = write(
        tmp_path / "p.jsonl",
        {"q": "1 + 1?", "a": "2", "level": 3},
        b"{not json",
        [1],
        {"q": "", "a": "2"},
        {"other": 1},
        {"q": "2 + 2?", "a": 4},
        b"",
        {"q": "x", "a": ["4"]},
        {"q": "x", "a": True},
        b"\xff",
        {"q": "no answer"},
    )
    read = read_problems(PromptConfig(files=(name,), prompt_field="q", answer_field="a", max_bad=None))
    assert [(p.problem_id, p.prompt, p.answer, dict(p.fields)) for p in read.problems] == [
        ("p.jsonl:1", "1 + 1?", "2", {"level": 3}),
        ("p.jsonl:6", "2 + 2?", "4", {}),
        ("p.jsonl:11", "no answer", "", {}),
    ]
    assert [bad.removeprefix(name).split(" (")[0].rstrip(".") for bad in read.bad_lines] == [
        ":2: not JSON", ":3: a JSON list, wanted an object", ":4: no text in 'q'", ":5: no text in 'q'",
        ":8: 'a' holds [\"4\"], neither text nor a number", ":9: 'a' holds true, neither text nor a number",
        ":10: not UTF-8",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("lines", "message"),
    [([], "in 0 lines"), ([{"question": "?"}], "p.jsonl:1: no text in 'prompt' .other keys: question")],
)
def test_a_file_without_a_prompt_is_refused(tmp_path, lines, message):
    with pytest.raises(DataError, match=message):
        read_problems(PromptConfig(files=(write(tmp_path / "p.jsonl", *lines),)))
    with pytest.raises(DataError, match=r"no_such\.jsonl cannot be read"):
        read_problems(PromptConfig(files=("no_such.jsonl",)))


def test_lines_without_an_answer_are_no_prompts_where_the_reward_compares_with_one(tmp_path):
    lacking = write(tmp_path / "lacking.jsonl", {"prompt": "1 + 1?", "solution": "2"}, {"prompt": "2 + 2?"})
    assert len(read_problems(PromptConfig(files=(lacking,))).problems) == 2
    with pytest.raises(DataError, match=r"lacking.jsonl:1: no answer in 'answer'.*other keys: solution.*answer_field"):
        read_problems(PromptConfig(files=(lacking,)), needs_answer=True)
    mixed = write(tmp_path / "mixed.jsonl", {"prompt": "?", "answer": 0}, {"prompt": "?", "answer": " "})
    read = read_problems(PromptConfig(files=(mixed,), max_bad=1), needs_answer=True)
    assert [one.answer for one in read.problems] == ["0"]
    assert [bad.startswith(f"{mixed}:2: ") for bad in read.bad_lines] == [True]


def test_a_task_of_the_users_own_makes_the_same_problem_for_the_same_index(tmp_path, monkeypatch):
    (tmp_path / "own_task.py").write_text(
        "from mcore_rl.rl.rollouts.prompts import TaskProblem\n"
        "def doubling(generator, size):\n"
        "    number = generator.randrange(10**size)\n"
        "    return TaskProblem(prompt=f'{number} doubled', answer=str(2 * number), fields={'size': size})\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    config = PromptConfig(task="own_task:doubling")
    problem = make_problem(config, 1, 7)
    assert problem == make_problem(config, 1, 7) != make_problem(config, 1, 8)
    assert problem.problem_id == "own_task:doubling/1/7"
    assert int(problem.answer) == 2 * int(problem.prompt.split()[0])
    assert config.smallest <= problem.fields["size"] <= config.largest
