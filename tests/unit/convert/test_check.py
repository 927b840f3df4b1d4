"""`mcore-rl check` names a flipped bit of any file of a checkpoint or an export; a damaged one is not converted."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from mcore_rl.cli.cli import main
from mcore_rl.convert.megatron.folder import open_dist
from mcore_rl.convert.megatron.model import KeyLayout
from mcore_rl.errors import CheckpointError
from mcore_rl.storage.checksums import crc32_of
from tests.conversion import differing, exported, imported, read_hf, saved, write_hf
from tests.hf_models import oracle
from tests.unit.convert.conftest import Converted
from tests.unit.convert.test_layouts import relaid

KEY = "decoder.layers.mlp.experts.experts.linear_fc2.weight"


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
    source, checkpoint = converted("qwen3_moe")
    return exported(checkpoint, tmp_path_factory.mktemp("export") / "hf", reference=source)


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
    without_ours(copy)
    status, output = check(copy, capsys)
    assert status == 1 and "no checkpoint.json, so that only the checksums inside of the archives" in output
    assert line in output and "nothing was recorded when it was written; it can be read" in output


def without_ours(checkpoint: Path) -> None:
    """Leave what Megatron-LM writes: no marker, no manifest, and no entry of this program in common.pt."""
    for name in ("checkpoint.json", "manifest.json"):
        (checkpoint / name).unlink()
    common = torch.load(checkpoint / "common.pt", weights_only=False)
    del common["mcore_rl"]
    torch.save(common, checkpoint / "common.pt")


@pytest.mark.parametrize("without", ["", "manifest.json", "common.pt"])
def test_a_checkpoint_of_this_program_without_its_marker_is_damaged_and_one_of_megatron_lm_is_not(
    without: str, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "iter_0000000"
    shutil.copytree(checkpoint, copy)
    for name in filter(None, ("checkpoint.json", without)):
        (copy / name).unlink()
    status, output = check(copy, capsys)
    assert status == 1 and "checkpoint.json  -  DAMAGED: it is missing" in output
    assert "files: checkpoint.json. Take another copy." in output.replace("\n", " ")
    if not without:
        shutil.copyfile(checkpoint / "checkpoint.json", copy / "checkpoint.json")
        without_ours(copy)
        assert check(copy, capsys)[0] == 0


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


FINDINGS = {"a marker": "it is damaged, or of another step", "no marker": "are not those that were written"}
"""By whether the checkpoint has a marker, which has the checksums of whole files: the finding."""


@pytest.mark.matrix("a marker")
@pytest.mark.parametrize("what", FINDINGS)
def test_a_flipped_bit_ends_an_export_and_leaves_nothing_that_looks_complete(
    what: str, tmp_path: Path, converted: Converted, capsys: pytest.CaptureFixture[str]
) -> None:
    source, path = converted("qwen3_moe")
    checkpoint = Path(shutil.copytree(path, tmp_path / path.name))
    if what == "no marker":
        (checkpoint / "checkpoint.json").unlink()
    part = open_dist(checkpoint).tensors[KEY].parts[0].saved
    file = checkpoint / part.file
    flip(file, part.start + part.length // 2)
    arguments = ["convert", "export", str(checkpoint), str(tmp_path / "out"), "--reference", str(source)]
    assert main(arguments) == 2
    assert FINDINGS[what] in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    for use in (
        lambda: relaid(checkpoint, tmp_path / "other", KeyLayout("local", "each"), source),
        lambda: differing(checkpoint, source),
    ):
        with pytest.raises(CheckpointError, match=FINDINGS[what]):
            use()
    flip(file, part.start + part.length // 2)
    assert main([*arguments, "--overwrite"]) == 0
    assert read_hf(tmp_path / "out").keys() == read_hf(source).keys()


@pytest.mark.full
def test_a_file_of_another_checkpoint_of_the_same_size_is_not_exported(tmp_path: Path) -> None:
    theirs = oracle("llama")
    paths = []
    for name, factor in (("one", 1.0), ("other", 2.0)):
        tensors = {key: tensor * factor for key, tensor in theirs.tensors.items()}
        paths.append(imported(write_hf(tmp_path / name, theirs.config, tensors), tmp_path / f"ckpt_{name}"))
    shutil.copy(paths[1] / "__0_0.distcp", paths[0] / "__0_0.distcp")
    with pytest.raises(CheckpointError, match="is not the file that was written"):
        exported(paths[0], tmp_path / "out")


def test_inspect_says_that_it_reads_headers_alone(converted: Converted, capsys: pytest.CaptureFixture[str]) -> None:
    for path in converted("qwen3_moe"):
        assert main(["inspect", str(path)]) == 0
        assert "the tensors are not read (mcore-rl check" in capsys.readouterr().out
