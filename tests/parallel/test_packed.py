"""Packed rows train as their conversations would one by one, on any mesh."""

import functools
import itertools
from typing import Any

import numpy
import pytest
import torch

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.run import PlatformConfig, PretrainConfig
from mcore_rl.data.batch import BatchSource, Microbatch
from mcore_rl.data.examples import Examples
from mcore_rl.data.packing import PackedSequences, PackingOptions
from mcore_rl.megatron.schedule import run_pass
from mcore_rl.model.build import copy_in
from mcore_rl.model.inputs import LocalMicrobatch, localize
from mcore_rl.train.state import TrainState
from mcore_rl.train.step import NextTokenHead, world_sums
from tests.parallel.parity import (
    MESHES,
    Tensors,
    assembled,
    config_of,
    gradients_of,
    largest,
    random_weights,
    relative_errors,
    set_up_plain,
)
from tests.ranks import run_ranks
from tests.tiny_models import TINY, without_router_losses

LENGTHS = (30, 3, 23, 9, 5, 17, 25, 2, 6)
"""Tokens of the conversations; a row holds 32 positions."""
ROWS = 4
MODELS = {name: without_router_losses(TINY[name]) for name in ("qwen3_moe", "deepseek_v3", "minimax_m2")}
MODELS["deepseek_v3-mtp"] = MODELS["deepseek_v3"].model_copy(update={"mtp_layers": 1})
MODELS["deepseek_v3-mtp2"] = MODELS["deepseek_v3"].model_copy(update={"mtp_layers": 2})


def conversations(vocab_size: int) -> Examples:
    generator = numpy.random.default_rng(0)
    total = sum(LENGTHS)
    assistant_mask = generator.random(total) < 0.6
    starts = numpy.cumsum([0, *LENGTHS])
    assistant_mask[starts[1:] - 1] = True
    ids = generator.integers(0, vocab_size, total, dtype=numpy.int32)
    return Examples(
        ids_T=ids, assistant_mask_T=assistant_mask, starts_N=starts, source_sizes=(len(starts) - 1,), num_skipped=0
    )


def packed(state: TrainState, examples: Examples) -> list[LocalMicrobatch]:
    """On a rank: all conversations in rows of 32 positions, two rows a microbatch."""
    cp, dp = state.mesh.cp, state.mesh.dp
    packing = PackingOptions(
        row_length=32, length_multiple=2 * cp.size if cp.size > 1 else 1, buffer=100, seed=0, pad_id=0
    )
    rows = PackedSequences(examples, packing, ROWS)
    assert rows.sequences_per_epoch == ROWS
    source = BatchSource(rows, micro_batch=2, dp_rank=dp.rank, dp_size=dp.size)
    return [localize(microbatch, cp, state.platform.device) for microbatch in source.microbatches(0, ROWS)]


def one_by_one(state: TrainState, examples: Examples) -> list[LocalMicrobatch]:
    """On one rank: each conversation a row of its own length."""
    bounds = examples.starts_N.tolist()
    microbatches = []
    for begin, end in itertools.pairwise(bounds):
        ids = torch.from_numpy(examples.ids_T[begin:end]).long()[None]
        microbatch = Microbatch(
            tokens_BS=ids[:, :-1],
            labels_BS=ids[:, 1:],
            loss_mask_BS=torch.from_numpy(examples.assistant_mask_T[begin + 1 : end]).float()[None],
            position_ids_BS=torch.arange(end - begin - 1)[None],
        )
        microbatches.append(localize(microbatch, state.mesh.cp, state.platform.device))
    return microbatches


def loss_and_gradients(config: PretrainConfig, initial: Tensors, are_packed: bool) -> tuple[dict[str, float], Any]:
    """On a rank: sums of the loss, and the gradients' pieces."""
    state = set_up_plain(config)
    copy_in(state.chunks, initial)
    examples = conversations(config.model.vocab_size)
    microbatches = packed(state, examples) if are_packed else one_by_one(state, examples)
    with torch.no_grad():
        outputs = run_pass(state.chunks, microbatches, NextTokenHead(), backward=False)
    return world_sums(outputs, state.mesh, state.platform.device), gradients_of(state, microbatches)


def on(
    mesh: MeshConfig, model: ModelConfig, initial: Tensors, are_packed: bool, platform: PlatformConfig | None = None
) -> tuple[dict[str, float], Tensors]:
    config = config_of(model, mesh, platform)
    ranks = run_ranks(loss_and_gradients, config.mesh.smallest_world, config, initial, are_packed)
    return ranks[0][0], assembled([gradients for _, gradients in ranks])


@functools.cache
def reference(model: str) -> tuple[Tensors, dict[str, float], Tensors]:
    """Initial weights, and what the conversations give one by one on one rank."""
    initial = random_weights(config_of(MODELS[model], MeshConfig()))
    return initial, *on(MeshConfig(), MODELS[model], initial, are_packed=False)


@pytest.mark.matrix("deepseek_v3-cp2")
@pytest.mark.parametrize(
    ("model", "mesh"),
    [(model, mesh) for model in ("qwen3_moe", "deepseek_v3") for mesh in ("1", "tp2-ep2", "cp2", "pp2-vpp2")]
    + [
        ("minimax_m2", "tp2-ep2"),
        ("deepseek_v3-mtp", "1"),
        ("deepseek_v3-mtp", "cp2"),
        ("deepseek_v3-mtp2", "cp2-pp2-ep2"),
    ],
)
def test_packed_conversations_train_as_one_by_one(model: str, mesh: str) -> None:
    initial, sums, gradients = reference(model)
    packed_sums, packed_gradients = on(MESHES[mesh], MODELS[model], initial, are_packed=True)
    assert packed_sums["count"] == sums["count"]
    assert packed_sums["loss"] == pytest.approx(sums["loss"], rel=1e-6)
    errors = relative_errors(packed_gradients, gradients)
    # Not a gradient: the load that moves the bias counts the padding too.
    errors = {name: error for name, error in errors.items() if not name.endswith("expert_bias")}
    assert max(errors.values()) <= (1e-6 if mesh == "1" else 1e-5), largest(errors)


@pytest.mark.full
def test_recomputing_packed_mtp_layers_changes_nothing() -> None:
    """Megatron 0.16 saved the lengths of the conversations, which are no tensor, for the backward pass."""
    initial, _, _ = reference("deepseek_v3-mtp")
    stored, recomputed = (
        on(MeshConfig(), MODELS["deepseek_v3-mtp"], initial, True, PlatformConfig(layers="torch", recompute=recompute))
        for recompute in ("none", "full")
    )
    assert recomputed[0] == stored[0]
    assert max(relative_errors(recomputed[1], stored[1]).values()) <= 1e-6
