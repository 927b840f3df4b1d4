"""Gated delta nets on any mesh compute one rank's gradients and steps, in fp64 where rounding explains nothing."""

import pytest

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.model import DeltaConfig, ModelConfig
from tests.double import on_one_rank, trained
from tests.parallel.parity import largest, relative_errors
from tests.tiny_models import TINY

ROWS, PACKED = (), (64, 8, 128, 24, 32)
"""Two rows of 64 positions, or one row of several sequences, of which some have several chunks."""
MESHES = {
    "tp2": MeshConfig(tp=2),
    "cp2": MeshConfig(cp=2),
    "tp2-ep2": MeshConfig(tp=2, ep=2),
    "tp2-cp2": MeshConfig(tp=2, cp=2),
    "tp4": MeshConfig(tp=4),
}
CASES = [
    *(("qwen3_next", mesh, lengths) for mesh in MESHES for lengths in (ROWS, PACKED)),
    *(("qwen3_5_moe_text", mesh, PACKED) for mesh in ("tp2", "cp2", "tp2-ep2")),
    *(("qwen3_5_text", mesh, PACKED) for mesh in ("tp2", "cp2")),
]


def model_of(family: str) -> ModelConfig:
    """Two key/value heads, so that four tensor-parallel ranks share them; one layer of each kind; no balance loss."""
    tiny = TINY[family]
    moe = tiny.moe.model_copy(update={"balance": "none", "aux_loss_coeff": 0.0})
    delta = DeltaConfig(full_every=2, key_heads=4, value_heads=8, key_dim=8, value_dim=12)
    return tiny.model_copy(update={"num_layers": 2, "moe": moe, "delta": delta})


@pytest.mark.matrix("qwen3_next-tp2-cp2-packed", "qwen3_next-tp4-rows")
@pytest.mark.parametrize(
    ("family", "mesh", "lengths"),
    [
        pytest.param(family, mesh, lengths, id=f"{family}-{mesh}-{'packed' if lengths else 'rows'}")
        for family, mesh, lengths in CASES
    ],
)
def test_gradients_and_steps_are_those_of_one_rank(family: str, mesh: str, lengths: tuple[int, ...]) -> None:
    model = model_of(family)
    found, wanted = trained(model, MESHES[mesh], lengths), on_one_rank(model, lengths)
    for ours, theirs, bound in zip(found, wanted, (1e-12, 1e-11), strict=True):
        errors = relative_errors(ours, theirs)
        assert max(errors.values()) <= bound, largest(errors)
