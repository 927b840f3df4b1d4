"""GPUs by number and kind, as `8xH100`, for plans without a cluster's file."""

import re
from dataclasses import dataclass

from mcore_rl.config.cluster import ClusterConfig, NodeConfig
from mcore_rl.errors import ConfigError
from mcore_rl.planning.device import LARGEST_NODE, device_named

GPUS = re.compile(r"(\d+)[x*](.+)")


@dataclass(frozen=True, slots=True)
class Gpus:
    """A number of GPUs of one kind, in nodes of eight, or in a single smaller node."""

    count: int
    device: str

    def __str__(self) -> str:
        """Return the text as users write it."""
        return f"{self.count} x {self.device}"

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return -(-self.count // LARGEST_NODE)

    def cluster(self) -> ClusterConfig:
        """Return the cluster that has these GPUs, with all memory of the device and its usual network."""
        device = device_named(self.device, "--gpus")
        if device.memory_gib is None:
            raise ConfigError(
                f"--gpus {self.count}x{device.name}: the memory of this device is not known. Write a cluster's file "
                "with node.gpu_memory_gib, and give it to --cluster."
            )
        node = NodeConfig(
            gpus=min(self.count, LARGEST_NODE), device=device.name, gpu_memory_gib=device.memory_gib
        )
        return ClusterConfig(name=f"{self.count}x{device.name}", node=node)


def parse_gpus(text: str) -> Gpus:
    """Return the GPUs that a text such as `8xH100` names; ConfigError if it names none, or does not fill nodes of
    eight.
    """
    match = GPUS.fullmatch(text.strip())
    if match is None or int(match[1]) == 0:
        raise ConfigError(f"--gpus {text}: wanted a number and a kind of GPU, as 8xH100.")
    count = int(match[1])
    if count > LARGEST_NODE and count % LARGEST_NODE:
        raise ConfigError(
            f"--gpus {text}: more than {LARGEST_NODE} GPUs are nodes of {LARGEST_NODE}. Give a multiple of "
            f"{LARGEST_NODE}, or a cluster's file (--cluster)."
        )
    return Gpus(count, device_named(match[2], "--gpus").name)
