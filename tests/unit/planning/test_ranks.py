import pytest
import torch.distributed as dist

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.model import ModelConfig, MoEConfig
from mcore_rl.fake_world.groups import fake_rank
from mcore_rl.planning.ranks import view_of_rank
from tests.ranks import run_ranks

MODEL = ModelConfig(num_layers=8, moe=MoEConfig(num_experts=16, ffn_hidden_size=8))
MESHES = (
    (MeshConfig(tp=2, cp=2, pp=2, vpp=2, ep=4, etp=2, dp="auto"), 32),
    (MeshConfig(tp=4, pp=4, ep=2, dp="auto"), 32),
    (MeshConfig(ep=8, dp="auto"), 16),
)
RANKS = (0, 5, 11)
AXES = {"tp": "tp", "cp": "cp", "dp": "dp", "pp": "pp", "ep": "ep", "etp": "etp", "copy": "expert_dp"}


def groups_of_megatron():
    """Index and ranks of every axis, by mesh and rank."""
    found = []
    for config, world in MESHES:
        for rank in RANKS:
            with fake_rank(config, rank, world) as mesh:
                axes = {name: getattr(mesh, axis) for name, axis in AXES.items()}
                found.append(
                    {
                        name: (axis.rank, tuple(dist.get_process_group_ranks(axis.group)))
                        for name, axis in axes.items()
                    }
                )
    return found


@pytest.fixture(scope="module")
def groups():
    cases = [(config, world, rank) for config, world in MESHES for rank in RANKS]
    return list(zip(cases, run_ranks(groups_of_megatron, 1)[0], strict=True))


def test_a_rank_has_the_coordinates_and_groups_that_megatron_gives_it(groups):
    for (config, world, rank), expected in groups:
        view = view_of_rank(MODEL, config, rank, world, 8)
        planned = {
            name: (index, view.groups[name].ranks if name in view.groups else (rank,))
            for name, index in view.coordinates.items()
        }
        assert planned == expected


def test_a_rank_knows_its_layers_its_experts_and_what_crosses_nodes():
    view = view_of_rank(MODEL, MESHES[0][0], 29, 32, 8)
    assert view.node == 3
    assert (view.layers, view.experts) == ((2, 3, 6, 7), range(8, 12))
    assert {name: group.num_nodes for name, group in view.groups.items()} == {
        "tp": 1,
        "cp": 1,
        "dp": 2,
        "pp": 2,
        "etp": 1,
        "ep": 1,
        "copy": 2,
    }
