"""A step on preferences does not depend on the mesh: the two sides of a pair lie anywhere in a packed row, and context
parallelism cuts both.
"""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rl.config.dpo import DPOConfig, DPOSection
from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.optim import OptimConfig
from mcore_rl.config.preferences import PreferenceDataConfig
from mcore_rl.config.run import PlatformConfig, TrainConfig
from tests.parallel.parity import Tensors, random_weights
from tests.parallel.preference_steps import dpo_steps, trained_without_gradients
from tests.ranks import run_ranks
from tests.tiny_models import TINY

MESHES = {
    "tp2": MeshConfig(tp=2),
    "pp2": MeshConfig(pp=2),
    "pp2-vpp2": MeshConfig(pp=2, vpp=2),
    "cp2": MeshConfig(cp=2),
    "tp2-ep2": MeshConfig(tp=2, ep=2),
    "dp2": MeshConfig(dp=2),
    "cp2-dp2": MeshConfig(cp=2, dp=2),
}
LOSSES = [
    DPOSection(),
    DPOSection(loss="ipo", margin_coeff=0.0, length_normalised=True),
    DPOSection(loss="orpo", beta=0.5),
]


def config_of(mesh: MeshConfig, tokens_per_microbatch: int = 128) -> DPOConfig:
    """No balance loss, which is of a microbatch and not of tokens."""
    tiny = TINY["qwen3_moe"]
    moe = tiny.moe.model_copy(update={"balance": "none", "aux_loss_coeff": 0.0, "z_loss_coeff": 0.0})
    return DPOConfig(
        platform=PlatformConfig(layers="torch"),
        model=tiny.model_copy(update={"moe": moe}),
        mesh=mesh,
        data=PreferenceDataConfig(seq_length=24, tokens_per_microbatch=tokens_per_microbatch),
        optim=OptimConfig(lr=1e-3, schedule="constant", clip_grad=0.3),
        train=TrainConfig(steps=100, global_batch=6),
    )


@functools.cache
def weights(seed: int) -> Tensors:
    return random_weights(config_of(MeshConfig()).model_copy(update={"train": TrainConfig(seed=seed)}))


def outcome(config: DPOConfig) -> tuple[torch.Tensor, list[list[dict[str, float]]]]:
    """The result of all ranks, which is the same on each."""
    ranks: list[Any] = run_ranks(
        dpo_steps, config.mesh.smallest_world, config, weights(1), weights(2), LOSSES
    )
    for reference, steps in ranks:
        assert torch.equal(reference, ranks[0][0]) and steps == ranks[0][1]
    return ranks[0][0], ranks[0][1]


def test_a_loss_that_reaches_no_parameter_ends_the_run_and_ties_do_not(tmp_path: Path) -> None:
    """The loss of a tie is log 2 at its minimum, where policy and reference are the same."""
    config = config_of(MeshConfig()).model_copy(update={"run_dir": str(tmp_path)})
    config = config.model_copy(update={"train": TrainConfig(steps=1, global_batch=6)})
    (found,) = run_ranks(trained_without_gradients, 1, config)
    assert found["ties"] == "done"
    assert "a gradient of exactly 0: nothing is trained" in found["detached"]


@functools.cache
def alone() -> tuple[torch.Tensor, list[list[dict[str, float]]]]:
    return outcome(config_of(MeshConfig()))


def assert_same(
    ours: tuple[torch.Tensor, list[list[dict[str, float]]]],
    theirs: tuple[torch.Tensor, list[list[dict[str, float]]]],
) -> None:
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-6, atol=0)
    for loss, mine, reference in zip(LOSSES, ours[1], theirs[1], strict=True):
        for step, (one, other) in enumerate(zip(mine, reference, strict=True)):
            assert one.keys() == other.keys()
            for name, value in other.items():
                # A reward is a difference of logprobs, whose tokens have 24 bits; other sums that cancel are measured
                # against numbers of size 1.
                of_logprobs = 1e-7 * abs(other["chosen_logprob"]) if name.endswith("_reward") else 0.0
                limit = pytest.approx(value, rel=1e-6, abs=max(1e-6, of_logprobs))
                assert one[name] == limit, (loss.loss, step, name)


@pytest.mark.matrix("pp2-vpp2", "cp2", "tp2-ep2")
@pytest.mark.parametrize("mesh", MESHES)
def test_steps_on_preferences_do_not_depend_on_the_mesh(mesh: str) -> None:
    config = config_of(MESHES[mesh])
    if mesh == "tp2-ep2":  # with logits of 7 positions at a time
        config = config.model_copy(update={"platform": PlatformConfig(layers="torch", logits_chunk_tokens=7)})
    assert_same(outcome(config), alone())


def test_steps_on_preferences_do_not_depend_on_how_pairs_are_packed() -> None:
    assert_same(outcome(config_of(MeshConfig(), tokens_per_microbatch=256)), alone())
