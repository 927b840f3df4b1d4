"""`mcore-rl study`: what is run, when it stops, its raw rows, the table and the figures."""

import argparse
import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from bench.study_figures import as_svg
from mcore_rl.checks.programs import PROGRAMS
from mcore_rl.cli import study as study_command
from mcore_rl.cli.study import COLUMNS, StudyRow, StudyRun, as_json, as_markdown, collapsed, plan, read_run, rows_of
from mcore_rl.config.load import load_config
from mcore_rl.config.pipeline import StudyConfig
from mcore_rl.errors import ConfigError
from mcore_rl.metrics.verdict import student_t
from tests.finished import finish

ROOT = Path(__file__).parents[3]
RECIPE = ROOT / "launch/recipes/tiny_moe/replay_study.toml"


def study(*overrides: str) -> StudyConfig:
    return load_config(StudyConfig, RECIPE, [f"base={ROOT}/launch/recipes/tiny_moe/rl.toml", *overrides])


def test_every_arm_is_run_with_one_seed_before_any_with_the_next_in_a_folder_of_its_own() -> None:
    runs = list(plan(study("seeds=[1,2]")))
    assert [(run.arm, run.seed) for run in runs[:4]] == [(arm, 1) for arm in ("GRPO", "GRPO + R2", "GRPO + R3", "GSPO")]
    assert (runs[4].arm, runs[4].seed) == ("GRPO", 2)
    assert len({run.folder for run in runs}) == 8
    r3 = next(run for run in runs if run.arm == "GRPO + R3")
    assert {"replay.kind=r3", "train.seed=1", f"run_dir={r3.folder}"} <= set(r3.arguments)
    assert r3.ranks == 2


def test_adapters_are_studied_from_the_start_and_on_the_mesh_of_whole_models() -> None:
    path = RECIPE.with_name("lora_study.toml")
    runs = list(plan(load_config(StudyConfig, path, [f"base={RECIPE.with_name('grpo.toml')}", "seeds=[1,2,3]"])))
    assert len(runs) == 12 and {run.ranks for run in runs} == {2}
    (adapters,) = {run.arm for run in runs if "lora.rank=16" in run.arguments}
    assert adapters == "LoRA, 2e-4"


def test_an_arm_that_cannot_run_is_named_before_anything_runs() -> None:
    with pytest.raises(ConfigError, match=r"arm 'broken': .*kl_coef.*kl_coeff"):
        list(plan(study("arms={ fine = [], broken = ['rl.loss.kl_coef=1'] }")))
    with pytest.raises(ConfigError, match="needs `base`"):
        list(plan(StudyConfig(run_dir="x")))


def write(folder: Path, *records: dict[str, object], done: bool = True) -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    machine = {"device": "cpu", "ranks": 1, "cores": 2, "memory_bytes": 1}
    attempt = {"started": "2026-01-31T12:00:00+00:00", "step": 0, "command": [], "commit": "abc", "mesh": {}}
    (folder / "run.json").write_text(json.dumps([attempt | {"versions": {"torch": "2"}, "machine": machine}]))
    if done:
        (folder / "DONE").write_text("")
    return folder


def two_batches(kl: float, accuracy: float) -> list[dict[str, object]]:
    """Two rollout batches of two updates each, the second without a second update's KL."""
    return [
        {"step": 0, "eval/accuracy": 0.1, "eval/prompts": 8},
        {"step": 1, "policy/kl_old_nats": 0.0, "routes/layer_00/changed_fraction": 0.1},
        {"step": 2, "policy/kl_old_nats": kl, "reward/mean": 0.5, "rl/rollouts": 1},
        {"step": 2, "time": 0, "event": "checkpoint saved", "path": "x"},
        {"step": 3, "policy/clip_ratio_low": 0.1, "policy/clip_ratio_high": 0.2}
        | {"routes/layer_00/changed_fraction": 0.3},
        {"step": 4, "reward/mean": 0.2, "policy/kl_old_nats": "inf", "rl/rollouts": 2, "moe/expert_load": [[1]]},
        {"step": 4, "eval/accuracy": 0.3},
        {"step": 4, "eval/accuracy": accuracy},
    ]


def test_raw_rows_are_the_means_over_the_updates_of_a_rollout_batch(tmp_path: Path) -> None:
    run = read_run("GRPO", 7, write(tmp_path / "7", *two_batches(kl=3.0, accuracy=0.4)))
    assert (run.rollouts, run.is_done, run.commit, run.starts) == (2, True, "abc", 1)
    assert run.series["policy/kl_old_nats"] == [1.5, None]
    assert run.series["reward/mean"] == [0.5, 0.2]
    assert run.layers == {"routes/layer_NN/changed_fraction": {"0": 0.2}}
    assert run.evaluated() == [0.1, 0.4], "of two evaluations of one step, the last"
    written = json.loads(as_json({"seeds": [7]}, [run, StudyRun(arm="not begun", seed=1, is_done=False)]))
    assert written["seeds"] == [7] and len(written["runs"]) == 1
    assert written["runs"][0]["series"]["policy/clip_ratio_high"] == [None, 0.2]


def test_the_table_has_means_over_the_run_and_95_percent_intervals_over_the_seeds_that_are_done(tmp_path: Path) -> None:
    one = read_run("GRPO", 7, write(tmp_path / "1", *two_batches(kl=2.0, accuracy=0.4)))
    two = read_run("GRPO", 8, write(tmp_path / "2", *two_batches(kl=8.0, accuracy=0.6)))
    late = read_run("GRPO", 9, write(tmp_path / "3", *two_batches(kl=99.0, accuracy=0.9), done=False))
    none = StudyRun(arm="GSPO", seed=7, is_done=False)
    row, empty = rows_of([one, two, late, none], collapse_below=0.5)
    # 12.706 * 0.1 * sqrt(2) / sqrt(2) with the accuracies 0.4 and 0.6; 12.706 * 1.5 with KL of 1 and 4.
    assert row.cell("eval accuracy") == "0.5 ± 1.3"
    assert row.cell("KL old -> new") == "2.5 ± 19"
    assert row.cell("clipped tokens") == "0.3 ± 0"
    assert row.cell("grad norm") == "-"
    assert row.collapses == "2/2", "0.2 at the end is below half of 0.5"
    assert StudyRow("GRPO", [one]).cell("eval accuracy") == "0.4"
    lines = as_markdown([row, empty]).splitlines()
    assert len(lines) == 3 and all(line.count("|") == len(COLUMNS) + 4 for line in lines)


@pytest.mark.parametrize(("degrees", "t"), [(1, 12.706), (9, 2.262), (10, 2.228), (29, 2.045), (120, 1.980)])
def test_the_factor_of_an_interval_is_students_t(degrees: int, t: float) -> None:
    assert student_t(degrees) == pytest.approx(t, abs=1e-3)


def test_a_run_has_collapsed_when_its_last_fifth_is_far_below_its_best_fifth() -> None:
    def run(*rewards: float) -> StudyRun:
        return StudyRun(arm="a", seed=1, is_done=True, series={"reward/mean": rewards})

    up_and_down = run(0.1, 0.2, 0.6, 0.8, 0.6, 0.6, 0.4, 0.4, 0.3, 0.3)
    # The last fifth has 0.3, the best one 0.7.
    assert collapsed(up_and_down, below=0.5) and not collapsed(up_and_down, below=0.42)
    assert not collapsed(run(0.1, 0.2, 0.3, 0.4, 0.5), below=0.5)
    assert not collapsed(run(0.0, 0.0), below=0.5)


def test_the_share_of_routing_is_what_live_routes_add_to_the_same_routes() -> None:
    series = {
        "policy/kl_old_live_routes_nats": [None, 0.3, None, 0.5],
        "policy/kl_old_same_routes_nats": [None, 0.1, None, 0.1],
    }
    run = StudyRun(arm="a", seed=1, is_done=True, series=series)
    assert COLUMNS["of it routing"](run) == pytest.approx(0.75)
    assert COLUMNS["of it routing (variance)"](run) is None


def test_the_picture_has_a_line_for_each_arm_and_a_band_where_there_are_several_seeds() -> None:
    def run(arm: str, seed: int, rewards: list[float | None]) -> StudyRun:
        return StudyRun(arm=arm, seed=seed, is_done=True, series={"reward/mean": rewards})

    rows = rows_of([run("A & B", 1, [0.0, 1.0]), run("A & B", 2, [0.0, 1.0, 7.0]), run("C", 1, [0.5, None])], 0.5)
    svg = as_svg(rows)
    ElementTree.fromstring(svg)
    assert len(re.findall("<polyline", svg)) == 2 and len(re.findall("<polygon", svg)) == 1
    # From the lower left to the upper right corner, at the positions that both seeds have.
    assert '<polyline points="0.0,200.0 380.0,0.0"' in svg
    assert '<polyline points="0.0,100.0"' in svg and "A &amp; B: 2 seeds<" in svg


@pytest.mark.full
def test_a_study_stops_when_its_minutes_are_over_and_writes_what_there_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = write(tmp_path / "gspo-1", *two_batches(kl=2.0, accuracy=0.4))
    recipe = ROOT / "launch/recipes/tiny_moe/rl.toml"
    write(tmp_path / "cispo-1", *two_batches(kl=2.0, accuracy=0.4), done=False)
    arms = "arms={ GRPO = [], GSPO = ['rl.loss.kind=gspo'], CISPO = ['rl.loss.kind=cispo'] }"
    overrides = [f"base={recipe}", f"run_dir={tmp_path}", "seeds=[1]", "budget_minutes=1e-3", arms]
    assert study_command.main(argparse.Namespace(config=RECIPE, overrides=overrides)) == 0
    shown = capsys.readouterr().out
    assert "the same command resumes the study" in shown
    assert "Not in the table, because not done: CISPO, seed 1 (2 rollout batches); 1 of 3 runs, which" in shown
    assert not (tmp_path / "grpo-1" / "DONE").exists() and done.is_dir()
    written = json.loads((tmp_path / "study.json").read_text())
    assert [run["arm"] for run in written["runs"]] == ["GSPO", "CISPO"] and "budget_minutes" not in written
    assert "| GSPO | 1 | 1/1 | 0.4 |" in (tmp_path / "study.md").read_text()


def test_a_finished_arm_of_other_settings_is_refused_and_one_of_another_mesh_is_not(tmp_path: Path) -> None:
    words = [f"run_dir={tmp_path}", "seeds=[1]", "arms={ one = ['rl.loss.kind=grpo'] }"]
    (run,) = plan(study(*words))
    config, _ = PROGRAMS["rl"].checked_config(Path(run.arguments[0]), run.arguments[1:], None)
    finish(config)
    (run.folder / "DONE").touch()
    assert next(plan(study(*words))).is_done
    assert next(plan(study(*words, "arms={ one = ['rl.loss.kind=grpo','mesh.tp=1'] }"))).is_done
    with pytest.raises(ConfigError, match=r"arm 'one': .* other settings:\n- optim.lr is 5e-05 there, 1.0 here"):
        list(plan(study(*words, "arms={ one = ['rl.loss.kind=grpo','optim.lr=1'] }")))
