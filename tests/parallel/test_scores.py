"""Scores, their loss and its gradient are the same on every mesh as on one rank."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_rl.backend.platform import start
from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.optim import OptimConfig
from mcore_rl.config.run import PretrainConfig, TrainConfig
from mcore_rl.model.global_tensors import copy_in
from mcore_rl.model.inputs import LocalMicrobatch
from mcore_rl.parallel.mesh import destroy_mesh
from mcore_rl.parallel.schedule import HeadOutput
from mcore_rl.train.setup import set_up
from mcore_rl.train.step import train_step
from tests.parallel.parity import Tensors, assembled, batch, owned
from tests.ranks import run_ranks
from tests.tiny_models import TINY

MODEL = TINY["qwen3_moe"].scored
MESHES = {
    "tp2": MeshConfig(tp=2),
    "pp2-vpp2": MeshConfig(pp=2, vpp=2),
    "cp2": MeshConfig(cp=2),
    "tp2-ep2": MeshConfig(tp=2, ep=2),
}


class ValueHead:
    """Half the squared distance of each counted token's score from a number that its label gives."""

    wants_losses = False

    def count(self, microbatch: LocalMicrobatch) -> Tensor:
        return microbatch.loss_mask_Bs.sum().to(torch.int)

    def __call__(self, microbatch: LocalMicrobatch, output: Tensor) -> HeadOutput:
        targets_Bs = microbatch.labels_Bs / 60 - 1
        loss = (0.5 * (output[..., 0] - targets_Bs).square() * microbatch.loss_mask_Bs).sum()
        count = self.count(microbatch)
        return HeadOutput(loss=loss, count=count, outputs={"loss": loss.detach(), "count": count})


def config_of(mesh: MeshConfig) -> PretrainConfig:
    return PretrainConfig(
        model=MODEL,
        mesh=mesh,
        optim=OptimConfig(lr=1e-3, schedule="constant"),
        train=TrainConfig(steps=5, global_batch=8),
    )


def two_steps(config: PretrainConfig, initial: Tensors) -> list[tuple[float, float]]:
    """On a rank: losses and gradient norms of two steps."""
    state = set_up(config, start(config.platform))
    copy_in(state.chunks, initial)
    state.optimizer.reload_model_params()
    reports = [train_step(state, batch(state, step), ValueHead()) for step in range(2)]
    return [(report.loss, report.grad_norm) for report in reports]


def on_each_mesh(meshes: list[MeshConfig], initial: Tensors) -> list[Any]:
    """On a rank: the steps of each mesh, one mesh after another."""
    outcomes = []
    for mesh in meshes:
        outcomes.append(two_steps(config_of(mesh), initial))
        destroy_mesh()
    return outcomes


def initial_weights(config: PretrainConfig) -> list[Any]:
    """On a rank: the pieces of a new model."""
    return owned(set_up(config, start(config.platform)))


def test_losses_and_gradients_of_values_do_not_depend_on_the_mesh() -> None:
    initial = assembled(run_ranks(initial_weights, 1, config_of(MeshConfig())))
    # With the head's zeros the layers would have no gradient.
    initial["score.weight"].normal_(std=0.1, generator=torch.Generator().manual_seed(0))
    (reference,) = run_ranks(two_steps, 1, config_of(MeshConfig()), initial)
    on_ranks = run_ranks(on_each_mesh, 4, list(MESHES.values()), initial)
    for name, *outcomes in zip(MESHES, *on_ranks, strict=True):
        for outcome in outcomes:
            for step, (ours, theirs) in enumerate(zip(outcome, reference, strict=True)):
                assert ours == pytest.approx(theirs, rel=1e-6), (name, step)
