"""A step on preferences does not depend on the mesh: the two sides of a pair lie anywhere in a packed row, and context
parallelism cuts both.
"""

import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.optim import OptimConfig
from mcore_rl.config.preferences import DPOConfig, DPOSection, PreferenceDataConfig
from mcore_rl.config.run import PlatformConfig, TrainConfig
from mcore_rl.data.preferences import Preferences
from mcore_rl.errors import TrainingError
from mcore_rl.megatron.mesh import destroy_mesh
from mcore_rl.megatron.platform import start
from mcore_rl.model.build import copy_in, unwrap
from mcore_rl.programs.open_run import open_run
from mcore_rl.train.preference_losses import DPOHead
from mcore_rl.train.preferences import (
    AnswerLogprobHead,
    PreferenceSource,
    PreferenceTrainer,
    answer_logprobs,
    packing_limits,
    pair_sums,
)
from mcore_rl.train.state import TrainState
from mcore_rl.train.step import train_step
from tests.parallel.parity import MESHES, Tensors, random_weights, set_up_plain
from tests.ranks import run_ranks
from tests.tiny_models import TINY, without_router_losses

SIZES = (2, 3, 2, 2, 4, 2, 2)
"""Answers of each prompt: pairs and rankings."""


def random_preferences(vocab_size: int) -> Preferences:
    """Ragged prompts and answers of random tokens, always the same; one answer is of one token, and one pair a tie."""
    generator = numpy.random.default_rng(11)
    ids: list[int] = []
    is_answer: list[bool] = []
    starts, sequences, pair_starts, pairs = [0], [0], [0], []
    for size in SIZES:
        prompt = generator.integers(0, vocab_size, generator.integers(1, 9)).tolist()
        first = len(starts) - 1
        for place in range(size):
            length = 1 if place == 1 and size == 3 else int(generator.integers(1, 13))
            ids += [*prompt, *generator.integers(0, vocab_size, length).tolist()]
            is_answer += [False] * len(prompt) + [True] * length
            starts.append(len(ids))
        pairs += [(first + a, first + b) for a in range(size) for b in range(a + 1, size)]
        sequences.append(len(starts) - 1)
        pair_starts.append(len(pairs))
    probabilities = numpy.ones(len(pairs))
    probabilities[2] = 0.5
    return Preferences(
        ids_T=numpy.array(ids, numpy.int32),
        is_answer_T=numpy.array(is_answer),
        starts_N=numpy.array(starts),
        sequence_starts_G=numpy.array(sequences),
        pair_starts_G=numpy.array(pair_starts),
        pairs_P2=numpy.array(pairs),
        margins_P=generator.random(len(pairs)),
        probabilities_P=probabilities,
        source_sizes=(len(SIZES),),
        num_skipped=0,
        num_skipped_ties=0,
    )


def dpo_steps(
    config: DPOConfig, initial: Tensors, other: Tensors, losses: Sequence[DPOSection]
) -> tuple[Tensor, list[list[dict[str, float]]]]:
    """On a rank: the logprobs of all answers under `other` weights, the reference; and for each loss the sums, loss
    and gradient norm of two steps from `initial` weights, and the sums of an evaluation after them.
    """
    state = set_up_plain(config)
    logprobs = AnswerLogprobHead(state.mesh, config.model.vocab_size, chunk_tokens=16)
    source = PreferenceSource(
        random_preferences(config.model.vocab_size), packing_limits(config), seed=config.train.seed, pad_id=0
    )
    copy_in(state.chunks, other)
    reference = answer_logprobs(state, source, logprobs, groups_at_a_time=4, before_each=lambda: None)
    return reference, [
        _steps(state, config, initial, source.with_reference(reference), logprobs, loss) for loss in losses
    ]


def trained_without_gradients(config: DPOConfig) -> dict[str, str]:
    """On a rank: how a run on ties alone ends, and a run whose layers are cut off from its frozen output layer."""
    preferences = random_preferences(config.model.vocab_size)
    ties = replace(preferences, probabilities_P=0 * preferences.probabilities_P + 0.5)
    found = {}
    for name, data in (("ties", ties), ("detached", preferences)):
        own = config.model_copy(update={"run_dir": f"{config.run_dir}/{name}"})
        with open_run(own, start(own.platform)) as run:
            state = run.state
            logprobs = AnswerLogprobHead(state.mesh, own.model.vocab_size, chunk_tokens=16)
            source = PreferenceSource(data, packing_limits(own), seed=own.train.seed, pad_id=0)
            reference = answer_logprobs(state, source, logprobs, groups_at_a_time=4, before_each=lambda: None)
            source = source.with_reference(reference)
            head = DPOHead(logprobs, state.mesh, DPOSection())
            if name == "detached":
                model = unwrap(state.chunks[0])
                model.output_layer.requires_grad_(False)
                model.decoder.register_forward_hook(lambda *call: call[-1].detach())
            try:
                PreferenceTrainer(run, head, train=source, valid=None).run()
                found[name] = "done"
            except TrainingError as error:
                found[name] = str(error)
        destroy_mesh()
    return found


def _steps(
    state: TrainState,
    config: DPOConfig,
    initial: Tensors,
    source: PreferenceSource,
    logprobs: AnswerLogprobHead,
    loss: DPOSection,
) -> list[dict[str, float]]:
    copy_in(state.chunks, initial)
    state.optimizer.reload_model_params()
    if not loss.uses_reference:
        source = PreferenceSource(source.preferences, packing_limits(config), seed=config.train.seed, pad_id=0)
    head = DPOHead(logprobs, state.mesh, loss)
    found, cursor = [], 0
    for _ in range(2):
        groups = source.order.batch(cursor, config.train.global_batch)
        cursor += source.order.num_pairs(groups)
        report = train_step(state, source.microbatches(groups, state.mesh, state.platform.device), head)
        found.append(report.sums | {"grad_norm": report.grad_norm, "mean_loss": report.loss})
    device = state.platform.device
    found.append(pair_sums(state.chunks, source, head, state.mesh, device, num_batches=2, global_batch=5))
    return found


LOSSES = [
    DPOSection(),
    DPOSection(loss="ipo", margin_coeff=0.0, length_normalised=True),
    DPOSection(loss="orpo", beta=0.5),
]


def config_of(mesh: MeshConfig, tokens_per_microbatch: int = 128) -> DPOConfig:
    return DPOConfig(
        platform=PlatformConfig(layers="torch", precision="fp32"),
        model=without_router_losses(TINY["qwen3_moe"]),
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
    ranks: list[Any] = run_ranks(dpo_steps, config.mesh.smallest_world, config, weights(1), weights(2), LOSSES)
    for reference, steps in ranks:
        assert torch.equal(reference, ranks[0][0]) and steps == ranks[0][1]
    return ranks[0][0], ranks[0][1]


@pytest.mark.full
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
    ours: tuple[torch.Tensor, list[list[dict[str, float]]]], theirs: tuple[torch.Tensor, list[list[dict[str, float]]]]
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


@pytest.mark.matrix("tp2-ep2")
@pytest.mark.parametrize("mesh", ["tp2", "pp2", "pp2-vpp2", "cp2", "tp2-ep2", "dp2", "cp2-dp2"])
def test_steps_on_preferences_do_not_depend_on_the_mesh(mesh: str) -> None:
    config = config_of(MESHES[mesh])
    if mesh == "tp2-ep2":  # with logits of 7 positions at a time
        config = config.model_copy(update={"platform": PlatformConfig(layers="torch", logits_chunk_tokens=7)})
    assert_same(outcome(config), alone())


@pytest.mark.full
def test_steps_on_preferences_do_not_depend_on_how_pairs_are_packed() -> None:
    assert_same(outcome(config_of(MeshConfig(), tokens_per_microbatch=256)), alone())
