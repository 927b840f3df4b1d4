"""The counts of all layers and tokens are the same on every mesh."""

import functools

import pytest

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.run import PretrainConfig
from mcore_rl.megatron.schedule import run_pass
from mcore_rl.model.global_tensors import copy_in
from mcore_rl.model.router_load import ExpertLoads, RouterLoad
from mcore_rl.train.objectives import NextTokenHead
from tests.parallel.parity import LENGTH, SEQUENCES, Tensors, batch, config_of, random_weights
from tests.parallel.plain import set_up_plain
from tests.ranks import run_ranks
from tests.tiny_models import TINY

MESHES = {
    "tp2": MeshConfig(tp=2),
    "pp2-vpp2": MeshConfig(pp=2, vpp=2),
    "cp2": MeshConfig(cp=2),
    "tp2-etp2-ep2-dp2": MeshConfig(tp=2, etp=2, ep=2, dp=2),
}


def counted(config: PretrainConfig, initial: Tensors) -> ExpertLoads:
    """On a rank: the gathered counts of one training batch."""
    state = set_up_plain(config)
    copy_in(state.chunks, initial)
    load = RouterLoad(state.chunks)
    run_pass(state.chunks, batch(state, 0), NextTokenHead(), backward=True)
    return load.gather(state.mesh)


@functools.cache
def single_rank(family: str) -> tuple[Tensors, ExpertLoads]:
    """Initial weights of a family, and the counts on one rank."""
    config = config_of(TINY[family], MeshConfig())
    initial = random_weights(config)
    return initial, run_ranks(counted, 1, config, initial)[0]


@pytest.mark.parametrize(
    ("family", "mesh"), [("qwen3_moe", mesh) for mesh in MESHES] + [("deepseek_v3", "pp2-vpp2")]
)
def test_gathered_counts_do_not_depend_on_the_mesh(family: str, mesh: str) -> None:
    initial, reference = single_rank(family)
    config = config_of(TINY[family], MESHES[mesh])
    for loads in run_ranks(counted, config.mesh.smallest_world, config, initial):
        assert loads.tokens_LE.tolist() == reference.tokens_LE.tolist()
    assert reference.tokens_LE[-1].sum() == SEQUENCES * LENGTH * config.model.moe.top_k
