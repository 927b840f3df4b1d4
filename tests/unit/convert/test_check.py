"""`mcore-rl check`: a flipped bit of any file of a checkpoint or an export is named, without a second copy."""

import json
import shutil
from pathlib import Path

import pytest
from torch.distributed.checkpoint import FileSystemReader

from mcore_rl.cli.cli import main
from mcore_rl.storage.checksums import crc32_of
from tests.conversion import exported, saved
from tests.unit.convert.conftest import Converted


def check(path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """The status of the command, and what it prints."""
    status = main(["check", str(path)])
    output = capsys.readouterr()
    return status, output.out + output.err


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


@pytest.fixture(scope="module")
def checkpoint(converted: Converted) -> Path:
    return converted("qwen3_moe")[1]


@pytest.fixture(scope="module")
def export(converted: Converted, tmp_path_factory: pytest.TempPathFactory) -> Path:
    source, imported = converted("qwen3_moe")
    return exported(imported, tmp_path_factory.mktemp("export") / "hf", reference=source)


def test_one_flipped_bit_of_any_file_of_a_checkpoint_is_named(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "iter_0000000"
    shutil.copytree(checkpoint, copy)
    status, output = check(copy, capsys)
    files = sorted(file.name for file in copy.iterdir() if file.name != "checkpoint.json")
    assert status == 0 and output.count("as written (CRC-32)") == len(files)
    assert output.endswith(f"{len(files)} files, none damaged\n")
    for name in [*files, "checkpoint.json"]:
        size = (copy / name).stat().st_size
        flip(copy / name, 2 * size // 3)
        status, output = check(copy, capsys)
        assert status == 1 and f"files: {name}. Take another copy." in output.replace("\n", " "), output
        shutil.copyfile(checkpoint / name, copy / name)
    assert check(copy, capsys)[0] == 0


def test_a_damaged_tensor_is_named_whether_the_marker_knows_its_file_or_not(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "iter_0000000"
    shutil.copytree(checkpoint, copy)
    key, place = max(
        ((index.fqn, info) for index, info in FileSystemReader(copy).read_metadata().storage_data.items()),
        key=lambda entry: entry[1].length,
    )
    flip(copy / place.relative_path, place.offset + place.length // 2)
    status, output = check(copy, capsys)
    line = next(line for line in output.splitlines() if place.relative_path in line)
    assert status == 1 and line.endswith(f"DAMAGED: not the bytes that were written: {key}")
    # As Megatron-LM writes it, and a version of this program that recorded no checksums of files.
    (copy / "checkpoint.json").unlink()
    status, output = check(copy, capsys)
    assert status == 1 and "no checkpoint.json, so that only the checksums inside of the archives" in output
    assert line in output and "nothing was recorded when it was written; it can be read" in output


def test_missing_and_cut_files_and_what_came_later_are_named(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "iter_0000000"
    shutil.copytree(checkpoint, copy)
    (copy / "notes.txt").write_text("mine")
    assert check(copy, capsys)[0] == 0
    (copy / "common.pt").unlink()
    with (copy / ".metadata").open("rb+") as file:
        file.truncate(100)
    status, output = check(copy, capsys)
    assert status == 1 and "DAMAGED: 2 of " in output
    assert "common.pt  -  DAMAGED: is missing" in output
    assert "DAMAGED: has 100 bytes, " in output
    assert "notes.txt  4 bytes  not compared: " in output
    assert check(tmp_path / "gone", capsys)[0] == 2


def test_one_flipped_bit_of_any_file_of_an_export_is_named(
    export: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "hf"
    shutil.copytree(export, copy)
    recorded = json.loads((copy / "manifest.json").read_text())["files"]
    assert {name: entry["crc32"] for name, entry in recorded.items()} == {
        file.name: crc32_of(file) for file in copy.iterdir() if file.name != "manifest.json"
    }
    status, output = check(copy, capsys)
    assert status == 0 and output.count("as written (CRC-32)") == len(recorded)
    for name in recorded:
        flip(copy / name, (copy / name).stat().st_size - 1)
        status, output = check(copy, capsys)
        assert status == 1 and f"files: {name}. Take another copy." in output, output
        shutil.copyfile(export / name, copy / name)
    # A manifest of an earlier version has checksums of tensors alone.
    manifest = json.loads((copy / "manifest.json").read_text())
    del manifest["files"]
    (copy / "manifest.json").write_text(json.dumps(manifest))
    status, output = check(copy, capsys)
    assert status == 0 and "tensors as written (CRC-32)" in output
    assert "config.json" in output and "not compared: nothing was recorded" in output


def test_a_downloaded_folder_has_nothing_recorded_and_it_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = saved("llama", tmp_path / "hf")
    status, output = check(source, capsys)
    assert status == 0 and "no manifest.json" in output and "nothing was recorded when it was written" in output
