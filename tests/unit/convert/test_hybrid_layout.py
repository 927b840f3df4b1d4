"""Checkpoints with the layers of Megatron's HybridModel, by their names; tests/hybrid has the model itself."""

from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rl.cli.cli import main
from mcore_rl.config.run import PlatformConfig
from mcore_rl.convert.megatron.model import KeyLayout, open_dist_model
from mcore_rl.errors import CheckpointError
from mcore_rl.megatron.mesh import Mesh
from mcore_rl.megatron.platform import start
from mcore_rl.model.build import build_uninitialized
from mcore_rl.storage.checkpoints.write import load_weights
from tests.conversion import assert_same, differing, exported, imported, read_dist, read_hf, saved
from tests.hf_models import oracle
from tests.unit.convert.conftest import Converted
from tests.unit.convert.test_layouts import relaid

NATIVE = {"qwen3_moe": "stacked", "llama": "stacked", "qwen3": "stacked", "glm4_moe": "each"}
"""Cases, and how training groups their layers: of a glm4_moe the first layer is dense."""
PATTERNS = {"qwen3_moe": "*E*E*E", "llama": "*-*-*-", "qwen3": "*-*-*-", "glm4_moe": "*-*E*E"}


def args_of(checkpoint: Path) -> dict[str, Any]:
    return vars(torch.load(checkpoint / "common.pt", weights_only=False)["args"])


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
