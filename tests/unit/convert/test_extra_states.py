"""Megatron-LM loads an import by its default strictness, which demands the extra states of every layer."""

from pathlib import Path
from typing import Any

import pytest
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject

from mcore_rl.config.run import PlatformConfig
from mcore_rl.convert.megatron.model import KeyLayout
from mcore_rl.megatron.mesh import Mesh
from mcore_rl.megatron.platform import start
from mcore_rl.model.build import build_uninitialized, unwrap
from mcore_rl.storage.checkpoints.write import weights_state
from tests.hf_models import oracle
from tests.unit.convert.conftest import Converted
from tests.unit.convert.test_layouts import relaid

STRICT = "assume_ok_unexpected"
TRANSFORMER_ENGINE: dict[str, list[tuple[str, int]]] = {
    "qwen3_moe": [
        ("decoder.layers.self_attention.core_attention", 3),
        ("decoder.layers.self_attention.q_layernorm", 3),
        ("decoder.layers.pre_mlp_layernorm", 3),
        ("decoder.final_layernorm", 1),
    ],
    "deepseek_v3": [
        ("decoder.layers.2.input_layernorm", 1),
        ("decoder.layers.2.self_attention.core_attention", 1),
        ("decoder.layers.1.pre_mlp_layernorm", 1),
        ("decoder.final_layernorm", 1),
    ],
    "gpt_oss": [("decoder.layers.self_attention.core_attention", 3), ("decoder.layers.pre_mlp_layernorm", 3)],
}
"""Modules that have an extra state only when TransformerEngine builds them, with the number of layers."""


def state_of(case: str, mesh: Mesh) -> dict[str, Any]:
    """The model's sharded state, as Megatron-LM passes it, with the extra states of TransformerEngine's modules."""
    settings = PlatformConfig(precision="fp32")
    chunk = build_uninitialized(oracle(case).ours, mesh, start(settings), settings)
    extra = [
        ShardedObject(f"{module}._extra_state", None, (count,), (layer,))
        for module, count in TRANSFORMER_ENGINE[case]
        for layer in range(count)
    ]
    return weights_state([unwrap(chunk)], mesh) | {f"extra{i}": state for i, state in enumerate(extra)}


@pytest.mark.matrix("deepseek_v3")
@pytest.mark.parametrize("case", TRANSFORMER_ENGINE)
def test_an_import_is_loaded_with_megatrons_default_strictness(
    case: str, converted: Converted, one_rank: Mesh, tmp_path: Path
) -> None:
    _, checkpoint = converted(case)
    home = KeyLayout("te", "each" if case == "deepseek_v3" else "stacked")
    again = relaid(relaid(checkpoint, tmp_path / "other", KeyLayout("local", "each")), tmp_path / "home", home)
    for path in (checkpoint, again):
        loaded = dist_checkpointing.load(state_of(case, one_rank), str(path), strict=STRICT)
        extra = {key: value for key, value in loaded["model"].items() if key.endswith("_extra_state")}
        assert extra and set(extra.values()) == {None}
        assert loaded["extra0"] is None
