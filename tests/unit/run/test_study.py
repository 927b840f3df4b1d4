"""`mcore-rl study`: what is run, and the table."""

import json
from pathlib import Path

import pytest

from mcore_rl.config.load import load_config
from mcore_rl.config.study import StudyConfig
from mcore_rl.errors import ConfigError
from mcore_rl.run.study import plan
from mcore_rl.run.study_table import COLUMNS, as_json, as_markdown, row_of

ROOT = Path(__file__).parents[3]
RECIPE = ROOT / "launch/recipes/tiny_moe/replay_study.toml"


def study(*overrides: str) -> StudyConfig:
    return load_config(StudyConfig, RECIPE, [f"base={ROOT}/launch/recipes/tiny_moe/rl.toml", *overrides])


def test_every_arm_is_run_with_every_seed_in_a_folder_of_its_own() -> None:
    runs = list(plan(study("seeds=[1,2]")))
    assert [(run.arm, run.seed) for run in runs[:3]] == [("GRPO", 1), ("GRPO", 2), ("GRPO + R2", 1)]
    assert len({run.folder for run in runs}) == 8
    r3 = next(run for run in runs if run.arm == "GRPO + R3")
    assert {"replay.kind=r3", "train.seed=1", f"run_dir={r3.folder}"} <= set(r3.arguments)
    assert r3.ranks == 2


def test_an_arm_that_cannot_run_is_named_before_anything_runs() -> None:
    with pytest.raises(ConfigError, match=r"arm 'broken': .*kl_coef.*kl_coeff"):
        list(plan(study("arms={ fine = [], broken = ['rl.loss.kl_coef=1'] }")))
    with pytest.raises(ConfigError, match="needs `base`"):
        list(plan(StudyConfig(run_dir="x")))


def write(folder: Path, *records: dict[str, float]) -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def test_the_table_has_means_over_the_run_and_over_seeds(tmp_path: Path) -> None:
    one = write(
        tmp_path / "1",
        {"step": 0, "eval/accuracy": 0.1},
        {
            "step": 1,
            "policy/kl_old_nats": 0.0,
            "policy/clip_ratio_low": 0.1,
            "policy/clip_ratio_high": 0.2,
        },
        {"step": 2, "policy/kl_old_nats": 2.0, "reward/mean": 0.5, "routes/cached_bytes": 2**20},
        {"step": 2, "eval/accuracy": 0.4},
    )
    two = write(tmp_path / "2", {"step": 1, "policy/kl_old_nats": 4.0, "eval/accuracy": 0.6})
    row = row_of("GRPO", {7: one, 8: two})
    assert row.cell("eval accuracy") == "0.5 ± 0.14", "the last ones of both"
    assert row.cell("KL old -> new") == "2.5 ± 2.1", "of 1 and 4"
    assert row.cell("clipped tokens") == "0.3"
    assert row.cell("reward") == "0.5"
    assert row.cell("routes MiB") == "1"
    assert row.cell("grad norm") == "-"
    lines = as_markdown([row]).splitlines()
    assert len(lines) == 3 and all(line.count("|") == len(COLUMNS) + 2 for line in lines)
    assert json.loads(as_json([row]))["GRPO"]["7"]["eval accuracy"] == 0.4
