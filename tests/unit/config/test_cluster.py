from pathlib import Path

import pytest

from mcore_rl.checks.cluster import check_cluster, placement, seconds_of
from mcore_rl.config.cluster import ClusterConfig
from mcore_rl.config.load import dump_config, load_config
from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.model import ModelConfig, MoEConfig
from mcore_rl.errors import ConfigError

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
    ("override", "message"),
    [
        ("slurm.partion=gpu", "Did you mean slurm.partition?"),
        ("node.gpu=8", "Did you mean node.gpus?"),
        ("container.kind=docker", 'expected one of "none", "pyxis", "apptainer"'),
        ("survival.starter=mpirun", 'expected one of "torchrun", "srun"'),
    ],
)
def test_what_no_cluster_has_is_told_with_what_was_meant(override, message):
    with pytest.raises(ConfigError, match=f"(?s){override.partition('=')[0]}.*{message.replace('?', '[?]')}"):
        load_config(ClusterConfig, H100, [override])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["node.ranks=4"], "node.gpus=8 and node.ranks=4"),
        (["node.gpus=0"], "no rank would be started"),
        (["node.reserved_gib=90"], "leaves nothing of node.gpu_memory_gib=79.6"),
        (["container.kind=none"], 'container.kind="none" has no such field, which is of "pyxis", "apptainer"'),
        (["container.image=none"], 'container.image = "none" on the command line: expected text that is not empty'),
        (['container.mounts=["data"]'], 'container.mounts names "data"'),
        (["slurm.time=tomorrow"], 'slurm.time="tomorrow" is no duration'),
        (["slurm.time=10:00"], "survival.signal_s=600 is not ahead of a limit of 600 s"),
        (['slurm.options=["exclusive"]'], 'slurm.options names "exclusive"'),
        (['environment={"A B" = "1"}'], 'environment names "A B"'),
        (['environment={"PYTHONPATH" = "/a"}'], "environment.PYTHONPATH would hide"),
        (["container.kind=apptainer", 'container.options=["--cleanenv"]'], "ranks would not hear of Slurm"),
    ],
)
def test_settings_of_a_cluster_that_do_not_agree_are_refused(overrides, message):
    with pytest.raises(ConfigError) as raised:
        check_cluster(load_config(ClusterConfig, H100, overrides))
    assert message in str(raised.value)


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
