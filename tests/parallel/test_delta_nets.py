"""Gated delta nets and attention over chosen keys compute one rank's gradients and steps on any mesh, in fp64: rounding
explains nothing, and no choice is rounded.
"""

import pytest

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.model import DeltaConfig, ModelConfig
from mcore_rl.config.run import PlatformConfig
from tests.double import on_one_rank, trained
from tests.parallel.parity import MESHES, largest, relative_errors
from tests.parallel.test_parity import assert_trains_as_one_rank
from tests.tiny_models import TINY

ROWS, SHORTER = (), (64, 8, 72, 24, 32)
"""Two rows of 64 positions, or one row of several sequences; 8 keys are chosen, which is all that one of them has."""
FULL = PlatformConfig(layers="torch", recompute="full")


@pytest.mark.full
@pytest.mark.parametrize(("layers", "pp"), [(1, 1), (1, 2), (2, 2)])
def test_layers_that_are_computed_again_share_the_choice_of_their_own_microbatch(layers: int, pp: int) -> None:
    """With full recomputation: on one stage of several choices, and on two, where microbatches wait for each other."""
    platform = FULL.model_copy(update={"recompute_layers": layers})
    assert_trains_as_one_rank(TINY["glm_moe_dsa"], MeshConfig(pp=pp), platform)


@pytest.mark.full
@pytest.mark.parametrize("modules", [("core_attn",), ("mla_up_proj", "layernorm")])
def test_selective_recomputation_changes_nothing(modules: tuple[str, ...]) -> None:
    platform = PlatformConfig(layers="torch", recompute="selective", recompute_modules=modules)
    assert_trains_as_one_rank(TINY["glm_moe_dsa"], MeshConfig(), platform)


PACKED = (64, 8, 128, 24, 32)
"""One row of several sequences, some of them with several chunks."""
CASES = [
    *(
        (family, mesh, lengths)
        for family in ("deepseek_v32", "glm_moe_dsa")
        for mesh in ("tp2", "cp2", "tp2-cp2")
        for lengths in (ROWS, SHORTER)
    ),
    *(
        ("qwen3_next", mesh, lengths)
        for mesh in ("tp2", "cp2", "tp2-ep2", "tp2-cp2", "tp4")
        for lengths in (ROWS, PACKED)
    ),
    *(("qwen3_5_moe_text", mesh, PACKED) for mesh in ("tp2", "cp2", "tp2-ep2")),
    *(("qwen3_5_text", mesh, PACKED) for mesh in ("tp2", "cp2")),
]


def model_of(family: str) -> ModelConfig:
    """No balance loss. Of keys that are chosen three layers, so that one shares a choice between two that make it; of
    delta nets one layer of each kind, and two key/value heads, which four tensor-parallel ranks share.
    """
    tiny = TINY[family]
    moe = tiny.moe.model_copy(update={"balance": "none", "aux_loss_coeff": 0.0})
    if tiny.delta.full_every is not None:
        delta = DeltaConfig(full_every=2, key_heads=4, value_heads=8, key_dim=8, value_dim=12)
        return tiny.model_copy(update={"num_layers": 2, "moe": moe, "delta": delta})
    indexer = tiny.indexer.model_copy(update={"shared_layers": (1,) if tiny.indexer.shared_layers else ()})
    return tiny.model_copy(update={"num_layers": 3, "moe": moe, "indexer": indexer})


@pytest.mark.matrix("qwen3_next-tp2-cp2-packed")
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
