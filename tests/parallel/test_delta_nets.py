"""Gated delta nets on any mesh compute one rank's gradients, in fp64 where rounding explains nothing."""

import functools

import pytest
import torch

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.model import DeltaConfig, ModelConfig
from tests.double import gradients
from tests.parallel.parity import Tensors, assembled, config_of, largest, random_weights, relative_errors
from tests.ranks import run_ranks
from tests.tiny_models import TINY

ROWS, PACKED = (), (64, 8, 128, 24, 32)
"""Two rows of 64 positions, or one row of several sequences, of which some have several chunks."""
MESHES = {
    "tp2": MeshConfig(tp=2),
    "cp2": MeshConfig(cp=2),
    "tp2-cp2": MeshConfig(tp=2, cp=2),
    "tp4": MeshConfig(tp=4),
}


def model_of() -> ModelConfig:
    """Two key/value heads, so that four tensor-parallel ranks share them; one layer of each kind; no balance loss."""
    tiny = TINY["qwen3_next"]
    moe = tiny.moe.model_copy(update={"balance": "none", "aux_loss_coeff": 0.0})
    delta = DeltaConfig(full_every=2, key_heads=4, value_heads=8, key_dim=8, value_dim=12)
    return tiny.model_copy(update={"num_layers": 2, "moe": moe, "delta": delta})


def tokens(lengths: tuple[int, ...]) -> torch.Tensor:
    shape = (1, sum(lengths)) if lengths else (2, 64)
    return torch.randint(0, 120, shape, generator=torch.Generator().manual_seed(2))


@functools.cache
def initial() -> Tensors:
    return random_weights(config_of(model_of(), MeshConfig()))


@functools.cache
def on_one_rank(lengths: tuple[int, ...]) -> Tensors:
    ranks = run_ranks(gradients, 1, MeshConfig(), model_of(), initial(), tokens(lengths), lengths)
    return assembled(ranks)


@pytest.mark.matrix("tp2-cp2-packed", "tp4-rows")
@pytest.mark.parametrize(
    ("mesh", "lengths"),
    [
        pytest.param(mesh, lengths, id=f"{mesh}-{'packed' if lengths else 'rows'}")
        for mesh in MESHES
        for lengths in (ROWS, PACKED)
    ],
)
def test_gradients_are_those_of_one_rank(mesh: str, lengths: tuple[int, ...]) -> None:
    on, model = MESHES[mesh], model_of()
    ranks = run_ranks(gradients, on.smallest_world, on, model, initial(), tokens(lengths), lengths)
    errors = relative_errors(assembled(ranks), on_one_rank(lengths))
    assert max(errors.values()) <= 1e-12, largest(errors)
