"""A text model inside of a model of images: its weights are converted, all other tensors pass byte for byte."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from mcore_rl.checks.model import checked_model_from_hf
from mcore_rl.config.model import ModelConfig
from mcore_rl.convert.exporting import ExportOptions, plan_export
from mcore_rl.convert.megatron.model import KeyLayout
from mcore_rl.errors import CheckpointError, ConfigError
from mcore_rl.megatron.mesh import Mesh
from mcore_rl.storage.checkpoint import read_marker, write_marker
from mcore_rl.storage.folders import ModelImport
from tests.conversion import ONE_FILE, assert_same, changed, differing, exported, imported, read_dist, read_hf, write_hf
from tests.hf_models import GROUPED, TOLERANCE, Oracle, Tensors, oracle, oracle_of, random_tokens
from tests.hf_weights import to_global
from tests.unit.convert.test_fp8 import model as fp8_model
from tests.unit.convert.test_int4 import model as int4_model
from tests.unit.convert.test_layouts import relaid
from tests.unit.model.test_logits_equal_transformers import logits_of

POSITIONS = {"rope_type": "default", "rope_theta": 1e4}
INTERLEAVED = POSITIONS | {"mrope_interleaved": True}
TEXT: dict[str, Any] = GROUPED | {"rope_parameters": INTERLEAVED | {"mrope_section": [4, 4, 4]}}
EXPERTS = {"moe_intermediate_size": 20, "num_experts": 6, "num_experts_per_tok": 2}
TOWER = {"depth": 2, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 48}
DELTA_VISION = TOWER | {"num_position_embeddings": 16}
VISION = DELTA_VISION | {"deepstack_visual_indexes": [1]}
GLM_VISION = TOWER | {"image_size": 56}
GLM = TEXT | {
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.5,
    "rope_parameters": POSITIONS | {"mrope_section": [2, 2, 2], "partial_rotary_factor": 0.5},
}
DELTA = TEXT | {
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "rope_parameters": INTERLEAVED | {"mrope_section": [1, 1, 1], "partial_rotary_factor": 0.25},
}
OF_DELTA = EXPERTS | {"shared_expert_intermediate_size": 40}
CLASSES = {
    "qwen3_vl_moe": ("Qwen3VLMoe", TEXT | EXPERTS, VISION, "qwen3_moe"),
    "qwen3_vl": ("Qwen3VL", TEXT, VISION, "qwen3"),
    "glm4v_moe": ("Glm4vMoe", GLM, GLM_VISION, "glm4_moe"),
    "qwen3_5_moe": ("Qwen3_5Moe", DELTA | OF_DELTA, DELTA_VISION, "qwen3_5_moe_text"),
    "qwen3_5": ("Qwen3_5", DELTA, DELTA_VISION, "qwen3_5_text"),
}
"""By `model_type`, the prefix of transformers' classes, the settings of texts and of images, and the text's family."""


@cache
def whole(name: str) -> Oracle:
    """A model of images with random weights, whose experts lie as transformers saves them: not transposed."""
    prefix, text, vision, _ = CLASSES[name]
    config = getattr(transformers, f"{prefix}Config")(text_config=text, vision_config=vision)
    return oracle_of(config, f"{prefix}ForConditionalGeneration")


def as_published(tensors: Tensors) -> Tensors:
    """With the matrices of the experts transposed."""
    return {name: t.mT.contiguous() if t.dim() == 3 and ".experts." in name else t for name, t in tensors.items()}


def of_text(tensors: Tensors) -> Tensors:
    """The text model's tensors, under its family's names."""
    return {
        name.replace("model.language_model.", "model."): tensor
        for name, tensor in tensors.items()
        if not name.startswith("model.visual.")
    }


@pytest.mark.parametrize("name", CLASSES)
def test_texts_have_the_logits_of_the_whole_model(name: str, one_rank: Mesh) -> None:
    theirs = whole(name)
    assert theirs.ours.family == CLASSES[name][3]
    tokens_BS = random_tokens()
    with torch.no_grad():
        wanted: Tensor = theirs.model(input_ids=tokens_BS).logits
    found = logits_of(theirs.ours, to_global(of_text(theirs.tensors), theirs.ours), tokens_BS, one_rank)
    # Gated delta nets amplify rounding.
    assert (found - wanted).abs().max() <= (2e-4 if name.startswith("qwen3_5") else TOLERANCE)


@pytest.mark.full
def test_expert_biases_of_a_model_of_images_return_in_its_type(tmp_path: Path) -> None:
    theirs = whole("glm4v_moe")
    in_bf16 = {name: tensor.bfloat16() for name, tensor in theirs.tensors.items()}
    source = write_hf(tmp_path / "hf", theirs.config, in_bf16)
    checkpoint = imported(source, tmp_path / "ckpt")
    assert_same(read_hf(exported(checkpoint, tmp_path / "whole", reference=source)), in_bf16)
    assert_same(read_hf(exported(checkpoint, tmp_path / "text")), of_text(in_bf16))


@pytest.mark.matrix("glm4v_moe-as transformers saves")
@pytest.mark.parametrize("is_published", [False, True], ids=["as transformers saves", "as published"])
@pytest.mark.parametrize("name", CLASSES)
def test_every_tensor_comes_back_bit_for_bit(name: str, is_published: bool, tmp_path: Path) -> None:
    theirs = whole(name)
    transposes = is_published and not name.startswith("qwen3_5")  # published as transformers saves
    tensors = as_published(theirs.tensors) if transposes else theirs.tensors
    source = write_hf(tmp_path / "hf", theirs.config, tensors, shards=3)
    checkpoint = imported(source, tmp_path / "ckpt")
    assert_same(read_dist(checkpoint), to_global(of_text(theirs.tensors), theirs.ours))
    again = exported(checkpoint, tmp_path / "again", reference=source)
    assert_same(read_hf(again), tensors)
    assert (again / "config.json").read_bytes() == (source / "config.json").read_bytes()
    assert differing(source, checkpoint) == [] and differing(source, again) == []
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    passing = {tensor for tensor in tensors if tensor.startswith("model.visual.")}
    assert passing and passing == set(manifest["left_out"])
    assert passing <= manifest["sources"]["tensors"].keys()


@pytest.mark.full
def test_without_a_reference_an_export_is_the_text_model_alone(tmp_path: Path) -> None:
    theirs = whole("qwen3_vl_moe")
    source = write_hf(tmp_path / "hf", theirs.config, as_published(theirs.tensors))
    alone = exported(imported(source, tmp_path / "ckpt"), tmp_path / "alone")
    assert json.loads((alone / "config.json").read_text())["model_type"] == "qwen3_moe"
    read = read_hf(alone)
    assert not any("visual" in name or "language_model" in name for name in read)
    experts = theirs.tensors["model.language_model.layers.1.mlp.experts.down_proj"]
    assert torch.equal(read["model.layers.1.mlp.experts.4.down_proj.weight"], experts[4])


def test_a_reference_without_its_tensors_is_refused(tmp_path: Path) -> None:
    theirs = whole("qwen3_vl_moe")
    source = write_hf(tmp_path / "hf", theirs.config, theirs.tensors)
    checkpoint = imported(source, tmp_path / "ckpt")
    (source / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="model_type='qwen3_vl_moe' and no tensors"):
        exported(checkpoint, tmp_path / "again", reference=source)


def kimi() -> tuple[dict[str, Any], Tensors]:
    """A folder as Kimi-K2.5's: the text model of Kimi-K2 under names of its own, a tower and a projector."""
    text = oracle("deepseek_v3")
    around = {
        "vision_tower.patch_embed.proj.weight": torch.rand(16, 3, 2, 2),
        "mm_projector.proj.0.bias": torch.rand(16).bfloat16(),
    }
    config = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "tie_word_embeddings": False,
        "text_config": text.config | {"model_type": "kimi_k2", "tie_word_embeddings": True},
        "vision_config": {"vt_hidden_size": 16},
    }
    return config, {f"language_model.{name}": t for name, t in text.tensors.items()} | around


def test_kimi_k25_is_kimi_k2_within_a_tower_and_a_projector(tmp_path: Path) -> None:
    config, tensors = kimi()
    source = write_hf(tmp_path / "hf", config, tensors, shards=2)
    checkpoint = imported(source, tmp_path / "ckpt")
    theirs = oracle("deepseek_v3")
    assert_same(read_dist(checkpoint), to_global(theirs.tensors, theirs.ours))
    assert_same(read_hf(exported(checkpoint, tmp_path / "again", reference=source)), tensors)


@pytest.mark.matrix("fp8")
@pytest.mark.parametrize(("model", "kind"), [(int4_model, "int4"), (fp8_model, "fp8")], ids=["int4", "fp8"])
def test_blocks_of_a_text_model_inside_are_read_and_written_under_the_names_of_their_folder(
    model: Callable[[], tuple[dict[str, Any], Tensors, Tensors]], kind: str, tmp_path: Path
) -> None:
    """The quantization stands in the text model's config there, and is left out where the weights are plain."""
    text, stored, meant = model()
    config, _ = kimi()
    tower = {"vision_tower.blocks.0.wo.weight": torch.rand(8, 8).bfloat16()}

    def inside(tensors: Tensors) -> Tensors:
        return {f"language_model.{name}": tensor for name, tensor in tensors.items()} | tower

    source = write_hf(tmp_path / "hf", config | {"text_config": text}, inside(stored))
    again = exported(imported(source, tmp_path / "ckpt"), tmp_path / "again", reference=source)
    assert_same(read_hf(again), inside(meant))
    written = json.loads((again / "config.json").read_text())
    assert "quantization_config" not in written["text_config"] and written["vision_config"] == config["vision_config"]
    packed = exported(tmp_path / "ckpt", tmp_path / "packed", reference=source, quantize=kind)
    assert_same(read_hf(packed), inside(stored))
    assert (packed / "config.json").read_bytes() == (source / "config.json").read_bytes()


@pytest.mark.full
def test_quantized_tensors_that_pass_are_refused(tmp_path: Path) -> None:
    config, tensors = kimi()
    quantized = {"vision_tower.blocks.0.wo.weight": torch.rand(8, 8).to(torch.float8_e4m3fn)}
    source = write_hf(tmp_path / "hf", config, tensors)
    checkpoint = imported(source, tmp_path / "ckpt")
    other = write_hf(tmp_path / "other", config, tensors | quantized)
    with pytest.raises(CheckpointError, match=r"blocks.0.wo.weight is quantized and not of the text"):
        exported(checkpoint, tmp_path / "again", reference=other)


SEQUENCE = {"architectures": ["KimiK25ForSequenceClassification"]}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no text": ({"text_config": None}, "lacks text_config"),
    "another text": ({"text_config": {"model_type": "qwen3_next"}}, "text_config.model_type='qwen3_next'"),
    "tied or not": ({"tie_word_embeddings": None}, "lacks tie_word_embeddings"),
    "of another type": ({"text_config": ["deepseek_v3"]}, "wanted an object"),
    "two classes": (SEQUENCE, "2 labels"),
    "a score": (SEQUENCE | {"num_labels": 1}, "a score of texts and images"),
}


@pytest.mark.full
@pytest.mark.parametrize("case", REFUSED)
def test_what_a_shell_lacks_is_refused_by_name(case: str) -> None:
    change, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        checked_model_from_hf(kimi()[0] | change)


VISION_BIAS, VISION_NORM = "model.visual.blocks.0.attn.qkv.bias", "model.visual.blocks.1.norm1.weight"
OTHER_VALUES = "has other values, or another type or shape"
OTHER_REFERENCES: dict[str, tuple[dict[str, Any], str]] = {
    "one doubled": ({VISION_NORM: lambda x: 2 * x}, f"{VISION_NORM} {OTHER_VALUES}"),
    "one bit flipped": (
        {VISION_NORM: lambda x: (x.view(torch.int32) ^ (torch.arange(len(x)) == 7)).view(x.dtype)},
        f"{VISION_NORM} {OTHER_VALUES}",
    ),
    "one of another shape": ({VISION_BIAS: lambda x: x.view(2, -1)}, f"{VISION_BIAS} {OTHER_VALUES}"),
    "one of another type": ({VISION_BIAS: lambda x: x.view(torch.int32)}, f"{VISION_BIAS} {OTHER_VALUES}"),
    "one missing": ({VISION_BIAS: None}, f"{VISION_BIAS} is missing"),
    "one more": ({"model.visual.blocks.7.norm1.weight": torch.ones(16)}, "blocks.7.norm1.weight was not there"),
    "one renamed": (
        {VISION_NORM: None, "model.visual.blocks.1.norm9.weight": torch.ones(16)},
        r"(?s)norm1.weight is missing\n.*norm9.weight was not there",
    ),
}
"""Name: changes of the tensors of the folder that was imported, and the message."""


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tensors, Path, Path]:
    """A model of images: its tensors, its folder, and the import."""
    theirs, folder = whole("qwen3_vl"), tmp_path_factory.mktemp("images")
    source = write_hf(folder / "hf", theirs.config, theirs.tensors)
    return theirs.tensors, source, imported(source, folder / "ckpt")


@pytest.mark.full
@pytest.mark.parametrize("case", OTHER_REFERENCES)
def test_a_reference_with_other_tensors_than_the_folder_that_was_imported_is_refused(
    case: str, images: tuple[Tensors, Path, Path], tmp_path: Path
) -> None:
    tensors, _, checkpoint = images
    changes, message = OTHER_REFERENCES[case]
    other = write_hf(tmp_path / "other", whole("qwen3_vl").config, changed(tensors, changes))
    with pytest.raises(CheckpointError, match=message):
        exported(checkpoint, tmp_path / "out", reference=other)
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.converting").exists()


def trained(checkpoint: Path, load: Path, run_dir: Path) -> Path:
    """Write a checkpoint with the weights of `checkpoint`, as a run that has begun from `load` does."""
    folder = run_dir / "checkpoints/iter_0000005"
    shutil.copytree(checkpoint, folder)
    (folder / "manifest.json").unlink()
    marker = read_marker(folder)
    files, crc32 = (
        {name: value for name, value in recorded.items() if name != "manifest.json"}
        for recorded in (marker.files, marker.crc32)
    )
    settings = {"checkpoint": {"load": str(load)}, "model": marker.model, "run_dir": str(run_dir)}
    write_marker(folder, replace(marker, step=5, program="sft", files=files, crc32=crc32, settings=settings))
    return folder


WAYS: dict[str, Callable[[Path, Path, Path], Path]] = {
    "a relayout": lambda _, made, folder: relaid(made, folder / "new", KeyLayout("local", "each")),
    "a run": lambda _, made, folder: trained(made, made, folder / "a"),
    "a run from the folder of imports": lambda _, made, folder: trained(made, made.parent, folder / "a"),
    "a run from a run": lambda _, made, folder: trained(
        made, trained(made, made, folder / "a").parents[1], folder / "b"
    ),
    "a run from a relayout": lambda _, made, folder: trained(
        made, relaid(made, folder / "new", KeyLayout("te", "each")), folder / "a"
    ),
    "a relayout of a run": lambda _, made, folder: relaid(
        trained(made, made, folder / "a"), folder / "new", KeyLayout("te", "each")
    ),
    "a run from a Hugging Face folder": lambda source, made, folder: trained_from(source, made, folder),
}


def trained_from(source: Path, checkpoint: Path, folder: Path) -> Path:
    """Write a checkpoint of a run that has begun from a Hugging Face folder, which was imported next to the run."""
    made = ModelImport(source, ModelConfig.model_validate(read_marker(checkpoint).model), folder / "imports")
    shutil.copytree(checkpoint.parent, made.path)
    return trained(checkpoint, source, folder / "run")


@pytest.mark.full
@pytest.mark.parametrize("way", WAYS)
def test_the_import_is_found_behind_relayouts_and_runs(
    way: str, images: tuple[Tensors, Path, Path], tmp_path: Path
) -> None:
    tensors, source, checkpoint = images
    later = WAYS[way](source, checkpoint, tmp_path)
    other = write_hf(tmp_path / "other", whole("qwen3_vl").config, changed(tensors, {VISION_NORM: lambda x: 2 * x}))
    with pytest.raises(CheckpointError, match=f"{VISION_NORM} has other values"):
        exported(later, tmp_path / "out", reference=other)
    assert_same(read_hf(exported(later, tmp_path / "out", reference=source)), tensors)


def notes(checkpoint: Path, reference: Path, folder: Path) -> str:
    return "\n".join(plan_export(checkpoint, folder, ExportOptions(reference=reference), ONE_FILE).notes)


@pytest.mark.full
def test_it_is_said_whether_the_tensors_of_a_reference_could_be_compared(
    images: tuple[Tensors, Path, Path], tmp_path: Path
) -> None:
    tensors, source, checkpoint = images
    resharded = write_hf(tmp_path / "resharded", whole("qwen3_vl").config, tensors, shards=4)
    assert "as they were imported" in notes(checkpoint, resharded, tmp_path / "out")
    gone = trained(checkpoint, tmp_path / "gone", tmp_path / "a")
    assert "compared with nothing" in notes(gone, source, tmp_path / "out")
    itself = trained(checkpoint, tmp_path / "b", tmp_path / "b")
    assert "compared with nothing" in notes(itself, source, tmp_path / "out")
    # Of the text model alone, whose folder has no tensors of images.
    text = imported(exported(checkpoint, tmp_path / "text"), tmp_path / "again")
    assert "compared with nothing" in notes(text, source, tmp_path / "out")


@pytest.mark.full
def test_the_scales_of_another_reference_are_refused(tmp_path: Path) -> None:
    config, stored, _ = int4_model()
    checkpoint = imported(write_hf(tmp_path / "hf", config, stored), tmp_path / "ckpt")
    name = next(name for name in stored if name.endswith("_scale"))
    other = write_hf(tmp_path / "other", config, changed(stored, {name: lambda x: x / 2}))
    with pytest.raises(CheckpointError, match=f"{name} has other values"):
        exported(checkpoint, tmp_path / "out", reference=other, quantize="int4")
