"""Differences paired by seed and slopes of variances, which decide about a claim."""

import json
import math
import random
import re
from pathlib import Path

import pytest

from bench.claims import (
    CLAIMS,
    RESULTS,
    ROOT,
    Claim,
    by_seed,
    draw_variances,
    log_variances,
    outcome,
    ratio_slope,
    reward,
    run_folder,
    table,
)
from mcore_rl.cli.study import StudyRun


def run_of(arm: str, seed: int, rewards: float, is_done: bool = True) -> StudyRun:
    return StudyRun(arm=arm, seed=seed, is_done=is_done, series={"reward/mean": [rewards]})


def test_an_interval_above_0_shows_a_claim_and_one_below_refutes_it() -> None:
    # Student's t of 4 degrees of freedom is 2.776: half widths of 0.0196 here.
    steps = [-0.02, -0.01, 0.0, 0.01, 0.02]
    assert outcome([0.021 + step for step in steps]) == "shown"
    assert outcome([-0.021 + step for step in steps]) == "refuted"
    assert outcome([0.019 + step for step in steps]) == "not shown"
    assert outcome([1.0]) == "not shown"


def test_differences_are_of_seeds_whose_arms_are_all_done_and_of_each_methods_best_rate(tmp_path: Path) -> None:
    claim = Claim(
        sentence="b is better than a",
        start="small",
        rollouts=1,
        arms={"a 1": [], "a 2": [], "b": []},
        rates={"a": ["a 1", "a 2"]},
        differences={"reward": (reward, {"b": 1.0, "a": -1.0})},
    )
    runs = [run_of("a 1", 1, 0.1), run_of("a 2", 1, 0.4), run_of("b", 1, 0.5)]
    runs += [run_of("a 1", 2, 0.3), run_of("a 2", 2, 0.2), run_of("b", 2, 0.9)]
    runs += [run_of("a 1", 3, 0.0), run_of("a 2", 3, 0.0), run_of("b", 3, 0.0, is_done=False)]
    assert by_seed(claim, runs, tmp_path)["reward"] == pytest.approx([0.1, 0.7])


def test_of_independent_tokens_the_sums_variance_grows_and_the_means_falls(tmp_path: Path) -> None:
    draws = random.Random(1)
    (tmp_path / "samples").mkdir()
    lines = [
        json.dumps(
            {"log_ratios": [draws.gauss(0.0, 0.1) for _ in range(length)], "text": "a\u2028b"}, ensure_ascii=False
        )
        for length in (2, 4, 8, 16)
        for _ in range(3000)
    ]
    # The first update has ratios of 1, and samples that are not traced have none.
    lines += [json.dumps({"log_ratios": [0.0] * 4}), json.dumps({"log_ratios": [None] * 4}), json.dumps({})]
    (tmp_path / "samples/step_0000000.jsonl").write_text("\n".join(lines) + "\n")
    run = run_of("a", 1, 0.0)
    for kind, slope in (("token", 0.0), ("sum", 1.0), ("mean", -1.0)):
        assert ratio_slope(kind, fixed=False)(run, tmp_path) == pytest.approx(slope, abs=0.05)
        assert ratio_slope(kind, fixed=True)(run, tmp_path) == pytest.approx(slope, abs=0.1)


def test_the_picture_of_variances_has_a_line_where_all_runs_of_an_arm_have_a_length(tmp_path: Path) -> None:
    """Tokens are 0.1 or -0.1 in the whole of a sample: variances are 0.01, and 0.04 for sums of two."""
    for name, lengths in (("a-1", (2, 4, 8)), ("a-2", (2, 8))):
        (tmp_path / name / "samples").mkdir(parents=True)
        lines = [json.dumps({"log_ratios": [0.1 * (-1) ** at] * length}) for length in lengths for at in range(30)]
        (tmp_path / name / "samples/step_0000000.jsonl").write_text("\n".join(lines) + "\n")
    assert log_variances(tmp_path / "a-1", "sum", fixed=False)[2] == pytest.approx(math.log10(0.04))
    assert log_variances(tmp_path / "a-1", "mean", fixed=False) == pytest.approx(dict.fromkeys((2, 4, 8), -2))
    draw_variances([run_of("a", 1, 0.0), run_of("a", 2, 0.0)], tmp_path, tmp_path / "picture.svg")
    lines = re.findall(r'polyline points="(.*?)"', (tmp_path / "picture.svg").read_text())
    # No answer has the 16 tokens of the three figures of beginnings.
    assert [line.count(",") for line in lines] == [2, 2, 2]


def test_every_difference_is_of_arms_that_are_run() -> None:
    for claim in CLAIMS.values():
        arms = {*claim.arms, *claim.rates}
        assert all(factors.keys() <= arms for _, factors in claim.differences.values())
        assert all(one in claim.arms for among in claim.rates.values() for one in among)


def test_folders_are_those_of_a_study() -> None:
    assert run_folder(Path("a"), "GRPO + R3", 2) == Path("a/grpo_with_r3-2")


def test_the_page_has_the_tables_of_all_results() -> None:
    results, page = json.loads(RESULTS.read_text()), (ROOT / "docs/claims.md").read_text()
    assert [name for name in {one["claim"]: None for one in results} if table(name, results) not in page] == []
