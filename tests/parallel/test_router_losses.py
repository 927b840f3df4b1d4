"""Losses of routers, capacity and the MTP loss are the same on every mesh, for microbatches of several rows too.

The counts of all layers and tokens are the same on every mesh.
"""

import functools
from typing import Any

import pytest
import torch

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.run import PlatformConfig, PretrainConfig
from mcore_rl.megatron.mesh import destroy_mesh
from mcore_rl.megatron.routers import routers
from mcore_rl.megatron.schedule import run_pass
from mcore_rl.model.build import copy_in
from mcore_rl.model.router_load import ExpertLoads, RouterLoad
from mcore_rl.train.state import TrainState
from mcore_rl.train.step import NextTokenHead, take_mtp_losses
from tests.parallel.parity import (
    LENGTH,
    MESHES,
    SEQUENCES,
    Tensors,
    assembled,
    batch,
    config_of,
    gradients_of,
    largest,
    random_weights,
    relative_errors,
    set_up_plain,
)
from tests.ranks import run_ranks
from tests.routed_batches import Case, local_microbatch, microbatches_of
from tests.tiny_models import TINY


def counted(config: PretrainConfig, initial: Tensors) -> ExpertLoads:
    state = set_up_plain(config)
    copy_in(state.chunks, initial)
    load = RouterLoad(state.chunks)
    run_pass(state.chunks, batch(state, 0), NextTokenHead(), backward=True)
    return load.gather(state.mesh)


@functools.cache
def single_rank(family: str) -> tuple[Tensors, ExpertLoads]:
    config = config_of(TINY[family], MeshConfig())
    initial = random_weights(config)
    return initial, run_ranks(counted, 1, config, initial)[0]


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "mesh"),
    [("qwen3_moe", mesh) for mesh in ("tp2", "pp2-vpp2", "cp2", "tp2-etp2-ep2")] + [("deepseek_v3", "pp2-vpp2")],
)
def test_gathered_counts_do_not_depend_on_the_mesh(family: str, mesh: str) -> None:
    initial, reference = single_rank(family)
    config = config_of(TINY[family], MESHES[mesh])
    for loads in run_ranks(counted, config.mesh.smallest_world, config, initial):
        assert loads.tokens_LE.tolist() == reference.tokens_LE.tolist()
    assert reference.tokens_LE[-1].sum() == SEQUENCES * LENGTH * config.model.moe.top_k


TINY_DEEPSEEK = TINY["deepseek_v3"]
# Without the bias, which each step moves; it would be another model for the next case.
MOE = TINY_DEEPSEEK.moe.model_copy(
    update={"balance": "global_aux_loss", "aux_loss_coeff": 0.5, "z_loss_coeff": 0.1, "expert_bias": False}
)
MODEL = TINY_DEEPSEEK.model_copy(update={"mtp_layers": 1, "moe": MOE})

EVERYWHERE = (
    Case(balance="aux_loss", micro_batch=1),
    Case(balance="seq_aux_loss", micro_batch=1, is_packed=True),
    Case(balance="aux_loss", micro_batch=1, is_packed=True, capacity_factor=0.75),
)
SEVERAL_ROWS = (
    Case(balance="seq_aux_loss", micro_batch=4),
    Case(balance="seq_aux_loss", micro_batch=2, is_packed=True),
    Case(balance="aux_loss", micro_batch=2, is_packed=True, capacity_factor=0.75),
)
RUNNING = Case(balance="global_aux_loss", micro_batch=2, is_packed=True)
WHOLE_BATCH = (Case(balance="global_aux_loss", micro_batch=1), Case(balance="aux_loss", micro_batch=1))
PLAIN = PlatformConfig(layers="torch")
# The routers choose again in the backward pass, between forward passes of later microbatches.
RECOMPUTED = PlatformConfig(layers="torch", recompute="selective", recompute_modules=("moe",))
CASES: dict[str, tuple[MeshConfig, PlatformConfig, tuple[Case, ...]]] = {
    "tp2-cp2": (MeshConfig(tp=2, cp=2), PLAIN, (*EVERYWHERE, *SEVERAL_ROWS, RUNNING)),
    "pp2-vpp2-dp2, recomputed": (MeshConfig(pp=2, vpp=2, dp=2), RECOMPUTED, EVERYWHERE),
    "tp2-pp2": (MeshConfig(tp=2, pp=2), PLAIN, (*EVERYWHERE, SEVERAL_ROWS[-1], RUNNING)),
    "dp4": (MeshConfig(dp=4), PLAIN, WHOLE_BATCH),
}
"""Name -> mesh of four ranks, platform, cases."""


def outcomes(state: TrainState, cases: tuple[Case, ...], weights: Tensors) -> list[tuple[Any, dict[str, float]]]:
    """On a rank: for each case the pieces of the gradients, and the metrics."""
    copy_in(state.chunks, weights)
    load, found = RouterLoad(state.chunks), []
    for case in cases:
        for _, router in (pair for chunk in state.chunks for pair in routers(chunk)):
            # What the config of a run of this case would set, without building the model again.
            router.routing_type = case.balance
            router.config.moe_expert_capacity_factor = case.capacity_factor
        rows = list(microbatches_of(case))
        share = len(rows) // state.mesh.dp.size
        mine = rows[state.mesh.dp.rank * share : (state.mesh.dp.rank + 1) * share]
        multiple = state.config.mesh.zigzag
        microbatches = [local_microbatch(rows, case.is_packed, state, multiple) for rows in mine]
        gradients = gradients_of(state, microbatches)
        metrics = {metric.name: metric.value for metric in take_mtp_losses(state)}
        found.append((gradients, metrics | dict(load.gather(state.mesh).losses)))
    return found


def on_meshes(meshes: list[tuple[MeshConfig, PlatformConfig, tuple[Case, ...]]], weights: Tensors) -> list[Any]:
    found = []
    for mesh, platform, cases in meshes:
        config = config_of(MODEL, mesh, platform)
        found.append(outcomes(set_up_plain(config), cases, weights))
        destroy_mesh()
    return found


@pytest.mark.full
def test_router_losses_capacity_and_mtp_loss_do_not_depend_on_the_mesh() -> None:
    weights = random_weights(config_of(MODEL, MeshConfig()))
    # Gates that differ: equal ones would be dropped in any order.
    generator = torch.Generator().manual_seed(3)
    weights = {
        name: torch.randn(value.shape, generator=generator) if "router" in name else value
        for name, value in weights.items()
    }
    ranks = run_ranks(on_meshes, 4, list(CASES.values()), weights)
    wanted = sorted({case for _, _, cases in CASES.values() for case in cases}, key=str)
    # With a microbatch on each of dp4's ranks, the batch is in one microbatch of four rows.
    whole = Case(balance="global_aux_loss", micro_batch=4)
    (alone,) = run_ranks(on_meshes, 1, [(MeshConfig(), PLAIN, (*wanted, whole))], weights)
    references = dict(zip((*wanted, whole), alone[0], strict=True))
    for index, (name, (mesh, _, cases)) in enumerate(CASES.items()):
        for number, case in enumerate(cases):
            is_whole = case.balance == "global_aux_loss" and mesh.dp == 4
            pieces, metrics = references[whole if is_whole else case]
            gradients = assembled([rank[index][number][0] for rank in ranks])
            errors = relative_errors(gradients, assembled([pieces]))
            assert max(errors.values()) <= 1e-5, (name, str(case), largest(errors))
            for rank in ranks:
                assert rank[index][number][1] == pytest.approx(metrics, rel=1e-5), (name, str(case))
            assert {"moe/aux_loss", "moe/z_loss", "mtp/loss_nats"} == metrics.keys()
