import dataclasses
from pathlib import Path

import pytest

from mcore_rl.config.cluster import ClusterConfig
from mcore_rl.config.load import load_config
from mcore_rl.errors import ConfigError
from mcore_rl.planning.device import DEVICES, device_named, device_of, known_device

CLUSTERS = Path(__file__).parents[3] / "launch" / "clusters"


def cluster(*overrides):
    return load_config(ClusterConfig, CLUSTERS / "example_h100.toml", overrides)


@pytest.mark.parametrize("name", ["A100", "H100", "H200", "H800", "B200", "GB200", "GB300", "MI300X"], ids=str)
def test_a_device_that_times_are_planned_for_has_every_number_and_its_source(name):
    device = DEVICES[name]
    assert device.name == name and device.source and device.memory_gib
    assert all(value > 0 for value in dataclasses.asdict(device.links).values())


def test_the_example_clusters_name_devices_of_the_table_with_their_memory():
    names = {}
    for path in CLUSTERS.glob("*.toml"):
        device = device_of(load_config(ClusterConfig, path))
        names[path.stem] = device and (device.name, device.links.domain)
    assert names == {
        "example_1gpu": ("H100", 1),
        "example_a100_apptainer": ("A100", 4),
        "example_cpu": None,
        "example_h100": ("H100", 8),
        "example_venv": ("H200", 8),
    }


def test_links_of_an_nvl72_go_over_nodes_and_a_cluster_may_say_otherwise():
    nvl72 = cluster("node.device=gb200", "node.gpus=4")
    assert device_of(nvl72).links.domain == 72
    own = cluster("node.link_domain=2", "node.nic_gbit_per_s=100")
    assert (device_of(own).links.domain, device_of(own).links.nic_gbit_per_s) == (2, 100.0)


def test_an_unknown_device_and_more_memory_than_a_known_one_has_are_refused():
    with pytest.raises(ConfigError, match=r'node.device="H1OO" is no known device. Did you mean .*H100'):
        device_named("H1OO")
    with pytest.raises(ConfigError, match=r'gpu_memory_gib=141 is more than node.device="H100" has \(80 GiB'):
        device_of(cluster("node.gpu_memory_gib=141"))
    assert known_device("AMD Instinct MI300X").name == "MI300X", "by the name that torch gives"
