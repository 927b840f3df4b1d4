"""bench.quickstart: its table, and that it goes on where it was ended."""

import json
import re
import sys
from pathlib import Path

import pytest

from bench import quickstart


def rows(seed: int, sft: float, after: float) -> list[dict[str, object]]:
    shared = {"layers": "torch", "seed": seed, "temperature": 0.0}
    return [{**shared, "model": "sft", "eval/accuracy": sft}, {**shared, "model": "gspo", "eval/accuracy": after}]


def test_a_gain_is_the_difference_on_the_same_prompts_with_its_interval_over_seeds() -> None:
    """Gains of .5, .6, .7: mean .6, deviation .1, Student's t at two degrees of freedom 4.303, half width .248."""
    found = [*rows(1, 0.2, 0.7), *rows(2, 0.3, 0.9), *rows(3, 0.25, 0.95)]
    unfinished = rows(4, 0.9, 0.0)[:1]
    (line,) = quickstart.table(found + unfinished).splitlines()[2:]
    assert line == (
        "| `torch` | greedy | `gspo` | 3 | 0.250 +- 0.124 (0.20 to 0.30) | 0.850 +- 0.329 (0.70 to 0.95) | "
        "0.600 +- 0.248 | 0.500 |"
    )


def test_what_has_its_row_is_not_run_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ran: list[str] = []
    accuracy = {"sft": 0.25, "grpo_r2": 0.75, "gspo": 0.5}

    def evaluate(folder: Path, model: str, temperature: float, settings: list[str]) -> dict[str, float]:
        assert "platform.layers=torch" in settings
        ran.append(f"{folder.name} {model} {temperature:g}")
        if len(ran) == 4:
            raise KeyboardInterrupt
        return {"eval/accuracy": accuracy[model]}

    monkeypatch.setattr(quickstart, "quickstart", lambda *words: None)
    monkeypatch.setattr(quickstart, "evaluate", evaluate)
    output = tmp_path / "rows.json"

    def run(folder: str) -> None:
        words = ["--folder", str(tmp_path / folder), "--output", str(output), "--seeds", "3", "--layers", "torch"]
        monkeypatch.setattr(sys, "argv", ["bench.quickstart", *words])
        quickstart.main()

    with pytest.raises(KeyboardInterrupt):
        run("a")
    assert len(json.loads(output.read_text())["rows"]) == 3
    run("b")
    run("b")
    done = [f"torch-3 {model} {temperature}" for model in accuracy for temperature in (0, 1)]
    assert ran == [*done[:4], *done[3:]]
    written = json.loads(output.read_text())["rows"]
    assert [row["eval/accuracy"] for row in written] == [0.25, 0.25, 0.75, 0.75, 0.5, 0.5]


def test_the_page_has_the_table_of_all_results() -> None:
    rows = json.loads(quickstart.RESULTS.read_text())["rows"]
    page = Path(__file__).parents[3] / "bench/results/README.md"
    assert f"\n{quickstart.table(rows)}\n" in page.read_text()


def test_the_picture_has_every_result() -> None:
    """A line from each start's fine-tuned model to both arms, with a point at each end in percent of the height."""
    rows = json.loads(quickstart.RESULTS.read_text())["rows"]
    drawn = quickstart.chart(rows)
    assert drawn == quickstart.IMAGE.read_text()
    height = {f"{quickstart.HEIGHT * (1 - row['eval/accuracy']):.1f}" for row in rows}
    assert set(re.findall(r'cy="([\d.]+)"', drawn)) == height
    assert drawn.count("<polyline") == len(rows) * 2 // 3


def test_a_line_goes_through_the_evaluations_on_the_way() -> None:
    """Accuracies of .25, .5, .75 at batches 0, 30 and 60, in a panel of 280 x 144."""
    (sft, arm) = rows(1, 0.25, 0.75)
    assert 'points="0.0,108.0 140.0,72.0 280.0,36.0"' in quickstart.chart([sft, {**arm, "curve": [[30, 0.5]]}])


def test_readme_quotes_the_range_over_all_starts() -> None:
    readme = (quickstart.ROOT / "README.md").read_text()
    rows = json.loads(quickstart.RESULTS.read_text())["rows"]
    for temperature, name in ((0.0, "greedy"), (1.0, "temperature 1")):
        cells = []
        for model in quickstart.NAMES:
            found = [
                100 * row["eval/accuracy"] for row in rows if (row["model"], row["temperature"]) == (model, temperature)
            ]
            cells.append(f"{min(found):.0f} to {max(found):.0f} %")
        assert f"| {name} | {' | '.join(cells)} |" in readme
