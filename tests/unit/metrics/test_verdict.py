"""The verdict on a run against published intervals, and its alarm on simulated and recorded runs."""

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from statistics import fmean

import pytest

from mcore_rl.metrics.verdict import OverOptimization, interval_of_difference, student_t, verdict

CURVES = json.loads((Path(__file__).parents[3] / "bench/results/rlhf.json").read_text())["curves"]
COMPLETIONS = 64


@pytest.mark.full
@pytest.mark.parametrize(
    ("after", "num_after", "before", "num_before", "interval"),
    [
        (56, 70, 48, 80, (0.0524, 0.3339)),
        (9, 10, 3, 10, (0.1705, 0.8090)),
        (6, 7, 2, 7, (0.0582, 0.8062)),
        (5, 56, 0, 29, (-0.0381, 0.1926)),
        (0, 10, 0, 20, (-0.1611, 0.2775)),
        (0, 10, 0, 10, (-0.2775, 0.2775)),
        (10, 10, 0, 20, (0.6791, 1.0)),
        (10, 10, 0, 10, (0.6075, 1.0)),
    ],
)
def test_the_interval_of_a_difference_of_shares_is_newcombe_s(after, num_after, before, num_before, interval) -> None:
    """Newcombe 1998, Statistics in Medicine 17:873, table II, method 10."""
    got = interval_of_difference(before / num_before, num_before, after / num_after, num_after)
    assert got == pytest.approx(interval, abs=1e-4)


@pytest.mark.parametrize(("degrees", "z", "t"), [(10, 3.0902, 4.144), (20, 3.7190, 4.539), (40, 4.2649, 4.835)])
def test_student_s_t_in_the_tail_is_that_of_the_tables(degrees: int, z: float, t: float) -> None:
    # 99.9 %, 99.99 % and 99.999 %.
    assert student_t(degrees, z) == pytest.approx(t, rel=2e-3)


def evaluations(start: float, end: float, prompts: int = 64) -> list[dict[str, float]]:
    rewards = [{"step": step, "reward/mean": 0.5} for step in (1, 2, 3, 4)]
    at_ends = [{"step": step, "eval/accuracy": x, "eval/prompts": prompts} for step, x in ((0, start), (4, end))]
    return [at_ends[0], *rewards, at_ends[1]]


@pytest.mark.full
@pytest.mark.parametrize(
    ("start", "end", "prompts", "word"),
    [
        (0.78, 0.30, 64, "got worse"),
        (0.30, 0.78, 64, "learned"),
        (0.0, 1 / 64, 64, "no difference shown"),
        (1.0, 63 / 64, 64, "no difference shown"),
        (0.5, 0.6, 64, "no difference shown"),
        (0.5, 0.6, 2000, "learned"),
        (0.20, 0.10, 500, "got worse"),
        (0.0, 0.0, 64, "no difference shown"),
    ],
)
def test_a_run_learned_or_got_worse_where_the_interval_of_the_difference_leaves_out_zero(start, end, prompts, word):
    found = verdict(evaluations(start, end, prompts))
    low, high = interval_of_difference(start, prompts, end, prompts)
    assert found is not None and found.word == word and (found.low, found.high) == (low, high)
    assert (low > 0, high < 0) == (word == "learned", word == "got worse")
    assert f"difference {end - start:+.4g} (95 %: {low:+.4g} to {high:+.4g}; {prompts} held-out prompts)" in found.text
    assert found.line.startswith(found.text if word == "learned" else f"warning: {found.text}. Likely reason: ")


def test_a_task_that_was_solved_at_the_start_is_named_as_the_reason() -> None:
    found = verdict(evaluations(1.0, 1.0))
    assert found is not None and "take harder prompts" in found.line.lower() and "optim.lr" not in found.line


def test_rewards_of_held_out_prompts_are_compared_by_their_half_widths() -> None:
    def ends(end: float) -> list[dict[str, float]]:
        return [
            {"step": step, "eval/prompts": 0, "eval/reward": reward, "eval/reward_half_width": half}
            for step, reward, half in ((0, 1.0, 0.3), (9, end, 0.4))
        ]

    worse, same = verdict(ends(0.49)), verdict(ends(0.51))
    assert worse is not None and same is not None
    assert (worse.word, same.word) == ("got worse", "no difference shown")
    assert (worse.low, worse.high) == pytest.approx((-1.01, -0.01))


def test_without_an_evaluation_before_the_first_step_rewards_of_training_are_compared() -> None:
    """Two windows of 4 of 8 batches: means 0.25 and 0.65, variances 0.1 / 6 each, 6 degrees of freedom."""
    rewards = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8]
    records = [{"step": step, "reward/mean": x} for step, x in enumerate(rewards, 1)]
    half = 2.447 * math.sqrt(2 * (0.05 / 3) / 4)
    for found, sign in (
        (verdict(records), 1),
        (verdict([*records, {"step": 8, "eval/accuracy": 1, "eval/prompts": 9}]), 1),
    ):
        assert found is not None and found.word == "learned"
        assert (found.low, found.high) == pytest.approx((sign * 0.4 - half, 0.4 + half))
        assert found.basis == "first and last 4 of 8 rollout batches"
    back = verdict({"step": step, "reward/mean": x} for step, x in enumerate(rewards[::-1], 1))
    assert back is not None and back.word == "got worse"
    assert verdict(records[:3]) is None and verdict([]) is None
    flat = verdict({"step": step, "reward/mean": 0.5} for step in range(40))
    assert flat is not None and flat.word == "no difference shown" and flat.low == flat.high == 0.0
    assert verdict({"step": step, "reward/mean": "nan"} for step in range(40)) is None


def test_the_interval_covers_no_difference_in_95_of_100_runs() -> None:
    """Runs that change nothing: at most 5 % may be said to have changed, by shares and by rewards."""
    random, runs = Random(1), 1000
    wrong = {"shares": 0, "rewards": 0}
    for _ in range(runs):
        start, end = (sum(random.random() < 0.3 for _ in range(64)) / 64 for _ in range(2))
        found = verdict(evaluations(start, end))
        wrong["shares"] += found is not None and found.word != "no difference shown"
        found = verdict({"step": step, "reward/mean": random.gauss(0, 1)} for step in range(12))
        wrong["rewards"] += found is not None and found.word != "no difference shown"
    assert max(wrong.values()) <= quantile(runs, 0.05, 0.999), wrong


def quantile(runs: int, rate: float, share: float) -> int:
    """The least count below or at which a binomial number of `runs` lies with probability `share`."""
    total, count = 0.0, -1
    while total < share:
        count += 1
        total += math.comb(runs, count) * rate**count * (1 - rate) ** (runs - count)
    return count


def first_alarm(aims: list[float], rewards: list[float]) -> tuple[int, str] | None:
    watch = OverOptimization(["model:rm", "exact"], [1, 0])
    for step, (aim, reward) in enumerate(zip(aims, rewards, strict=True), 1):
        if alarm := watch.of_record({"step": step, "reward/mean": reward, "reward/accuracy": aim}):
            return step, alarm
    return None


def rises(at: float) -> Callable[[float], float]:
    """A logistic rise from 0 to 1 around `at` of the run."""
    return lambda time: 1 / (1 + math.exp(-20 * (time - at)))


def simulated(length: int, runs: int, aim: Callable, reward: Callable) -> Iterator[tuple[int, str] | None]:
    """First alarms of runs of 64 completions a batch; true accuracy and reward are functions of time in [0, 1]."""
    random = Random(length)
    for _ in range(runs):
        times = [batch / length for batch in range(length)]
        aims = [sum(random.random() < aim(time) for _ in range(COMPLETIONS)) / COMPLETIONS for time in times]
        yield first_alarm(aims, [random.gauss(reward(time), 0.1) for time in times])


@pytest.mark.matrix("20-200-an accuracy that stays", "60-100-a run that falls apart")
@pytest.mark.parametrize(
    ("aim", "reward"),
    [
        pytest.param(lambda time: 0.5, lambda time: time, id="an accuracy that stays"),
        pytest.param(lambda time: 0.2 + 0.7 * rises(0.3)(time), lambda time: time, id="an accuracy that rises"),
        pytest.param(
            lambda time: 0.8 - 0.6 * rises(0.6)(time), lambda time: -2 * rises(0.6)(time), id="a run that falls apart"
        ),
    ],
)
@pytest.mark.parametrize(("length", "runs"), [(20, 200), (60, 100), (200, 60)])
def test_healthy_runs_and_runs_that_fall_apart_alarm_in_at_most_5_of_100(aim, reward, length: int, runs: int) -> None:
    alarms = sum(alarm is not None for alarm in simulated(length, runs, aim, reward))
    assert alarms <= quantile(runs, 0.05, 0.999)


@pytest.mark.matrix("60-0.5-0.99")
@pytest.mark.parametrize(
    ("length", "fall", "power"), [(20, 0.5, 0.95), (60, 0.5, 0.99), (60, 0.15, 0.9), (200, 0.15, 0.99)]
)
def test_a_reward_that_rises_while_the_accuracy_falls_is_found(length: int, fall: float, power: float) -> None:
    """The accuracy rises by 0.6 and falls again; steep ones are found, on average, before two thirds are lost."""
    runs = 100
    found = simulated(
        length, runs, lambda time: 0.2 + 0.6 * rises(0.2)(time) - fall * rises(0.65)(time), lambda time: time
    )
    steps = [alarm[0] for alarm in found if alarm is not None]
    # As many misses as a rate of 1 - power gives, and no more.
    assert runs - len(steps) <= quantile(runs, 1 - power, 0.999)
    assert min(steps) > 0.5 * length  # the accuracy rises until then
    if fall == 0.5 and length >= 60:
        assert fmean(fall * rises(0.65)(step / length) for step in steps) < fall * 2 / 3


def test_recorded_runs_on_reward_models_alarm_where_the_accuracy_was_lost_and_only_there() -> None:
    """33 runs of 60 batches: 25 ended with an accuracy of more than 0.1 below the best five batches."""
    hacked, others = [], []
    for curve in CURVES:
        rewards, aims = ([batch[name] for batch in curve["rollouts"]] for name in ("reward/mean", "reward/accuracy"))
        windows = [fmean(aims[start : start + 5]) for start in range(len(aims) - 4)]
        (hacked if max(windows) - windows[-1] > 0.1 else others).append(first_alarm(aims, rewards))
    assert (len(hacked), len(others)) == (25, 8)
    assert sum(alarm is not None for alarm in hacked) >= 24 and not any(others)


def test_an_alarm_has_its_numbers_and_a_step_to_go_back_to() -> None:
    aims = [0.2] * 5 + [0.8] * 10 + [0.75, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2]
    step, text = first_alarm(aims, [batch / 100 for batch in range(len(aims))]) or (0, "")
    assert step == 22  # the last five are 0.6, 0.5, 0.4, 0.3 and 0.2
    assert "from step 15 to 22 reward/mean rose from 0.12 to 0.19 while reward/accuracy fell from 0.8 to 0.4" in text
    assert "checkpoint of step 15 or before" in text
    assert first_alarm(aims, [-batch / 100 for batch in range(len(aims))]) is None


def test_a_measured_part_and_held_out_prompts_are_watched_and_a_weighted_part_is_not() -> None:
    watch, aims = OverOptimization(["model:a", "model:b", "brief"], [1, 0, 0.5]), [0.8] * 15 + [0.2] * 15
    texts = [
        watch.of_record({"step": step, "reward/mean": step, "reward/part/brief": -step, "reward/part/model:b": aim})
        for step, aim in enumerate(aims)
    ]
    found = [text for text in texts if text]
    assert found and all("reward/part/model:b fell from" in text for text in found)
    assert not any(
        OverOptimization(["model:a", "brief"], None).of_record({"step": s, "reward/mean": s, "reward/part/brief": -s})
        for s in range(30)
    )
    held_out = OverOptimization(["exact"], None)
    # Memorised prompts: 50 of 64 at first, 47 later, 22 at last; the training reward rises.
    for step, accuracy in ((0, 50 / 64), (10, 47 / 64), (20, 22 / 64)):
        text = held_out.of_record({"step": step, "eval/accuracy": accuracy, "eval/prompts": 64})
        assert (text is not None) == (step == 20)
        for batch in range(10):
            record = {"step": step + batch + 1, "reward/mean": step + batch, "reward/accuracy": 0.9}
            assert held_out.of_record(record) is None
    assert "eval/accuracy fell from 0.7812 to 0.3438" in text and "from step 0 to 20" in text
