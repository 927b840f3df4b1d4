"""Rewards of whole groups, among them functions that hang, crash and raise."""

import ctypes
import multiprocessing
import os
import signal
import sys
import time

import pytest
import torch

from mcore_rl.config.rl import RewardConfig
from mcore_rl.errors import ConfigError
from mcore_rl.obs.metrics import reduced
from mcore_rl.rl.objectives.advantages import StepReward
from mcore_rl.rl.rewards.interface import RewardInput, TextStep
from mcore_rl.rl.rewards.score import Reward
from mcore_rl.rl.rewards.worker import Failure, Job, RewardWorkers
from mcore_rl.rl.rollout import token_step
from mcore_rl.rl.types import Completion, Group, Problem, Prompt

OWN = """
import time
def bonus(judged):
    return 0.25 * judged.num_tokens + judged.fields["more"]
def never(judged):
    raise KeyError("lost")
def nan(judged):
    return float("nan")
def steps(judged):
    return [(2, 1.0), (len(judged.completion), 0.5)]
def told(judged):
    return eval(judged.completion)
notafunction = 3
"""


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    name = f"own_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", sys.path[:])
    return name


def group(answer, *texts, **fields):
    problem = Problem(problem_id=f"p-{answer}", prompt="?", answer=answer, fields=fields)
    completions = tuple(
        Completion(
            text=text,
            tokens_T=(1,) * len(text),
            logprobs_T=(0.0,) * len(text),
            policy_version=0,
            finish="stop",
        )
        for text in texts
    )
    return Group(prompt=Prompt(problem=problem, tokens_T=(1,)), completions=completions)


def test_parts_are_weighed_and_added_and_told_by_name(own_module):
    config = RewardConfig(
        parts=("exact", "regex", f"{own_module}:bonus"), weights=(1.0, 0.5, 2.0), regex_pattern="a"
    )
    with Reward(config, max_new_tokens=8) as reward:
        scores = reward([group("ab", "ab", "b", more=1), group("c", "a", "c", more=0)])
    assert scores.parts["exact"].tolist() == [[1, 0], [0, 1]]
    assert scores.parts["regex"].tolist() == [[1, 0], [1, 0]]
    assert scores.parts[f"{own_module}:bonus"].tolist() == [[1.5, 1.25], [0.25, 0.25]]
    assert scores.rewards_PG.tolist() == [[4.5, 2.5], [1.0, 1.5]]
    assert scores.failures == ()
    told = reduced(scores.metrics())
    assert told == {
        "reward/mean": 9.5 / 4,
        "reward/part/exact": 0.5,
        "reward/part/regex": 0.5,
        f"reward/part/{own_module}:bonus": 3.25 / 4,
        "reward/accuracy": 0.5,
        "reward/errors": 0,
    }


def test_a_reward_that_always_raises_or_is_not_a_number_is_counted(own_module):
    config = RewardConfig(parts=("exact", f"{own_module}:never", f"{own_module}:nan"), error_value=-1.0)
    with Reward(config, max_new_tokens=8) as reward:
        scores = reward([group("a", "a", "b")])
    assert scores.rewards_PG.tolist() == [[-1, -2]]
    assert {failed.part.partition(":")[2]: failed.failure for failed in scores.failures} == {
        "never": Failure("raised", "KeyError: 'lost'"),
        "nan": Failure("not_finite", "nan"),
    }
    told = reduced(scores.metrics())
    assert (told["reward/errors"], told["reward/errors_raised"], told["reward/errors_not_finite"]) == (
        4,
        2,
        2,
    )


def test_steps_of_parts_are_weighed_and_those_with_the_same_end_added(own_module):
    config = RewardConfig(
        parts=(f"{own_module}:steps", "exact"),
        weights=(2.0, 4.0),
        overlong_buffer_tokens=4,
        overlong_penalty=1.0,
    )
    with Reward(config, max_new_tokens=8) as reward:
        scores = reward([group("abcdef", "abc", "abcdef")])
    assert scores.rewards_PG.tolist() == [[3.0, 6.5]]
    assert scores.steps_PG == [[((2, 2.0), (3, 1.0)), ((2, 2.0), (6, 4.5))]]
    assert scores.parts[f"{own_module}:steps"].tolist() == [[1.5, 1.5]]


def test_bad_steps_are_counted_by_their_kind(own_module):
    texts = (
        "[(0, 1.0)]",
        "[(2, 1), (2, 1)]",
        "[(99, 1.0)]",
        "[3.0]",
        "[(1.5, 2)]",
        "[(1, float('nan'))]",
        "[]",
    )
    with Reward(RewardConfig(parts=(f"{own_module}:told",), error_value=-1.0), max_new_tokens=8) as reward:
        scores = reward([group("", *texts)])
    assert [failed.failure.kind for failed in scores.failures] == ["bad_steps"] * 5 + ["not_finite"]
    assert scores.rewards_PG.tolist() == [[-1, -1, -1, -1, -1, -1, 0]]
    assert reduced(scores.metrics())["reward/errors_bad_steps"] == 5


def test_a_step_ends_at_the_first_token_with_which_the_text_is_as_long():
    pieces = ["ab", "c", "", "def", "g", "<end>"]
    completion = Completion(
        text="abcdefg", tokens_T=tuple(range(6)), logprobs_T=(0.0,) * 6, policy_version=0, finish="stop"
    )
    ends = [
        token_step(completion, TextStep(end, 0.5), lambda tokens: "".join(pieces[t] for t in tokens))
        for end in range(1, 8)
    ]
    assert ends == [StepReward(end, 0.5) for end in (0, 0, 1, 3, 3, 3, 5)]


def test_completions_near_the_length_limit_lose():
    config = RewardConfig(overlong_buffer_tokens=4, overlong_penalty=0.5)
    with Reward(config, max_new_tokens=8) as reward:
        scores = reward([group("abcd", "abcd", "abcdef", "abcdefgh")])
    assert scores.rewards_PG.tolist() == [[1, -0.25, -0.5]]
    assert scores.parts["overlong"].tolist() == [[0, -0.25, -0.5]]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_module:f", "No module named"),
        ("{own}:f", "has no function f"),
        ("{own}:notafunction", "has no function"),
    ],
)
def test_a_function_that_is_not_there_is_told_before_any_work(own_module, path, message):
    with pytest.raises(ConfigError, match=message):
        Reward(RewardConfig(parts=(path.format(own=own_module),)), max_new_tokens=8)


def obey(judged):
    """A reward function that does what the completion says."""
    if judged.completion == "hang":
        time.sleep(60)
    if judged.completion == "hang in C":
        ctypes.PyDLL(None).sleep(60)  # holds Python's lock: no handler in Python runs
    if judged.completion == "ignore the alarm":
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        time.sleep(60)
    if judged.completion == "crash":
        os.kill(os.getpid(), signal.SIGKILL)
    if judged.completion == "exit":
        os._exit(3)
    if judged.completion == "quit":
        raise SystemExit(4)
    if judged.completion == "pid":
        return os.getpid()
    return len(judged.completion)


def jobs(*texts):
    return [
        Job(
            0, RewardInput(prompt="", completion=text, answer="", num_tokens=1, is_truncated=False, fields={})
        )
        for text in texts
    ]


@pytest.mark.parametrize("workers", [1, 3])
def test_what_hangs_or_crashes_costs_its_own_judgement_only(workers):
    with RewardWorkers([obey], workers=workers, timeout_s=0.4, grace_s=0.8) as judges:
        texts = ["a", "hang", "bb", "hang in C", "ccc", "ignore the alarm", "crash", "exit", "quit", "dddd"]
        outcomes = judges.run(jobs(*texts))
    kinds = [outcome.kind if isinstance(outcome, Failure) else outcome for outcome in outcomes]
    assert kinds == [1, "timeout", 2, "timeout", 3, "timeout", "died", "died", "died", 4]
    assert outcomes[6].text == "the process ended with status -9"


def test_a_judge_that_died_between_two_batches_is_replaced():
    with RewardWorkers([obey], workers=1, timeout_s=5.0) as judges:
        (pid,) = judges.run(jobs("pid"))
        os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.05)
        outcomes = judges.run(jobs("pid", "aa"))
    assert outcomes[1] == 2
    assert outcomes[0] != pid or isinstance(outcomes[0], Failure)


@pytest.mark.parametrize("then", ["idle", "hang in C"])
def test_judges_end_with_the_process_that_started_them(then):
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def start_and_hang():
        judges = RewardWorkers([obey], workers=1, timeout_s=0.5, grace_s=60.0)
        theirs.send([int(pid) for pid in judges.run(jobs("pid"))])
        if then != "idle":
            judges.run(jobs(then))
        time.sleep(60)

    parent = context.Process(target=start_and_hang)
    parent.start()
    pids = ours.recv()
    time.sleep(0.1)
    parent.kill()
    parent.join()
    deadline = time.monotonic() + 5
    while any(is_running(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(is_running(pid) for pid in pids)


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_many_jobs_keep_their_order():
    with RewardWorkers([obey], workers=3, timeout_s=5.0) as judges:
        outcomes = judges.run(jobs(*["x" * (number % 17) for number in range(300)]))
    assert torch.tensor(outcomes).tolist() == [number % 17 for number in range(300)]
