"""The same checkpoint under Megatron's other names, those of HybridModel too, and one that does not name its model.

tests/hybrid has HybridModel itself.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config

from mcore_rl.cli.cli import main
from mcore_rl.config.run import PlatformConfig
from mcore_rl.convert.copying.copier import convert
from mcore_rl.convert.importing import FORMAT, plan_relayout
from mcore_rl.convert.megatron.folder import open_dist
from mcore_rl.convert.megatron.model import KeyLayout, open_dist_model
from mcore_rl.errors import CheckpointError
from mcore_rl.megatron.mesh import Mesh
from mcore_rl.megatron.platform import start
from mcore_rl.model.build import build_uninitialized
from mcore_rl.storage.checkpoint import read_marker, write_marker
from mcore_rl.storage.checkpoints.write import load_weights
from tests.conversion import ONE_FILE, assert_same, differing, exported, imported, quiet, read_dist, read_hf, saved
from tests.hf_models import oracle
from tests.unit.convert.conftest import Converted


def relaid(source: Path, folder: Path, layout: KeyLayout, reference: Path | None = None) -> Path:
    with quiet() as progress:
        return convert(plan_relayout(source, folder, layout, reference, ONE_FILE), ONE_FILE, progress)


LAYOUTS = [
    (case, keys, layers)
    for case in ("qwen3_moe", "llama", "deepseek_v3")
    for keys in ("te", "local")
    for layers in ("stacked", "each")
    if (case, layers) != ("deepseek_v3", "stacked")
]


@pytest.mark.matrix("llama-local-stacked")
@pytest.mark.parametrize(("case", "keys", "layers"), LAYOUTS)
def test_every_layout_is_read_and_leads_back_to_the_same_bytes(
    case, keys, layers, converted: Converted, tmp_path: Path
) -> None:
    source, checkpoint = converted(case)
    other = relaid(checkpoint, tmp_path / "other", KeyLayout(keys, layers))
    assert_same(read_dist(other), read_dist(imported(source, tmp_path / "again", keys=keys, layers=layers)))
    assert_same(read_hf(exported(other, tmp_path / "back")), read_hf(source))
    native = KeyLayout("te", "each" if case == "deepseek_v3" else "stacked")
    assert_same(read_dist(relaid(other, tmp_path / "home", native)), read_dist(checkpoint))


def test_a_trained_checkpoint_stays_one_of_its_run(converted: Converted, tmp_path: Path) -> None:
    """A run that goes on compares its settings, files and code with the marker's."""
    source = tmp_path / "source"
    shutil.copytree(converted("llama")[1], source)
    changes = {"settings": {"train": {"steps": 5}}, "inputs": {"data.train": {"a": "b"}}, "numerics": 5}
    of_run = replace(read_marker(source), program="pretrain", **changes)
    write_marker(source, of_run)
    found = read_marker(relaid(source, tmp_path / "other", KeyLayout("te", "each")))
    assert replace(of_run, files=found.files, crc32=found.crc32, time=found.time) == found


@pytest.mark.full
def test_the_keys_of_local_layers_are_megatrons(tmp_path: Path) -> None:
    """Megatron's local layers have other names for the norms before MLPs and for those of latents."""
    qwen = read_dist(imported(saved("qwen3_moe", tmp_path / "a"), tmp_path / "b", keys="local", layers="each"))
    norm = oracle("qwen3_moe").tensors["model.layers.1.post_attention_layernorm.weight"]
    assert torch.equal(qwen["decoder.layers.1.mlp.linear_fc1.layer_norm_weight"], norm)
    assert "decoder.layers.1.pre_mlp_layernorm.weight" not in qwen
    deepseek = read_dist(imported(saved("deepseek_v3", tmp_path / "c"), tmp_path / "d", keys="local"))
    theirs = oracle("deepseek_v3").tensors
    for key, name in {
        "decoder.layers.0.pre_mlp_layernorm.weight": "model.layers.0.post_attention_layernorm.weight",
        "decoder.layers.2.pre_mlp_layernorm.weight": "model.layers.2.post_attention_layernorm.weight",
        "decoder.layers.1.self_attention.q_layernorm.weight": "model.layers.1.self_attn.q_a_layernorm.weight",
        "decoder.layers.1.self_attention.kv_layernorm.weight": "model.layers.1.self_attn.kv_a_layernorm.weight",
    }.items():
        assert torch.equal(deepseek[key], theirs[name])


def test_layers_that_differ_cannot_be_stacked(tmp_path: Path) -> None:
    checkpoint = imported(saved("deepseek_v3", tmp_path / "hf"), tmp_path / "ckpt")
    with pytest.raises(CheckpointError, match="cannot be stacked"):
        relaid(checkpoint, tmp_path / "other", KeyLayout("te", "stacked"))


@pytest.mark.full
@pytest.mark.parametrize("case", ["qwen3_moe", "deepseek_v3"])
def test_a_checkpoint_without_marker_takes_its_family_from_the_reference(case: str, tmp_path: Path) -> None:
    source = saved(case, tmp_path / "hf")
    foreign = imported(source, tmp_path / "ckpt", vocab_multiple=64, keys="local")
    (foreign / "checkpoint.json").unlink()
    (foreign / "manifest.json").unlink()
    assert open_dist(foreign).marker is None
    with pytest.raises(CheckpointError, match=r"does not name its model.*--reference"):
        exported(foreign, tmp_path / "back")
    assert_same(read_hf(exported(foreign, tmp_path / "back", reference=source)), read_hf(source))
    assert differing(source, foreign) == []


def test_a_reference_of_another_model_is_refused(tmp_path: Path) -> None:
    checkpoint = imported(saved("qwen3_moe", tmp_path / "hf"), tmp_path / "ckpt")
    other = saved("qwen3_moe-raw-gates", tmp_path / "other")
    with pytest.raises(CheckpointError, match="normalize_top_k is false there, true here"):
        exported(checkpoint, tmp_path / "back", reference=other)


@pytest.mark.full
def test_a_reference_needs_no_weights(tmp_path: Path) -> None:
    source = saved("mixtral", tmp_path / "hf")
    checkpoint = imported(source, tmp_path / "ckpt")
    for file in source.glob("model*"):
        shutil.move(file, tmp_path)
    back = exported(checkpoint, tmp_path / "back", reference=source)
    assert (back / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    assert_same(read_hf(back), read_hf(tmp_path))


NATIVE = {"qwen3_moe": "stacked", "llama": "stacked", "qwen3": "stacked", "glm4_moe": "each"}
"""Cases, and how training groups their layers: of a glm4_moe the first layer is dense."""
PATTERNS = {"qwen3_moe": "*E*E*E", "llama": "*-*-*-", "qwen3": "*-*-*-", "glm4_moe": "*-*E*E"}


def args_of(checkpoint: Path) -> dict[str, Any]:
    return vars(torch.load(checkpoint / "common.pt", weights_only=False)["args"])


@pytest.mark.full
@pytest.mark.parametrize(("case", "keys"), [(case, "te") for case in NATIVE] + [("qwen3_moe", "local")])
def test_hybrid_layers_lead_back_to_the_same_bytes(case: str, keys: Any, converted: Converted, tmp_path: Path) -> None:
    source, checkpoint = converted(case)
    hybrid = imported(source, tmp_path / "hybrid", keys=keys, layers="hybrid")
    assert_same(read_dist(relaid(checkpoint, tmp_path / "other", KeyLayout(keys, "hybrid"))), read_dist(hybrid))
    assert open_dist_model(hybrid).layout == KeyLayout(keys, "hybrid")
    assert_same(read_hf(exported(hybrid, tmp_path / "back")), read_hf(source))
    home = relaid(hybrid, tmp_path / "home", KeyLayout("te", NATIVE[case]))  # type: ignore[arg-type]
    assert_same(read_dist(home), read_dist(checkpoint))
    assert differing(source, hybrid) == [] and differing(hybrid, checkpoint) == []


def test_attention_of_layer_i_is_layer_2i_and_its_mlp_layer_2i_plus_1(tmp_path: Path) -> None:
    found = read_dist(imported(saved("glm4_moe", tmp_path / "hf"), tmp_path / "ckpt", layers="hybrid"))
    theirs = oracle("glm4_moe").tensors
    layer = "model.layers.{}.{}.weight"
    for key, name in {
        "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight": layer.format(0, "input_layernorm"),
        "decoder.layers.1.mlp.linear_fc1.layer_norm_weight": layer.format(0, "post_attention_layernorm"),
        "decoder.layers.1.mlp.linear_fc2.weight": layer.format(0, "mlp.down_proj"),
        "decoder.layers.4.self_attention.linear_proj.weight": layer.format(2, "self_attn.o_proj"),
        "decoder.layers.4.self_attention.q_layernorm.weight": layer.format(2, "self_attn.q_norm"),
        "decoder.layers.5.pre_mlp_layernorm.weight": layer.format(2, "post_attention_layernorm"),
        "decoder.layers.5.mlp.router.weight": layer.format(2, "mlp.gate"),
        "decoder.layers.5.mlp.shared_experts.linear_fc2.weight": layer.format(2, "mlp.shared_experts.down_proj"),
        "decoder.final_norm.weight": "model.norm.weight",
    }.items():
        assert torch.equal(found[key], theirs[name]), key
    layers = {int(key.split(".")[2]) for key in found if key.startswith("decoder.layers.")}
    assert layers == set(range(6)) and "decoder.final_layernorm.weight" not in found


@pytest.mark.full
@pytest.mark.parametrize("case", PATTERNS)
def test_the_arguments_of_megatron_lm_have_the_pattern(case: str, converted: Converted, tmp_path: Path) -> None:
    """Without it Megatron-LM 0.19 takes a checkpoint for GPTModel's, and with it for HybridModel's."""
    source, checkpoint = converted(case)
    native = args_of(checkpoint)
    assert native["num_layers"] == 3 and native.get("hybrid_layer_pattern") is None
    hybrid = imported(source, tmp_path / "hybrid", layers="hybrid")
    found = args_of(hybrid)
    assert (found["num_layers"], found["hybrid_layer_pattern"]) == (6, PATTERNS[case])
    assert args_of(relaid(checkpoint, tmp_path / "other", KeyLayout("te", "hybrid"))) == found
    home = args_of(relaid(hybrid, tmp_path / "home", KeyLayout("te", NATIVE[case])))  # type: ignore[arg-type]
    absent = {name: None for name in home if name not in native}
    assert home == native | absent and absent.keys() <= {"hybrid_layer_pattern", "moe_layer_freq"}


@pytest.mark.full
def test_training_refuses_hybrid_layers_and_names_the_command(
    one_rank: Mesh, converted: Converted, tmp_path: Path
) -> None:
    source, checkpoint = converted("qwen3_moe")
    settings, model = PlatformConfig(precision="fp32"), open_dist_model(checkpoint).model
    chunk = build_uninitialized(model, one_rank, start(settings), settings)
    hybrid = imported(source, tmp_path / "hybrid", layers="hybrid")
    with pytest.raises(CheckpointError, match=r"layers of Megatron's HybridModel.*mcore-rl convert relayout"):
        load_weights([chunk], one_rank, model, hybrid)
    assert main(["convert", "relayout", str(hybrid), str(tmp_path / "home"), "--workers", "1"]) == 0
    load_weights([chunk], one_rank, model, tmp_path / "home")


def test_an_import_names_its_format_as_megatron_does(tmp_path: Path) -> None:
    save_config(CheckpointingConfig("torch_dist", 1), str(tmp_path))
    assert json.loads((tmp_path / "metadata.json").read_text()) == FORMAT
