"""`mcore-rl problems`."""

import json
import math
from collections import Counter
from pathlib import Path

import pytest

from mcore_rl.cli.cli import main
from mcore_rl.config.load import load_config
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.rl.rollouts.prompts import held_out_problems

RECIPE = Path(__file__).parents[3] / "launch/recipes/tiny_moe/grpo.toml"


def test_it_writes_problems_with_answers_none_of_them_held_out(tmp_path: Path) -> None:
    small = ["rl.prompts.smallest=2", "rl.prompts.largest=2"]
    output = tmp_path / "new/chat.jsonl"
    assert main(["problems", str(RECIPE), *small, "--count", "300", "--output", str(output)]) == 0
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert len(lines) == 300
    assert all(line["response"] == line["answer"] == line["prompt"][:-1][::-1] for line in lines)
    config = load_config(RlRunConfig, RECIPE, small)
    held_out = held_out_problems(config.rl.eval, config.rl.prompts, config.train.seed)
    assert len(held_out) == 64
    assert not {problem.prompt for problem in held_out} & {line["prompt"] for line in lines}
    assert list(output.parent.iterdir()) == [output]


def test_of_a_fraction_of_the_responses_the_last_character_is_missing(tmp_path: Path) -> None:
    output = tmp_path / "chat.jsonl"
    words = ["--count", "2000", "--cut-fraction", "0.65", "--output", str(output)]
    assert main(["problems", str(RECIPE), *words]) == 0
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert all(line["answer"] == line["prompt"][:-1][::-1] for line in lines)
    assert all(line["response"] in (line["answer"], line["answer"][:-1]) for line in lines)
    cut = [line for line in lines if line["response"] != line["answer"]]
    # Within four standard deviations of a binomial distribution, in all and of the shortest alone.
    assert abs(len(cut) / 2000 - 0.65) < 4 * math.sqrt(0.65 * 0.35 / 2000)
    shortest = [len(line["answer"]) == 5 for line in lines]
    cut_shortest = sum(len(line["answer"]) == 5 for line in cut)
    assert abs(cut_shortest / sum(shortest) - 0.65) < 4 * math.sqrt(0.65 * 0.35 / sum(shortest))
    assert main(["problems", str(RECIPE), *words]) == 0  # the same lines once more


def test_problems_to_validate_on_are_in_no_line_to_learn_from(tmp_path: Path) -> None:
    """Of the 1,100 numbers of two and three digits, 64 are held out and 300 draws to validate on."""
    small = ["rl.prompts.smallest=2", "rl.prompts.largest=3", "--preferences"]
    words = ["--count", "3000", "--valid", "300", "--output", str(tmp_path / "pairs.jsonl")]
    assert main(["problems", str(RECIPE), *small, *words]) == 0
    learned, validated = (
        [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        for name in ("pairs.jsonl", "pairs_valid.jsonl")
    )
    assert (len(learned), len(validated)) == (3000, 300)
    prompts = {line["prompt"] for line in learned}
    assert len(prompts) > 600
    assert not prompts & {line["prompt"] for line in validated}
    for line in validated:
        assert line["chosen"] == line["prompt"][:-1][::-1]
        assert sum(a != b for a, b in zip(line["chosen"], line["rejected"], strict=True)) == 1


def test_wrong_answers_of_any_kind_are_wrong_and_of_each_kind_as_often(tmp_path: Path) -> None:
    fields = ["rl.prompts.smallest=8", "rl.prompts.largest=8", "--preferences", "--faults", "any"]
    output = tmp_path / "pairs.jsonl"
    assert main(["problems", str(RECIPE), *fields, "--count", "3000", "--output", str(output)]) == 0
    kinds: Counter[str] = Counter()
    for line in map(json.loads, output.read_text().splitlines()):
        right, wrong = line["chosen"], line["rejected"]
        assert right == line["prompt"][:-1][::-1] and wrong != right
        places = [i for i, (a, b) in enumerate(zip(right, wrong, strict=False)) if a != b]
        if len(wrong) == 8 and len(places) == 1:
            kinds["replaced"] += 1
        elif len(wrong) == 8 and len(places) == 2 and sorted(right) == sorted(wrong):
            kinds["swapped"] += 1
        elif len(wrong) == 7 and any(right[:i] + right[i + 1 :] == wrong for i in range(8)):
            kinds["left out"] += 1
        elif len(wrong) == 9 and any(wrong[:i] + wrong[i + 1 :] == right for i in range(9)):
            kinds["added"] += 1
        else:
            kinds["any text"] += 1
    # A fifth each, but that a swap of the last or of equal digits, a tenth and an eighth, is drawn anew.
    assert set(kinds) == {"replaced", "swapped", "left out", "added", "any text"}
    assert all(500 < count < 720 for kind, count in kinds.items() if kind != "swapped"), kinds
    assert 400 < kinds["swapped"] < 560


@pytest.mark.matrix(
    "words0-Name a built-in task",
    "words1-Choose another --output",
    "words4-Add --preferences",
    "words5-Leave one of both out",
)
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["rl.prompts.task=file", "--output", "x.jsonl"], "Name a built-in task"),
        (["--output", "/dev/null/x.jsonl"], "Choose another --output"),
        (["--output", "/dev/null"], "output /dev/null is a device or pipe, and a file is written"),
        (["--output", "."], "output . is a folder, and a file is written. Name another output"),
        (["--faults", "any", "--output", "x.jsonl"], "Add --preferences"),
        (["--preferences", "--cut-fraction", "0.5", "--output", "x.jsonl"], "Leave one of both out"),
    ],
)
def test_what_it_cannot_write_is_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["problems", str(RECIPE), *words]) == 2
    assert message in capsys.readouterr().err
