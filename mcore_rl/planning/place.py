"""The machine that a plan is for: devices, nodes, servers, and the speeds that they reach."""

from dataclasses import dataclass, field, replace
from math import inf

from mcore_rl.config.cluster import ClusterConfig
from mcore_rl.planning.device import Device, device_of
from mcore_rl.planning.memory import GIB
from mcore_rl.planning.parts import Workload, workload_of
from mcore_rl.planning.rates import Rates, rates_of
from mcore_rl.planning.rollout import KnownParts, RlStep, engine_of, rl_step
from mcore_rl.planning.training import Training


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """The ranks of a plan, but for their number."""

    ranks_per_node: int
    room_bytes: float
    """Memory of a device for tensors."""
    device: Device | None
    """Device; None or one without bandwidths: nothing is predicted of time."""
    host_bytes: float = inf
    """Main memory of a node; inf: not known."""
    rates: Rates = field(default_factory=Rates)
    """Parts of the device's peaks that are reached, and the host's cost."""
    server_gpus: int = 0
    """GPUs of inference servers in addition to these ranks."""
    completion_tokens: float | None = None
    """Mean length of a completion; None: half of the longest."""

    def workload(self, training: Training) -> Workload | None:
        """Return the optimizer step of a training; None if the device's bandwidths are not known."""
        if self.device is None or self.device.links is None:
            return None
        return workload_of(training, self.device, self.rates)

    def rl_step(self, training: Training, work: Workload, known: KnownParts | None = None) -> RlStep | None:
        """Return the rollout batch of a training with its updates; None without reinforcement learning, or if the
        number of servers is not known.

        Args:
            training: The training.
            work: Its optimizer step (`workload`).
            known: Parts of other steps of the same run and place, if there are any; more are added.
        """
        if training.rollouts is None:
            return None
        engine = engine_of(training, self.server_gpus, self.rates)
        if engine is None:
            return None
        return rl_step(training, work, engine, self.completion_tokens, known or KnownParts())


def place_of(
    cluster: ClusterConfig,
    *,
    server_nodes: int = 0,
    completion_tokens: int | None = None,
    imbalance: float | None = None,
) -> Place:
    """Return the ranks of a cluster, in addition to nodes of servers.

    Args:
        cluster: The cluster.
        server_nodes: Nodes of inference servers in addition.
        completion_tokens: Mean length of a completion; None: half of the longest.
        imbalance: Tokens sent to the experts of the fullest rank, as a multiple of the mean; None: from the cluster's
            rates, if they have it.

    Raises:
        ConfigError: The cluster's device is not known by the name given.
    """
    node, rates = cluster.node, rates_of(cluster.rates)
    if imbalance is not None:
        rates = replace(rates, imbalance=imbalance, imbalance_source="--imbalance")
    return Place(
        ranks_per_node=node.ranks_per_node,
        room_bytes=(node.gpu_memory_gib - node.reserved_gib) * GIB if node.gpus else inf,
        device=device_of(cluster),
        host_bytes=inf if node.memory_gib == "all" else node.memory_gib * GIB,
        rates=rates,
        server_gpus=server_nodes * node.gpus,
        completion_tokens=completion_tokens,
    )
