"""An import is compared with transformers before it has its name, where that costs little or is asked for."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mcore_rl.cli.cli import main
from mcore_rl.families.dense import Llama
from mcore_rl.families.qwen3_moe import Qwen3Moe
from mcore_rl.families.shells import SHELLS
from tests.conversion import assert_same, read_hf, saved, write_hf
from tests.hf_models import oracle
from tests.unit.convert.test_fp8 import model as fp8_model
from tests.unit.convert.test_shells import CLASSES, as_published
from tests.unit.convert.test_shells import whole as images_and_text


def test_an_import_that_computes_something_else_gets_no_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = saved("qwen3_moe", tmp_path / "hf", torch.bfloat16)
    read = Qwen3Moe.from_hf

    def misread(self, config):
        arguments = read(self, config)
        return arguments | {"moe": arguments["moe"] | {"normalize_top_k": False}}

    with monkeypatch.context() as patched:
        patched.setattr(Qwen3Moe, "from_hf", misread)
        arguments = ["convert", "import", str(source), str(tmp_path / "ckpt"), "--workers", "1"]
        assert main(arguments) == 2
        assert "is another model: logits differ from transformers' by at most" in capsys.readouterr().err
        assert not list((tmp_path / "ckpt").glob("iter_*[0-9]"))
        # Nothing is copied again: what was written is named.
        assert main([*arguments, "--no-check-logits"]) == 0
    assert (tmp_path / "ckpt" / "iter_0000000").is_dir()
    assert "logits" not in capsys.readouterr().out


@pytest.mark.full
def test_an_import_in_another_type_is_compared_with_weights_rounded_alike(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = saved("deepseek_v3", tmp_path / "plain")
    config, stored, _ = fp8_model()
    quantized = write_hf(tmp_path / "fp8", config, stored)
    for source, options in ((plain, ["--dtype", "bf16"]), (quantized, [])):
        out = tmp_path / f"ckpt_{source.name}"
        assert main(["convert", "import", str(source), str(out), "--workers", "1", *options]) == 0
        assert "logits differ from transformers' by at most" in capsys.readouterr().out


@pytest.mark.full
def test_an_import_with_the_layers_of_hybrid_model_is_compared_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, checkpoint = saved("qwen3_moe", tmp_path / "hf"), tmp_path / "ckpt"
    importing = ["convert", "import", str(source), str(checkpoint), "--layers", "hybrid", "--workers", "1"]
    assert main(importing) == 0
    assert main(["convert", "verify", str(source), str(checkpoint), "--logits"]) == 0
    output = capsys.readouterr().out
    assert "layers hybrid (HybridModel's)" in output and "logits differ from transformers' by at most" in output


@pytest.mark.full
def test_it_is_said_why_logits_are_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = saved("deepseek_v3", tmp_path / "hf")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"model_type": "kimi_k2"}))
    arguments = ["convert", "import", str(source), str(tmp_path / "ckpt"), "--workers", "1"]
    assert main(arguments) == 0
    assert "logits are not compared: transformers has no 'kimi_k2'" in capsys.readouterr().out
    assert main([*arguments, "--overwrite", "--check-logits"]) == 2
    assert "there is nothing to compare the logits with" in capsys.readouterr().err


@pytest.mark.full
def test_weights_that_compute_nothing_finite_are_not_taken_for_another_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = oracle("qwen3_moe")
    name = "model.layers.1.input_layernorm.weight"
    weight = theirs.tensors[name].clone()
    weight[3] = 3.3e38  # finite, and its product with an input is not
    source = write_hf(tmp_path / "hf", theirs.config, theirs.tensors | {name: weight})
    arguments = ["convert", "import", str(source), str(tmp_path / "ckpt"), "--workers", "1"]
    assert main(arguments) == 2
    assert f"{source} computes NaN or infinite values, first in its layer 1" in capsys.readouterr().err
    assert main([*arguments, "--no-check-logits"]) == 0
    assert main(["convert", "verify", str(source), str(tmp_path / "ckpt")]) == 0


@pytest.mark.full
def test_the_text_model_in_a_model_of_images_is_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs = images_and_text("qwen3_vl_moe")
    source = write_hf(tmp_path / "hf", theirs.config, as_published(theirs.tensors))
    assert main(["convert", "import", str(source), str(tmp_path / "ckpt"), "--workers", "1"]) == 0
    printed = capsys.readouterr().out
    assert "logits differ from transformers' by at most" in printed
    assert "tensors are not of the text model (model.visual.*)" in printed
    arguments = [str(tmp_path / "ckpt"), str(tmp_path / "again"), "--reference", str(source), "--workers", "1"]
    assert main(["convert", "export", *arguments]) == 0
    assert_same(read_hf(tmp_path / "again"), read_hf(source))
    assert main(["convert", "plan", str(source)]) == 0
    assert main(["inspect", str(source)]) == 0


@pytest.mark.full
@pytest.mark.parametrize("name", CLASSES)
def test_a_model_of_images_without_theta_is_compared_as_a_whole(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """transformers makes the model from the folder alone: a default that is wrong here shows."""
    theirs = images_and_text(name)
    rope = {key: value for key, value in theirs.config["text_config"]["rope_parameters"].items() if key != "rope_theta"}
    text = theirs.config["text_config"] | {"rope_parameters": rope}
    source = write_hf(tmp_path / "hf", theirs.config | {"text_config": text}, theirs.tensors)
    arguments = ["convert", "import", str(source), "--workers", "1"]
    assert main([*arguments, str(tmp_path / "ckpt")]) == 0
    assert "logits differ from transformers' by at most" in capsys.readouterr().out
    wrong = replace(SHELLS[name], defaults={**SHELLS[name].defaults, "rope_theta": 777.0})
    monkeypatch.setitem(SHELLS, name, wrong)
    assert main([*arguments, str(tmp_path / "other")]) == 2
    assert "is another model: logits differ" in capsys.readouterr().err


@pytest.mark.full
def test_a_folder_that_transformers_cannot_run_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs, types = oracle("gpt_oss"), ["full_attention"] * 3
    config = theirs.config | {"layer_types": types, "sliding_window": None}
    source = write_hf(tmp_path / "hf", config, theirs.tensors)
    arguments = ["convert", "import", str(source), str(tmp_path / "ckpt"), "--workers", "1"]
    assert main(arguments) == 2
    assert f"transformers cannot run {source}: ValueError: Could not find a `sliding" in capsys.readouterr().err
    assert main([*arguments, "--no-check-logits"]) == 0


@pytest.mark.full
def test_shards_whose_index_is_lost_are_compared_a_layer_at_a_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """transformers does not find them."""
    source = saved("qwen3_moe", tmp_path / "hf")
    (source / "model.safetensors.index.json").unlink()
    assert main(["convert", "import", str(source), str(tmp_path / "ckpt"), "--workers", "1"]) == 0
    assert "logits differ from transformers' by at most" in capsys.readouterr().out


@pytest.mark.full
def test_a_model_of_images_without_one_of_its_tensors_is_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs, name = images_and_text("qwen3_vl"), "model.visual.blocks.0.attn.qkv.weight"
    tensors = {other: tensor for other, tensor in theirs.tensors.items() if other != name}
    source = write_hf(tmp_path / "hf", theirs.config, tensors)
    assert main(["convert", "import", str(source), str(tmp_path / "ckpt"), "--workers", "1"]) == 2
    assert f"transformers lacks tensors of {source} in their shapes:\n  {name}" in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.parametrize("case", ["qwen3_next", "qwen3_5_text", "deepseek_v3"])
def test_rounding_that_many_layers_amplify_is_not_taken_for_another_model(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = saved(case, tmp_path / "hf", num_hidden_layers=24)
    assert main(["convert", "import", str(source), str(tmp_path / "ckpt"), "--workers", "1"]) == 0
    assert "logits differ from transformers' by at most" in capsys.readouterr().out


def test_a_small_mistake_is_no_rounding_where_a_model_amplifies_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It changes logits by 6e-5, less than a hundred-thousandth of the largest times two."""
    source = saved("llama", tmp_path / "hf")
    read = Llama.from_hf
    monkeypatch.setattr(Llama, "from_hf", lambda self, config: read(self, config) | {"norm_eps": 1.15e-6})
    assert main(["convert", "import", str(source), str(tmp_path / "ckpt"), "--workers", "1"]) == 2
    assert "is another model: logits differ" in capsys.readouterr().err
