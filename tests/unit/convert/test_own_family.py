"""A model of the user's own family comes from Hugging Face's format and goes back by the class that names it."""

import json
from pathlib import Path

import pytest

from mcore_rl.cli.cli import main
from mcore_rl.storage.checkpoint import check
from tests.conversion import assert_same, exported, read_hf, saved

SOURCE = """
from mcore_rl.families.qwen3_moe import Qwen3Moe

class Wolf(Qwen3Moe):
    model_type = "wolf"
    hf_class = "WolfForCausalLM"
"""


def test_import_verify_and_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "wolf_family.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    source, checkpoint = saved("qwen3_moe", tmp_path / "hf"), tmp_path / "ckpt"
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"model_type": "wolf"}))
    arguments = [str(source), str(checkpoint), "--workers", "1"]
    assert main(["convert", "import", *arguments]) != 0
    assert "model_type='wolf'. Known are" in capsys.readouterr().err
    assert main(["convert", "import", *arguments, "--family", "wolf_family:Wolf"]) == 0
    step = checkpoint / "iter_0000000"
    assert check(step).model["family"] == "wolf_family:Wolf"
    assert main(["convert", "verify", str(source), str(step), "--family", "wolf_family:Wolf"]) == 0
    again = exported(step, tmp_path / "again")
    assert_same(read_hf(again), read_hf(source))
    written = json.loads((again / "config.json").read_text())
    assert (written["model_type"], written["architectures"]) == ("wolf", ["WolfForCausalLM"])
    copied = exported(step, tmp_path / "copied", reference=source)
    assert (copied / "config.json").read_bytes() == (source / "config.json").read_bytes()
