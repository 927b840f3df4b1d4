"""`mcore-rl problems`."""

import json
from pathlib import Path

import pytest

from mcore_rl.config.load import load_config
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.rl.prompts import held_out_problems
from mcore_rl.run.cli import main

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


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["rl.prompts.task=file", "--output", "x.jsonl"], "Name a built-in task"),
        (["--output", "/dev/null/x.jsonl"], "Choose another --output"),
    ],
)
def test_what_it_cannot_write_is_refused(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["problems", str(RECIPE), *words]) == 2
    assert told in capsys.readouterr().err
