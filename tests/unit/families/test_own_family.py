"""A family of the user's own: a class in a module, which the config names as `module:name`."""

import json
from pathlib import Path

import pytest

from mcore_rl.checks.model import model_violations
from mcore_rl.cli.cli import main
from mcore_rl.config.extension import load_extensions
from mcore_rl.config.model import LayerKind, ModelConfig
from mcore_rl.config.run import PretrainConfig
from mcore_rl.errors import ConfigError
from mcore_rl.families import hf_config, model_from_hf, weight_map
from mcore_rl.planning.flops import forward_flops_per_token
from mcore_rl.planning.weights import layer_weights
from mcore_rl.storage.checkpoint import check
from tests.conversion import assert_same, exported, read_hf, saved
from tests.tiny_models import TINY

SOURCE = '''
from mcore_rl.families.qwen3_moe import Qwen3Moe

class Plain(Qwen3Moe):
    model_type = "wolf"
    hf_class = "WolfForCausalLM"

class Wolf(Plain):
    """Qwen3-MoE with biases, and with another name for its experts."""
    qkv_bias = ("on",)

    def to_hf(self, model):
        return super().to_hf(model) | {"attention_bias": False, "pack_size": 1}
'''


@pytest.fixture
def wolf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelConfig:
    """The tiny model of a family that a module in the current folder defines."""
    (tmp_path / "wolves.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return TINY["qwen3_moe"].model_copy(update={"family": "wolves:Wolf"})


def test_its_tables_reach_checks_weights_and_estimates(wolf: ModelConfig) -> None:
    assert list(model_violations(wolf)) == []
    names = weight_map(wolf).hf_shapes.keys() - weight_map(TINY["qwen3_moe"]).hf_shapes.keys()
    assert {name.split(".", 3)[3] for name in names} == {f"self_attn.{part}_proj.bias" for part in "qkv"}
    mesh = PretrainConfig().mesh
    biases = wolf.head_dim * (wolf.num_heads + 2 * wolf.num_kv_heads)
    plain, own = (layer_weights(model, mesh, LayerKind("attention", True)) for model in (TINY["qwen3_moe"], wolf))
    assert own.dense - plain.dense == biases
    assert forward_flops_per_token(wolf, 64) == forward_flops_per_token(TINY["qwen3_moe"], 64)


def test_config_json_is_written_and_read(wolf: ModelConfig) -> None:
    written = hf_config(wolf)
    assert (written["model_type"], written["architectures"]) == ("wolf", ["WolfForCausalLM"])
    again = model_from_hf(written, "wolves:Wolf")
    assert (again.family, weight_map(again).hf_shapes) == (wolf.family, weight_map(wolf).hf_shapes)
    with pytest.raises(ConfigError, match=r"model_type='wolf'. Known are"):
        model_from_hf(written)


def test_its_source_is_recorded(wolf: ModelConfig) -> None:
    assert load_extensions(PretrainConfig(model=wolf)).keys() == {"wolves:Wolf"}


def test_what_is_no_family_is_refused(wolf: ModelConfig) -> None:
    for name, message in (("wolves:Sheep", "no function Sheep"), ("sheep:Sheep", "sheep")):
        with pytest.raises(ConfigError, match=message):
            list(model_violations(wolf.model_copy(update={"family": name})))
    with pytest.raises(ConfigError, match="not a subclass"):
        list(model_violations(wolf.model_copy(update={"family": "pathlib:Path"})))


def test_a_model_of_it_is_imported_verified_and_exported(
    wolf: ModelConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, checkpoint = saved("qwen3_moe", tmp_path / "hf"), tmp_path / "ckpt"
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"model_type": "wolf"}))
    arguments = [str(source), str(checkpoint), "--workers", "1"]
    assert main(["convert", "import", *arguments]) != 0
    assert "model_type='wolf'. Known are" in capsys.readouterr().err
    assert main(["convert", "import", *arguments, "--family", "wolves:Plain"]) == 0
    step = checkpoint / "iter_0000000"
    assert check(step).model["family"] == "wolves:Plain"
    assert main(["convert", "verify", str(source), str(step), "--family", "wolves:Plain"]) == 0
    again = exported(step, tmp_path / "again")
    assert_same(read_hf(again), read_hf(source))
    written = json.loads((again / "config.json").read_text())
    assert (written["model_type"], written["architectures"]) == ("wolf", ["WolfForCausalLM"])
    copied = exported(step, tmp_path / "copied", reference=source)
    assert (copied / "config.json").read_bytes() == (source / "config.json").read_bytes()
