"""`mcore-rl convert` and `inspect` as a user gives them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mcore_rl.cli.cli import main
from mcore_rl.cli.commands.models import num_bytes
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


@pytest.mark.full
def test_no_command_that_compares_no_logits_imports_transformers(tmp_path: Path) -> None:
    code = (
        "import sys, mcore_rl.cli.cli as cli\n"
        "status = cli.main(sys.argv[1:])\n"
        "late = {name for name in ('transformers', 'mcore_rl.convert.logits') if name in sys.modules}\n"
        "sys.exit(f'{status} {late}' if status or late else 0)"
    )
    source = saved("llama", tmp_path / "hf")
    checkpoint, out = tmp_path / "ckpt", tmp_path / "out"
    for words in (
        ["plan", str(source)],
        ["import", str(source), str(checkpoint), "--no-check-logits", "--workers", "1"],
        ["export", str(checkpoint), str(out), "--reference", str(source), "--workers", "1"],
        ["verify", str(checkpoint), str(out)],
        ["relayout", str(checkpoint), str(tmp_path / "other"), "--keys", "local", "--workers", "1"],
    ):
        command = [sys.executable, "-c", code, "convert", *words]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, (words, done.stderr)


def test_sizes_are_read_as_they_are_written() -> None:
    assert [num_bytes(text) for text in ("8G", "500M", "1.5K", "7", "2GiB")] == [2**33, 500 << 20, 1536, 7, 2**31]
