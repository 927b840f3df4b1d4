"""Metrics of an evaluation."""

import math
from dataclasses import replace
from itertools import combinations

import pytest

from mcore_rl.metrics.metrics import reduced
from mcore_rl.rl.rollouts.evaluation import evaluation_metrics, pass_at_k, table_lines
from mcore_rl.rl.rollouts.rollout import sample_seed
from mcore_rl.rl.types import GroupSummary


def test_pass_at_k_is_the_share_of_choices_with_a_right_answer() -> None:
    for num_correct in range(7):
        answers = [True] * num_correct + [False] * (6 - num_correct)
        for k in range(1, 7):
            chosen = list(combinations(answers, k))
            assert pass_at_k(num_correct, 6, k) == pytest.approx(sum(map(any, chosen)) / len(chosen))


def summary(correct: list[bool | None]) -> GroupSummary:
    return GroupSummary(
        index=0,
        replica_rank=0,
        num_prompt_tokens=3,
        lengths_G=[6] * len(correct),
        num_sampled_G=[4] * len(correct),
        spans_G=[((0, 1), (3, 6))] * len(correct),
        segments_G=[()] * len(correct),
        truncated_G=[True] + [False] * (len(correct) - 1),
        stale_G=[()] * len(correct),
        rewards_G=[float(is_correct or 0) / 2 for is_correct in correct],
        correct_G=correct,
    )


def test_metrics_are_means_over_all_answers() -> None:
    metrics = reduced(evaluation_metrics([summary([True, False, False, False]), summary([False] * 4)]))
    assert metrics["eval/accuracy"] == 1 / 8 and metrics["eval/reward"] == 1 / 16
    assert metrics["eval/truncated_fraction"] == 2 / 8
    assert metrics["eval/pass_at_2"] == pytest.approx((1 - 3 / 6) / 2)
    assert metrics["eval/pass_at_4"] == 0.5 and "eval/pass_at_8" not in metrics


def test_answers_whose_score_failed_count_in_no_accuracy() -> None:
    failed = replace(summary([True, False, False, None]), rewards_G=[0.5, 0.0, 0.0, math.nan])
    metrics = reduced(evaluation_metrics([failed, summary([True, True, True, True])]))
    assert metrics["eval/accuracy"] == pytest.approx(5 / 7)
    assert metrics["eval/reward"] == pytest.approx(2.5 / 7)
    assert metrics["eval/pass_at_2"] == pytest.approx((2 / 3 + 1) / 2)
    assert metrics["eval/pass_at_4"] == 1.0  # of the prompt that has four scored answers
    assert metrics["eval/prompts"] == 2


def test_the_half_width_of_the_reward_is_over_prompts_not_over_answers() -> None:
    undecided = [
        replace(summary([None, None]), rewards_G=rewards)
        for rewards in ([1.0, 3.0], [math.nan, 4.0], [0.0, 0.0], [math.nan, math.nan])
    ]
    # Means of prompts 2, 4 and 0: deviation 2. Student's t of two degrees of freedom: 4.303.
    half = reduced(evaluation_metrics(undecided))["eval/reward_half_width"]
    assert half == pytest.approx(4.303 * 2 / math.sqrt(3))
    assert "eval/reward_half_width" not in reduced(evaluation_metrics(undecided[1:2]))


def test_seeds_differ_between_runs_prompts_and_indices() -> None:
    seeds = {sample_seed(run, prompt, place) for run in (0, 1) for prompt in range(50) for place in range(8)}
    assert len(seeds) == 800 and all(0 <= seed < 2**63 for seed in seeds)
    assert sample_seed(1, 2, 3) == sample_seed(1, 2, 3)


def test_the_table_shows_best_and_worst() -> None:
    text = "line\nbreak " + "x" * 99
    samples = [{"reward": float(n), "prompt": f"p{n}", "completion": text, "answer": "a"} for n in range(9)]
    lines = list(table_lines(samples, 3))
    assert [line.split("|")[0].split()[1] for line in lines] == ["8.000", "4.000", "0.000"]
    assert all("\n" not in line and len(line) < 150 for line in lines)
    row = f"reward  0.000 | prompt p0 | completion {('line break ' + 'x' * 99)[:57]}... | answer a"
    assert list(table_lines(samples[:1], 3)) == [row]
    assert list(table_lines([], 3)) == []
