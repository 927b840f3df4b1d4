"""A damaged checkpoint is not exported, and tensors that repeat others are compared as well."""

import shutil
from pathlib import Path

import pytest
import torch

from mcore_rl.cli.cli import main
from mcore_rl.convert.megatron.folder import open_dist
from mcore_rl.convert.megatron.model import KeyLayout
from mcore_rl.errors import CheckpointError
from tests.conversion import differing, exported, imported, read_hf, with_mtp, write_hf
from tests.hf_models import oracle
from tests.unit.convert.conftest import Converted
from tests.unit.convert.test_layouts import relaid

KEY = "decoder.layers.mlp.experts.experts.linear_fc2.weight"


def flip(file: Path, byte: int) -> None:
    """Flip one bit."""
    data = bytearray(file.read_bytes())
    data[byte] ^= 4
    file.write_bytes(data)


FINDINGS = {"a marker": "it is damaged, or of another step", "no marker": "are not those that were written"}
"""By whether the checkpoint has a marker, which has the checksums of whole files: the finding."""


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


def test_a_tied_output_that_differs_is_found_in_any_pair_of_formats(tmp_path: Path, converted: Converted) -> None:
    theirs = oracle("qwen3")
    source, checkpoint = converted("qwen3")
    output = theirs.tensors["model.embed_tokens.weight"].clone()
    same = write_hf(tmp_path / "same", theirs.config, theirs.tensors | {"lm_head.weight": output})
    output = output.clone()
    output[3, 5] += 1
    other = write_hf(tmp_path / "other", theirs.config, theirs.tensors | {"lm_head.weight": output})
    for known in (source, checkpoint, same):
        assert differing(known, same) == []
        for pair in ((known, other), (other, known)):
            found = differing(*pair)
            assert [difference.name for difference in found] == ["lm_head.weight"]
            assert "1 of 4752 values differ" in str(found[0])


def test_an_embedding_of_an_mtp_layer_that_differs_is_found(tmp_path: Path) -> None:
    config, tensors = with_mtp()
    name = "model.layers.3.embed_tokens.weight"
    checkpoint = imported(write_hf(tmp_path / "hf", config, tensors), tmp_path / "ckpt")
    other = write_hf(tmp_path / "other", config, tensors | {name: torch.zeros_like(tensors[name])})
    assert [difference.name for difference in differing(checkpoint, other)] == [name]
