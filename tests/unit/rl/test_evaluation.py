"""What an evaluation tells."""

from itertools import combinations

import pytest

from mcore_rl.obs.metrics import reduced
from mcore_rl.rl.evaluation import evaluation_metrics, pass_at_k
from mcore_rl.rl.rollout import GroupFacts, sample_seed
from mcore_rl.rl.samples import shown


def test_pass_at_k_is_the_share_of_choices_with_a_right_answer() -> None:
    for num_solved in range(7):
        answers = [True] * num_solved + [False] * (6 - num_solved)
        for k in range(1, 7):
            chosen = list(combinations(answers, k))
            assert pass_at_k(num_solved, 6, k) == pytest.approx(sum(map(any, chosen)) / len(chosen))


def facts(solved: list[bool]) -> GroupFacts:
    return GroupFacts(
        place=0,
        holder=0,
        num_prompt=3,
        lengths_G=[4] * len(solved),
        truncated_G=[True] + [False] * (len(solved) - 1),
        rewards_G=[float(is_solved) / 2 for is_solved in solved],
        solved_G=solved,
    )


def test_metrics_are_means_over_all_answers() -> None:
    told = reduced(evaluation_metrics([facts([True, False, False, False]), facts([False] * 4)]))
    assert told["eval/accuracy"] == 1 / 8
    assert told["eval/reward"] == 1 / 16
    assert told["eval/truncated_fraction"] == 2 / 8
    assert told["eval/pass_at_2"] == pytest.approx((1 - 3 / 6) / 2)
    assert told["eval/pass_at_4"] == 0.5
    assert "eval/pass_at_8" not in told


def test_seeds_differ_between_runs_prompts_and_places() -> None:
    seeds = {sample_seed(run, prompt, place) for run in (0, 1) for prompt in range(50) for place in range(8)}
    assert len(seeds) == 800 and all(0 <= seed < 2**63 for seed in seeds)
    assert sample_seed(1, 2, 3) == sample_seed(1, 2, 3)


def test_the_table_shows_best_and_worst() -> None:
    samples = [
        {"reward": float(n), "prompt": f"p{n}", "completion": "line\nbreak " + "x" * 99, "answer": "a"}
        for n in range(9)
    ]
    lines = list(shown(samples, 3))
    assert [line.split("|")[0].split()[1] for line in lines] == ["8.000", "4.000", "0.000"]
    assert all("\n" not in line and len(line) < 130 for line in lines)
    assert list(shown(samples[:1], 3)) == [
        f"reward  0.000 | p0 -> {('line break ' + 'x' * 99)[:57]}... | answer a"
    ]
    assert list(shown([], 3)) == []
