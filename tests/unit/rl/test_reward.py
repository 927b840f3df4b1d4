"""Rewards of whole groups, among them functions that hang, crash and raise."""

import ctypes
import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import pytest

from mcore_rl.config.rl.rollout import RewardConfig, RolloutConfig
from mcore_rl.config.rl_run import RlConfig
from mcore_rl.errors import ConfigError, TrainingError
from mcore_rl.metrics.metrics import reduced
from mcore_rl.rl.rewards.interface import Job, RewardInput, RewardWorkers, TextStep
from mcore_rl.rl.rewards.score import FailureReport, Reward, refuse_failing_parts, try_reward
from mcore_rl.rl.rollouts.rollout import Rollouts, _ReplicaScores, token_steps
from mcore_rl.rl.rollouts.signal import constant_groups
from mcore_rl.rl.types import Episode, Group, Problem, Prompt, StepReward, Turn
from mcore_rl.rl.workers import MAX_TEXT, MAX_TRACEBACK, FailedScore
from tests.emitted import rows_of
from tests.unit.rl.groups import completion_of, text_group

OWN = """
import time
def bonus(scored):
    return 0.25 * scored.num_tokens + scored.fields["more"]
def never(scored):
    raise KeyError("lost")
def nan(scored):
    return float("nan")
def steps(scored):
    return [(2, 1.0), (len(scored.completion), 0.5)]
def half(scored):
    return 0.5
def quarter(scored):
    return 0.25
def evaluated(scored):
    return eval(scored.completion)
def sometimes(scored):
    if scored.completion == "raise":
        raise ValueError("as asked")
    return float(len(scored.completion))
notafunction = 3
"""


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    name = f"own_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", sys.path[:])
    return name


def scored(config, *groups):
    with Reward(config, max_new_tokens=8) as reward:
        return reward(groups)


def test_parts_are_weighed_and_added_and_told_by_name(own_module):
    config = RewardConfig(parts=("exact", "regex", f"{own_module}:bonus"), weights=(1.0, 0.5, 2.0), regex_pattern="a")
    scores = scored(config, text_group("ab", "ab", "b", more=1), text_group("c", "a", "c", more=0))
    assert scores.parts["exact"].tolist() == [[1, 0], [0, 1]]
    assert scores.parts["regex"].tolist() == [[1, 0], [1, 0]]
    assert scores.parts[f"{own_module}:bonus"].tolist() == [[1.5, 1.25], [0.25, 0.25]]
    assert scores.rewards_PG.tolist() == [[4.5, 2.5], [1.0, 1.5]]
    assert scores.failures == ()
    metrics = reduced(scores.metrics())
    assert metrics == {
        "reward/unscored_completions": 0,
        "reward/mean": 9.5 / 4,
        "reward/part/exact": 0.5,
        "reward/part/regex": 0.5,
        f"reward/part/{own_module}:bonus": 3.25 / 4,
        "reward/accuracy": 0.5,
        "reward/errors": 0,
    }


@pytest.mark.full
def test_completions_with_equal_parts_have_equal_rewards_in_every_bit(own_module):
    """A product of matrices gives the last ones of 15 another last bit, and their groups a signal."""
    parts = ("exact", "positions", "regex", f"{own_module}:half", f"{own_module}:quarter")
    config = RewardConfig(parts=parts, weights=(1.0, 0.2, 0.1, 0.1, 0.1), regex_pattern="a")
    rewards_PG = scored(config, *[text_group("x", *["ab"] * 5) for _ in range(3)]).rewards_PG
    assert set(rewards_PG.flatten().tolist()) == {0.1 + 0.1 * 0.5 + 0.1 * 0.25}
    assert constant_groups(rewards_PG).all()


def test_a_reward_that_always_raises_or_is_not_a_number_is_counted(own_module):
    config = RewardConfig(parts=("exact", f"{own_module}:never", f"{own_module}:nan"), error_value=-1.0)
    scores = scored(config, text_group("a", "a", "b"))
    assert scores.rewards_PG.tolist() == [[-1, -2]]
    failures = {failed.part.partition(":")[2]: (failed.failure.kind, failed.failure.text) for failed in scores.failures}
    assert failures == {"never": ("raised", "KeyError: 'lost'"), "nan": ("not_finite", "nan")}
    metrics = reduced(scores.metrics())
    assert (metrics["reward/errors"], metrics["reward/errors_raised"], metrics["reward/errors_not_finite"]) == (4, 2, 2)
    assert metrics["reward/unscored_completions"] == 0


def test_a_completion_whose_score_failed_has_no_reward_and_counts_in_no_mean(own_module):
    config = RewardConfig(parts=("exact", f"{own_module}:sometimes"))
    scores = scored(config, text_group("ab", "ab", "raise", "b"), text_group("a", "raise", "raise", "a"))
    rewards = [[None if math.isnan(x) else x for x in row] for row in scores.rewards_PG.tolist()]
    assert rewards == [[3.0, None, 1.0], [None, None, 2.0]]
    assert scores.steps_PG[0][1] == scores.steps_PG[1][0] == ()
    metrics = reduced(scores.metrics())
    assert metrics["reward/mean"] == 2.0
    assert metrics[f"reward/part/{own_module}:sometimes"] == pytest.approx(4 / 3)
    assert metrics["reward/part/exact"] == metrics["reward/accuracy"] == pytest.approx(2 / 6)
    assert metrics["reward/unscored_completions"] == metrics["reward/errors"] == 3


@pytest.mark.full
def test_the_first_failure_of_each_kind_is_reported_with_traceback_and_sample(own_module, tmp_path):
    said = []
    report = FailureReport(said.append, tmp_path)
    with Reward(RewardConfig(parts=(f"{own_module}:never", f"{own_module}:nan")), max_new_tokens=8) as reward:
        for answer in ("first", "second"):
            report.add(reward([text_group(answer, "given", "other")]).failures)
    assert len(said) == 2
    assert "KeyError: 'lost'" in said[0] and 'raise KeyError("lost")' in said[0]
    for word in ("Traceback", f"{own_module}.py", "in never", "p-first", "'given'", "'first'"):
        assert word in said[0]
    assert "worker.py" not in said[0]  # frames above the function are ours
    lines = [json.loads(line) for line in (tmp_path / "reward_failures.jsonl").read_text().splitlines()]
    assert [(one["part"], one["kind"]) for one in lines] == [
        (f"{own_module}:never", "raised"),
        (f"{own_module}:nan", "not_finite"),
    ]
    assert lines[0]["traceback"].endswith("KeyError: 'lost'\n") and lines[0]["completion"] == "given"


@pytest.mark.matrix("8-1.0-False")
@pytest.mark.parametrize(("num_failed", "limit", "ends"), [(7, 0.9, False), (8, 0.9, True), (8, 1.0, False)])
def test_a_part_that_fails_for_more_than_the_fraction_ends_the_run(own_module, num_failed, limit, ends):
    config = RewardConfig(parts=("exact", f"{own_module}:never"))
    failures = scored(config, text_group("a", "b")).failures
    counts = {f"{own_module}:never": num_failed, "exact": 1}
    if not ends:
        refuse_failing_parts(counts, 8, failures, limit)
        return
    with pytest.raises(TrainingError, match=r"(?s)never\" failed for 8 of 8.*KeyError: 'lost'.*Traceback"):
        refuse_failing_parts(counts, 8, failures, limit)


def test_a_trial_on_reference_answers_refuses_what_always_fails(own_module):
    prompts = [text_group(answer).prompt for answer in ("ab", "raise")]
    failing = RewardConfig(parts=("exact", f"{own_module}:never"))
    with pytest.raises(TrainingError, match="failed for 4 of 4 completions of a trial on reference answers"):
        try_reward(failing, 8, prompts, list)
    assert len(try_reward(failing.model_copy(update={"max_failed_fraction": 1.0}), 8, prompts, list)) == 4
    # The completions are each prompt's reference answer and the other's.
    (sometimes, other) = try_reward(RewardConfig(parts=(f"{own_module}:sometimes",)), 8, prompts, list)
    assert (sometimes.problem_id, other.problem_id) == ("p-ab", "p-raise")


@pytest.mark.matrix("(0.5, 'because')-0.5-because")
@pytest.mark.parametrize(
    ("returned", "value", "reason"),
    [
        ("(0.5, 'because')", 0.5, "because"),
        ("(1, None)", 1.0, ""),
        ("{'score': 0.25, 'reason': 'near', 'digits': 3}", 0.25, "near; digits: 3"),
        ("{'reward': True}", 1.0, ""),
        ("([(1, 0.5), (2, 0.25)], 'steps')", 0.75, "steps"),
        ("{'score': [(1, 0.5)]}", 0.5, ""),
        ("[(1, 0.5), (3, 1.0)]", 1.5, ""),
    ],
)
def test_a_reward_may_come_with_its_reason(own_module, returned, value, reason):
    part = f"{own_module}:evaluated"
    scores = scored(RewardConfig(parts=(part,)), text_group("", returned))
    assert scores.failures == ()
    assert scores.rewards_PG.item() == value
    assert scores.reasons_PG == [[{part: reason} if reason else {}]]


@pytest.mark.matrix("None", "{}")
@pytest.mark.parametrize("returned", ["None", "{}", "{'value': 1}", "{'score': 1, 'reward': 2}"])
def test_a_return_without_one_score_names_what_is_wanted(own_module, returned):
    (failed,) = scored(RewardConfig(parts=(f"{own_module}:evaluated",)), text_group("", returned)).failures
    assert "wanted: a number, (number, reason), a dict with 'score', or steps" in failed.failure.text


@pytest.mark.full
@pytest.mark.parametrize("error_value", [None, -1.0])
def test_a_part_of_weight_0_that_fails_takes_no_reward_away(own_module, error_value):
    part = f"{own_module}:sometimes"
    config = RewardConfig(parts=("exact", part), weights=(1.0, 0.0), error_value=error_value)
    scores = scored(config, text_group("raise", "raise", "b"))
    assert scores.rewards_PG.tolist() == [[1.0, 0.0]]
    assert scores.steps_PG == [[((5, 1.0),), ((1, 0.0),)]]
    # It is reported all the same.
    assert [failed.part for failed in scores.failures] == [part]
    assert math.isnan(scores.parts[part][0, 0]) == (error_value is None)
    metrics = reduced(scores.metrics())
    assert (metrics["reward/unscored_completions"], metrics["reward/errors"]) == (0, 1)


@pytest.mark.full
def test_a_part_that_does_not_apply_is_left_out_of_the_sum_and_of_its_means(own_module):
    part = f"{own_module}:evaluated"
    config = RewardConfig(parts=("length", part), weights=(1.0, 2.0), length_max_tokens=99)
    texts = ("None", "(None, 'no code')", "{'score': None}", "0.5")
    scores = scored(config, text_group("", *texts))
    assert scores.rewards_PG.tolist() == [[0.0, 0.0, 0.0, 1.0]] and scores.failures == ()
    assert scores.steps_PG == [[((4, 0.0),), ((17, 0.0),), ((15, 0.0),), ((3, 1.0),)]]
    assert scores.reasons_PG[0][1] == {part: "no code"}
    metrics = reduced(scores.metrics())
    assert (metrics[f"reward/part/{part}"], metrics["reward/mean"]) == (0.5, 0.25)
    assert (metrics["reward/unscored_completions"], metrics["reward/errors"]) == (0, 0)


@pytest.mark.matrix("weights0-0")
@pytest.mark.parametrize(("weights", "num_failed"), [((1.0, 1.0), 0), ((0.0, 1.0), 1), ((0.0, 0.0), 0)])
def test_a_completion_to_which_no_part_with_a_weight_applies_has_no_reward(own_module, weights, num_failed):
    config = RewardConfig(parts=("exact", f"{own_module}:evaluated"), weights=weights)
    scores = scored(config, text_group("None", "None"))
    assert [failed.failure.kind for failed in scores.failures] == ["bad_reply"] * num_failed
    assert math.isnan(scores.rewards_PG.item()) == bool(num_failed)


@pytest.mark.full
def test_numpy_s_bool_is_a_value_of_a_step_and_of_a_score(own_module):
    scores = scored(
        RewardConfig(parts=(f"{own_module}:evaluated",)),
        text_group("", "[(1, __import__('numpy').bool_(True))]", "__import__('numpy').bool_(1)"),
    )
    assert scores.failures == () and scores.rewards_PG.tolist() == [[1.0, 1.0]]


def test_steps_of_parts_are_weighed_and_those_with_the_same_end_added(own_module):
    config = RewardConfig(
        parts=(f"{own_module}:steps", "exact"), weights=(2.0, 4.0), overlong_buffer_tokens=4, overlong_penalty=1.0
    )
    scores = scored(config, text_group("abcdef", "abc", "abcdef"))
    assert scores.rewards_PG.tolist() == [[3.0, 6.5]]
    assert scores.steps_PG == [[((2, 2.0), (3, 1.0)), ((2, 2.0), (6, 4.5))]]
    assert scores.parts[f"{own_module}:steps"].tolist() == [[1.5, 1.5]]


@pytest.mark.full
def test_bad_steps_are_counted_by_their_kind(own_module):
    texts = (
        "[(0, 1.0)]", "[(2, 1), (2, 1)]", "[(99, 1.0)]", "[3.0]", "[(1.5, 2)]", "[(True, 1.0)]",
        "[(1, float('nan'))]", "[]",
    )  # fmt: skip
    scores = scored(RewardConfig(parts=(f"{own_module}:evaluated",), error_value=-1.0), text_group("", *texts))
    assert [failed.failure.kind for failed in scores.failures] == ["bad_steps"] * 6 + ["not_finite"]
    assert scores.rewards_PG.tolist() == [[-1, -1, -1, -1, -1, -1, -1, 0]]
    assert reduced(scores.metrics())["reward/errors_bad_steps"] == 6


@pytest.mark.full
def test_steps_that_add_up_to_1_but_for_rounding_are_correct(own_module):
    """Ten steps of 0.1 are 0.9999999999999999."""
    text = "[(i, 0.1) for i in range(1, 11)]"
    part = f"{own_module}:evaluated"
    scores = scored(RewardConfig(parts=(part,), correct=part), text_group("", text, "0.99"))
    assert scores.rewards_PG[0, 0] < 1
    assert scores.correct_PG.tolist() == [[1.0, 0.0]]


@pytest.mark.full
@pytest.mark.parametrize(
    ("rollout", "ends"), [({}, False), ({"dynamic_sampling": True, "dynamic_sampling_by": "accuracy"}, True)]
)
def test_a_part_that_only_measures_ends_no_run_however_often_it_fails(own_module, one_rank, rollout, ends):
    """Unless groups are sampled by it."""
    part = f"{own_module}:never"
    reward_config = RewardConfig(parts=("exact", part), weights=(1.0, 0.0), correct=part)
    failures = scored(reward_config, text_group("a", "b", "c")).failures
    messages = []
    rollouts = Rollouts(
        engine=None,
        reward=None,
        failures=FailureReport(messages.append, None),
        prompts=None,
        sampling=None,
        mesh=one_rank,
        rl=RlConfig(reward=reward_config, rollout=RolloutConfig(**rollout)),
        seed=1,
        updates_per_rollout=1,
    )
    found = _ReplicaScores(num_failed=Counter({part: 2}), first_failures=failures[:1])
    with pytest.raises(TrainingError, match="failed for 2 of 2") if ends else nullcontext():
        rollouts._report_failures([found], 2)
    assert "lost" in messages[0]


def test_a_step_ends_at_the_first_token_with_which_the_text_is_as_long():
    pieces = ["ab", "c", "", "def", "g", "<end>"]
    completion = completion_of("abcdefg", tuple(range(6)))
    steps = [TextStep(end, 0.5) for end in range(1, 8)]
    ends = token_steps(completion, steps, lambda tokens: "".join(pieces[t] for t in tokens), 0.0)
    assert ends == [StepReward(end, 0.5) for end in (0, 0, 1, 3, 3, 3, 5)]


def test_turns_of_an_environment_are_steps_and_text_steps_are_of_the_last_turn():
    pieces = ["ab", "c", "<", "de", "f", ">"]
    episode = Episode(messages=(), turns=(Turn(0, 2, 0.25), Turn(3, 5, 1.0)), end="done")
    completion = completion_of("def", tuple(range(5)), episode)

    def spelled(tokens):
        return "".join(pieces[t] for t in tokens)

    assert completion.sampled_spans == ((0, 2), (3, 5))
    # Indices are among the four sampled tokens: the first turn ends at 1, "de" of the second at 2.
    steps = token_steps(completion, (TextStep(2, 4.0), TextStep(3, 8.0)), spelled, 2.0)
    assert steps == [StepReward(1, 0.5), StepReward(2, 4.0), StepReward(3, 10.0)]
    assert token_steps(completion, (TextStep(3, 8.0),), spelled, 0.0) == [StepReward(3, 8.0)]
    assert token_steps(completion, (), spelled, 2.0) == []


def test_the_environments_rewards_are_a_part_and_its_failures_are_counted():
    def held(reward, failure=None):
        episode = Episode(
            messages=({"role": "user", "content": "?"},),
            turns=(Turn(0, 1, 0.5), Turn(2, 3, reward)),
            end="done" if failure is None else "failed",
            failure=failure,
        )
        return completion_of("abcd", (1, 2, 3), episode)

    problem = Problem(problem_id="p", prompt="?", answer="abcd")
    kinds = ("timeout", "bad_reply", "template")
    completions = (held(0.5), held(-1.5), *(held(0.0, FailedScore(kind, "no")) for kind in kinds))
    one = Group(prompt=Prompt(problem=problem, tokens_T=(1,)), completions=completions)
    for error_value, of_failed in ((None, None), (-3.0, 1.0 + 2.0 * -3.0)):
        config = RewardConfig(parts=("exact", "environment"), weights=(1.0, 2.0), error_value=error_value)
        with Reward(config, max_new_tokens=8) as reward:
            scores = reward([one])
        rewards = scores.rewards_PG[0].tolist()
        assert rewards[:2] == [1.0 + 2.0, 1.0 - 2.0]
        assert all(math.isnan(reward) if of_failed is None else reward == of_failed for reward in rewards[2:])
        assert [(failed.part, failed.failure.kind) for failed in scores.failures] == [
            ("environment", kind) for kind in kinds
        ]
        # Of the sound ones the turns are steps of their own: here is what the text earned.
        whole = [sum(step.value for step in steps) for steps in scores.steps_PG[0]]
        assert whole == [1.0, 1.0, *[0.0 if of_failed is None else of_failed] * 3]
        metrics = reduced(scores.metrics())
        # Turns are worth 1, -1, and -3 where a failure has a value.
        assert metrics["reward/part/environment"] == pytest.approx(0.0 if error_value is None else -9 / 5)
        assert rows_of("scores of an environment") <= set(metrics)


def test_completions_near_the_length_limit_lose():
    config = RewardConfig(overlong_buffer_tokens=4, overlong_penalty=0.5)
    scores = scored(config, text_group("abcd", "abcd", "abcdef", "abcdefgh"))
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


def obey(scored):
    """A reward function that does what the completion says."""
    if scored.completion == "hang":
        time.sleep(600)
    if scored.completion == "hang in C":
        ctypes.PyDLL(None).sleep(600)  # holds Python's lock: no handler in Python runs
    if scored.completion == "ignore the alarm":
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        time.sleep(600)
    if scored.completion == "crash":
        os.kill(os.getpid(), signal.SIGKILL)
    if scored.completion == "exit":
        os._exit(3)
    if scored.completion == "quit":
        raise SystemExit(4)
    if scored.completion == "pid":
        return os.getpid()
    if scored.completion == "think":
        time.sleep(0.6)
    if scored.completion.startswith("mark"):
        _, file, number = scored.completion.split()
        with Path(file).open("a") as marks:
            marks.write(number + "\n")
        return int(number)
    if scored.completion.startswith("start"):
        leave_running(scored.completion)
        time.sleep(600 if "hang" in scored.completion else 0)
    if scored.completion == "error of 20 MB":
        raise ValueError("x" * (20 << 20))
    if scored.completion == "take 3 GiB":
        return len(bytes(3 << 30)) / 2**30
    return len(scored.completion)


def leave_running(completion):
    """Start grandchildren that note their ids: one in a session of its own, one whose parent has ended."""
    folder = completion.split()[1]
    Path(folder, "pids").touch()  # none of the two may have written when it is first read
    sleeper = f"echo $$ >> {folder}/pids; exec sleep 600"
    subprocess.Popen(["sh", "-c", sleeper], start_new_session=True)
    subprocess.run(["sh", "-c", f"(setsid sh -c '{sleeper}') & exit 0"], check=True)
    while len(Path(folder, "pids").read_text().split()) < 2:
        time.sleep(0.01)


def jobs(*texts):
    return [
        Job(0, RewardInput(prompt="", completion=text, answer="", num_tokens=1, is_truncated=False, fields={}))
        for text in texts
    ]


@pytest.mark.matrix("1")
@pytest.mark.parametrize("workers", [1, 3])
def test_what_hangs_or_crashes_costs_its_own_judgement_only(workers):
    with RewardWorkers([obey], workers=workers, timeout_s=1.0, grace_s=2.0) as judges:
        texts = ["a", "hang", "bb", "hang in C", "ccc", "ignore the alarm", "crash", "exit", "quit", "dddd"]
        outcomes = judges.run(jobs(*texts))
    kinds = [outcome.kind if isinstance(outcome, FailedScore) else outcome.value for outcome in outcomes]
    assert kinds == [1, "timeout", 2, "timeout", 3, "timeout", "died", "died", "died", 4]
    assert outcomes[6].text == "the process ended with status -9"


@pytest.mark.full
@pytest.mark.parametrize("workers", [1, 3])
def test_what_was_handed_behind_a_crash_is_judged_once(workers, tmp_path):
    file = tmp_path / "marks"
    texts = [f"mark {file} {number}" for number in range(90)]
    for number, text in ((0, "crash"), (7, "exit"), (8, "hang"), (9, "crash"), (60, "crash"), (89, "hang")):
        texts[number] = text
    with RewardWorkers([obey], workers=workers, timeout_s=1.0) as judges:
        outcomes = judges.run(jobs(*texts))
    expected = [
        {"crash": "died", "exit": "died", "hang": "timeout"}.get(text, number) for number, text in enumerate(texts)
    ]
    assert [getattr(one, "kind", None) or one.value for one in outcomes] == expected
    judged = sorted(int(number) for number in file.read_text().split())
    assert judged == [number for number in expected if isinstance(number, int)]


@pytest.mark.full
def test_a_time_out_is_that_of_one_judgement_however_many_are_handed_together():
    with RewardWorkers([obey], workers=1, timeout_s=2.0, grace_s=0.1) as judges:
        outcomes = judges.run(jobs(*["think"] * 4, *["a"] * 12))
    assert [outcome.value for outcome in outcomes] == [5] * 4 + [1] * 12


@pytest.mark.full
def test_a_judge_that_died_between_two_batches_is_replaced():
    with RewardWorkers([obey], workers=1, timeout_s=60.0) as judges:
        (pid,) = judges.run(jobs("pid"))
        os.kill(int(pid.value), signal.SIGKILL)
        while is_running(int(pid.value)):
            time.sleep(0.01)
        outcomes = judges.run(jobs("pid", "aa"))
    assert outcomes[1].value == 2
    assert outcomes[0] != pid


@pytest.mark.full
def test_what_a_reward_started_ends_with_a_time_out_and_with_the_workers(tmp_path):
    """Both grandchildren leave the worker's process group, and one also its parent."""
    for name, started, timeout_s in (("late", "start {} and hang", 4.0), ("whole", "start {}", 60.0)):
        (tmp_path / name).mkdir()
        with RewardWorkers([obey], workers=1, timeout_s=timeout_s) as judges:
            (outcome,) = judges.run(jobs(started.format(tmp_path / name)))
            pids = [int(pid) for pid in (tmp_path / name / "pids").read_text().split()]
            assert len(pids) == 2
            if name == "late":
                assert outcome.kind == "timeout"
                assert not any(is_running(pid) for pid in pids)
            else:
                # A function that returns may have started a server for the completions that follow.
                assert all(is_running(pid) for pid in pids)
        assert not any(is_running(pid) for pid in pids)


@pytest.mark.full
def test_errors_of_any_length_are_cut_and_memory_is_limited():
    with RewardWorkers([obey], workers=1, timeout_s=60.0, max_memory_gib=2.0) as judges:
        long, large, short = judges.run(jobs("error of 20 MB", "take 3 GiB", "aa"))
    assert long.kind == large.kind == "raised" and short.value == 2
    assert long.text.startswith("ValueError: xxx") and "characters cut" in long.text
    assert len(long.text) < MAX_TEXT + 50 and len(long.traceback) < MAX_TRACEBACK + 50
    assert large.error == "MemoryError"


@pytest.mark.full
@pytest.mark.parametrize("then", ["idle", "hang in C"])
def test_judges_end_with_the_process_that_started_them(then):
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def start_and_hang():
        judges = RewardWorkers([obey], workers=1, timeout_s=2.0, grace_s=600.0)
        theirs.send([int(pid.value) for pid in judges.run(jobs("pid"))])
        if then != "idle":
            judges.run(jobs(then))
        time.sleep(600)

    parent = context.Process(target=start_and_hang)
    parent.start()
    pids = ours.recv()
    time.sleep(0.1)
    parent.kill()
    parent.join()
    deadline = time.monotonic() + 60
    while any(is_running(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(is_running(pid) for pid in pids)


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the latter when it ends between opening and reading
        return False


@pytest.mark.full
def test_many_jobs_keep_their_order():
    with RewardWorkers([obey], workers=3, timeout_s=60.0) as judges:
        outcomes = judges.run(jobs(*["x" * (number % 17) for number in range(300)]))
    assert [outcome.value for outcome in outcomes] == [number % 17 for number in range(300)]
