"""What is wrong is said with its value and a remedy, before any work, by one error and a status that is not 0."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.conftest import Finished
from tests.forked import run_main

ALONE = ("mesh.tp=1", "mesh.ep=1")


@pytest.mark.matrix("world", "unknown key")
@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["model.moe.num_experts=5"], ["model.moe.num_experts=5", "mesh.ep=2"]),
        (["mesh.tp=3", "mesh.ep=1"], ["model.num_heads=4", "mesh.tp=3"]),
        (["model.num_layers=3", "mesh.pp=2"], ["model.num_layers=3", "mesh.pp=2"]),
        (["mesh.cp=3", "data.seq_length=32"], ["data.seq_length=32", "mesh.cp=3"]),
        (["--ranks", "3"], ["3", "mesh.tp=2"]),
        (["mesh.ttp=2"], ["mesh.ttp", "mesh.tp"]),
        (["optim.lr=fast"], ["optim.lr", "fast", "number"]),
    ],
    ids=["experts", "heads", "layers", "cp", "world", "unknown key", "wrong type"],
)
def test_settings_are_refused(
    overrides: list[str], said: list[str], config_file: Path, mcore_rl: Callable[..., Finished], tmp_path: Path
) -> None:
    result = mcore_rl("pretrain", config_file, *overrides)
    assert result.returncode == 2
    for words in said:
        assert words in result.stderr, result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "run").exists(), "nothing is written before the settings are sound"


def missing(folder: Path) -> None:
    (folder / "train.bin").unlink()


def empty(folder: Path) -> None:
    (folder / "train.idx").write_bytes(b"")


def cut(folder: Path) -> None:
    os.truncate(folder / "train.bin", 1000)


def foreign(folder: Path) -> None:
    (folder / "train.idx").write_bytes(b"not an index" * 100)


@pytest.mark.parametrize("damage", [missing, empty, cut, foreign])
def test_damaged_data_is_refused(
    damage: Callable[[Path], None], config_file: Path, corpus: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(corpus, copy)
    damage(copy)
    result = run_main("mcore_rl.programs.pretrain", [config_file, *ALONE, f"data.train=['{copy}/train']"])
    assert result.returncode == 2
    assert "DataError" in result.stderr and f"{copy}/train" in result.stderr
    assert "Traceback" not in result.stderr


def test_tokens_beyond_the_vocabulary_are_refused(config_file: Path) -> None:
    result = run_main("mcore_rl.programs.pretrain", [config_file, *ALONE, "model.vocab_size=100"])
    assert result.returncode == 2
    assert "100" in result.stderr and "model.vocab_size" in result.stderr


@pytest.mark.full
def test_a_checkpoint_of_another_model_is_refused(config_file: Path, trained: Path, tmp_path: Path) -> None:
    load = [f"run_dir={tmp_path}/other", f"checkpoint.load={trained}/checkpoints"]
    result = run_main("mcore_rl.programs.pretrain", [config_file, *ALONE, *load, "model.moe.num_experts=8"])
    assert result.returncode == 2
    assert "CheckpointError" in result.stderr and "num_experts" in result.stderr
