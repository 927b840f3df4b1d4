"""`mcore-rl convert` and `inspect` as a user gives them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mcore_rl.cli.cli import main
from mcore_rl.cli.commands import num_bytes
from tests.conversion import assert_same, read_hf, saved


def test_plan_import_verify_relayout_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, checkpoint, other = saved("qwen3_moe", tmp_path / "hf"), tmp_path / "ckpt", tmp_path / "other"
    back, log = tmp_path / "back", tmp_path / "log.jsonl"
    assert main(["convert", "plan", str(source)]) == 0
    output = capsys.readouterr().out
    assert "decoder.layers.mlp.router.weight" in output and "memory: at most" in output
    assert main(["convert", "import", str(source), str(checkpoint), "--log", str(log), "--workers", "1"]) == 0
    assert main(["convert", "verify", str(source), str(checkpoint)]) == 0
    assert main(["convert", "relayout", str(checkpoint), str(other), "--keys", "local", "--layers", "each"]) == 0
    assert main(["convert", "plan", str(other)]) == 0
    assert main(["convert", "export", str(other), str(back), "--reference", str(source)]) == 0
    assert_same(read_hf(back), read_hf(source))
    events = [json.loads(line)["event"] for line in log.read_text().splitlines()]
    assert events[0] == "begin" and events[-1] == "end" and "task" in events


def test_inspect_lists_tensors_and_differences(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, other = saved("llama", tmp_path / "hf"), saved("qwen3", tmp_path / "other")
    assert main(["inspect", str(source)]) == 0
    output = capsys.readouterr().out
    assert "family: llama" in output and "model.norm.weight" in output and "99x48" in output
    assert main(["inspect", str(source), "--diff", str(source)]) == 0
    assert main(["inspect", str(source), "--diff", str(other)]) == 1
    assert "only in" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["import", "gone"], "takes 2 folders, got 1"),
        (["import", "a", "b", "--quantize", "int4"], "--quantize means nothing to convert import"),
        (["export", "a", "b", "--keys", "local"], "--keys means nothing to convert export"),
        (["import", "gone", "out"], "gone"),
        (["verify", "a", "b", "--dtype", "bf16"], "--dtype means nothing to convert verify"),
    ],
)
def test_arguments_that_an_action_does_not_take_are_refused_with_status_2(
    arguments, message, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", *arguments]) == 2
    assert message in capsys.readouterr().err


MORE_THAN_TORCH = 290
"""Modules that a conversion imports besides torch's, 264 with Python 3.11; Megatron is 700 more."""
NOT_OF_A_CONVERSION = ("megatron", "transformers", "torch.distributed.checkpoint", "mcore_rl.config.rl_run")


@pytest.mark.full
def test_a_conversion_imports_neither_megatron_nor_torchs_checkpoints_before_it_writes(tmp_path: Path) -> None:
    """An import writes all tensors before the `.metadata`, for which torch's classes are imported."""
    source, checkpoint = saved("llama", tmp_path / "hf"), tmp_path / "ckpt"
    assert main(["convert", "import", str(source), str(checkpoint), "--no-check-logits", "--workers", "1"]) == 0
    code = (
        "import sys, torch\n"
        "before = set(sys.modules)\n"
        "from mcore_rl.cli import cli\n"
        "from mcore_rl.convert import importing\n"
        "def write_metadata(*_): sys.exit(' '.join(set(sys.modules) - before))\n"
        "importing.write_metadata = write_metadata\n"
        "source, checkpoint, out = sys.argv[1:]\n"
        "for words in (f'convert plan {source}', f'convert verify {source} {checkpoint}', f'check {checkpoint}',\n"
        "              f'convert export {checkpoint} {out}/export --reference {source} --workers 1',\n"
        "              f'convert import {source} {out}/import --no-check-logits --workers 1'):\n"
        "    assert cli.main(words.split()) == 0, words"
    )
    words = [sys.executable, "-c", code, str(source), str(checkpoint), str(tmp_path / "out")]
    imported = subprocess.run(words, capture_output=True, text=True).stderr.splitlines()[-1].split()
    assert "mcore_rl.convert.importing" in imported
    assert [name for name in imported if f"{name}.".startswith(tuple(f"{room}." for room in NOT_OF_A_CONVERSION))] == []
    assert len(imported) <= MORE_THAN_TORCH


def test_sizes_are_read_as_they_are_written() -> None:
    assert [num_bytes(text) for text in ("8G", "500M", "1.5K", "7", "2GiB")] == [2**33, 500 << 20, 1536, 7, 2**31]
