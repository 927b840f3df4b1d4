from pathlib import Path

import pytest

from mcore_rl.checks.cluster import check_cluster, placement, seconds_of
from mcore_rl.config.cluster import ClusterConfig
from mcore_rl.config.load import dump_config, load_config
from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.model import ModelConfig, MoEConfig

CLUSTERS = sorted((Path(__file__).parents[3] / "launch" / "clusters").glob("*.toml"))
H100 = next(path for path in CLUSTERS if path.stem == "example_h100")
MOE = ModelConfig(moe=MoEConfig(num_experts=64, ffn_hidden_size=8))


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.stem)
def test_every_example_loads_passes_its_checks_and_comes_back_from_toml(path, tmp_path):
    cluster = load_config(ClusterConfig, path)
    check_cluster(cluster)
    (tmp_path / "again.toml").write_text(dump_config(cluster))
    assert load_config(ClusterConfig, tmp_path / "again.toml") == cluster


@pytest.mark.parametrize(
    ("time", "seconds"),
    [
        ("90", 5400),
        ("90:30", 5430),
        ("12:00:00", 43200),
        ("2-0", 172800),
        ("1-02:03", 93780),
        ("1-02:03:04", 93784),
        ("1:2:3:4", None),
        ("", None),
        ("infinite", None),
    ],
)
def test_durations_are_read_as_slurm_reads_them(time, seconds):
    assert seconds_of(time) == seconds


@pytest.mark.parametrize(
    ("mesh", "ranks_per_node", "world", "refused", "warned"),
    [
        (MeshConfig(tp=8, ep=8), 8, 64, (), ()),
        (MeshConfig(tp=16), 8, 64, ("mesh.tp=16",), ()),
        (MeshConfig(tp=4, etp=16), 8, 64, ("mesh.etp=16",), ()),
        (MeshConfig(tp=4), 6, 12, ("mesh.tp=4",), ()),
        (MeshConfig(tp=4), 6, 4, (), ()),
        (MeshConfig(ep=64), 8, 64, (), ("mesh.ep=64",)),
        (MeshConfig(ep=8, etp=2), 8, 64, (), ("mesh.ep=8 (x etp=2)",)),
        (MeshConfig(tp=4, cp=4), 8, 64, (), ("mesh.cp=4",)),
    ],
)
def test_tensor_parallel_groups_stay_inside_a_node_and_others_are_warned_of(
    mesh, ranks_per_node, world, refused, warned
):
    placed = placement(MOE, mesh, ranks_per_node, world)
    for found, wanted in ((placed.refused, refused), (placed.warnings, warned)):
        assert [any(sentence.startswith(start) for start in wanted) for sentence in found] == [True] * len(wanted)
