"""Values and rewards, their losses and gradients are the same on every mesh as on one rank."""

from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.optim import LoraConfig, OptimConfig
from mcore_rl.config.preferences import PreferenceDataConfig, RewardModelConfig, RewardModelSection
from mcore_rl.config.run import PlatformConfig, TrainConfig
from mcore_rl.data.preferences import Preferences
from mcore_rl.megatron.mesh import destroy_mesh
from mcore_rl.megatron.schedule import HeadOutput
from mcore_rl.model.build import copy_in
from mcore_rl.model.inputs import LocalMicrobatch
from mcore_rl.train.preferences import PreferenceSource, packing_limits
from mcore_rl.train.reward_model import RewardHead
from mcore_rl.train.step import train_step
from tests.parallel.parity import MESHES, Tensors, assembled, batch, owned, set_up_plain
from tests.ranks import run_ranks
from tests.tiny_models import TINY

# The balance loss is of each microbatch, and how many there are depends on the mesh.
MODEL = TINY["qwen3_moe"].scored.model_copy(
    update={"moe": TINY["qwen3_moe"].moe.model_copy(update={"balance": "none"})}
)


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


LENGTHS = ((7, 9), (1, 5), (30, 2, 17), (12, 12), (31, 25), (3, 1), (8, 20))
"""Tokens of the sequences of each group, whose every two are a pair; one of them is a single token."""


def preferences() -> Preferences:
    generator = numpy.random.default_rng(0)
    lengths = [length for group in LENGTHS for length in group]
    firsts = numpy.cumsum([0, *map(len, LENGTHS)])
    pairs = [
        [(first + i, first + j) for i in range(len(group)) for j in range(i)]
        for first, group in zip(firsts, LENGTHS, strict=False)
    ]
    all_pairs = numpy.array([pair for group in pairs for pair in group])
    is_answer = generator.random(sum(lengths)) < 0.5
    is_answer[numpy.cumsum(lengths) - 1] = True
    return Preferences(
        ids_T=generator.integers(0, MODEL.vocab_size, sum(lengths), dtype=numpy.int32),
        is_answer_T=is_answer,
        starts_N=numpy.cumsum([0, *lengths]),
        sequence_starts_G=firsts,
        pair_starts_G=numpy.cumsum([0, *map(len, pairs)]),
        pairs_P2=all_pairs,
        margins_P=generator.random(len(all_pairs)),
        probabilities_P=numpy.where(numpy.arange(len(all_pairs)) == 4, 0.5, 1.0),
        source_sizes=(len(LENGTHS),),
        num_skipped=0,
        num_skipped_ties=0,
    )


def config_of(mesh: MeshConfig, lora: LoraConfig | None = None) -> RewardModelConfig:
    return RewardModelConfig(
        lora=lora or LoraConfig(),
        platform=PlatformConfig(layers="torch"),
        model=MODEL,
        mesh=mesh,
        data=PreferenceDataConfig(seq_length=32, tokens_per_microbatch=128),
        # All steps begin with the same weights: Adam's first ones are signs of gradients, also of those near zero.
        optim=OptimConfig(lr=1e-12, min_lr=0.0, schedule="constant"),
        train=TrainConfig(steps=5, global_batch=8),
        rm=RewardModelSection(label_smoothing=0.1, centering_coeff=0.01),
    )


def steps(config: RewardModelConfig, initial: Tensors) -> list[dict[str, float]]:
    state = set_up_plain(config)
    copy_in(state.chunks, initial)
    state.optimizer.reload_model_params()
    value_report = train_step(state, batch(state, 0), ValueHead())
    source, device = (
        PreferenceSource(preferences(), packing_limits(config), seed=config.train.seed, pad_id=0),
        state.platform.device,
    )
    head = RewardHead(state.mesh, config.rm)
    # The second batch leaves data-parallel ranks with nothing but padding.
    reports = [
        train_step(state, source.microbatches(groups, state.mesh, device), head)
        for groups in (range(len(LENGTHS)), [2])
    ]
    return [report.sums | {"loss": report.loss, "grad_norm": report.grad_norm} for report in (value_report, *reports)]


def on_each_mesh(meshes: list[MeshConfig], initial: Tensors, lora: LoraConfig | None) -> list[Any]:
    outcomes = []
    for mesh in meshes:
        outcomes.append(steps(config_of(mesh, lora), initial))
        destroy_mesh()
    return outcomes


def initial_weights(config: RewardModelConfig) -> list[Any]:
    return owned(set_up_plain(config))


@pytest.mark.matrix("two-whole")
@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4)], ids=["whole", "adapters"])
@pytest.mark.parametrize("meshes", [("pp2-vpp2", "tp2-ep2"), ("tp2", "pp2-vpp2", "cp2", "tp2-ep2")], ids=["two", "all"])
def test_losses_and_gradients_of_values_and_rewards_do_not_depend_on_the_mesh(
    meshes: tuple[str, ...], lora: LoraConfig | None
) -> None:
    """With adapters the head is trained whole beside them."""
    initial = assembled(run_ranks(initial_weights, 1, config_of(MeshConfig(), lora)))
    # With the head's zeros the layers would have no gradient, and with those of B the adapters' A.
    generator = torch.Generator().manual_seed(0)
    for name, tensor in initial.items():
        if name == "score.weight" or name.endswith(".adapter.B"):
            tensor.normal_(std=0.1 if name == "score.weight" else 0.02, generator=generator)
    (reference,) = run_ranks(steps, 1, config_of(MeshConfig(), lora), initial)
    assert [step["count"] for step in reference[1:]] == [9, 3]
    on_ranks = run_ranks(on_each_mesh, 4, [MESHES[mesh] for mesh in meshes], initial, lora)
    for name, *outcomes in zip(meshes, *on_ranks, strict=True):
        for outcome in outcomes:
            for step, (ours, theirs) in enumerate(zip(outcome, reference, strict=True)):
                # Adapters have three more rounded sums in each matrix: 7e-6 of a reward of 0.25.
                allowed = 1e-6 if lora is None else 1e-5
                assert ours == pytest.approx(theirs, rel=allowed, abs=allowed), (name, step)
