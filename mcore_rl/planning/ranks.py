"""The place of a rank: its coordinates, the groups it communicates with, and the layers and experts that it has.

Megatron numbers ranks tp first, then cp, dp, pp; for experts etp first, then ep, copies, pp.
"""

from dataclasses import dataclass

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.model import ModelConfig
from mcore_rl.planning.weights import layers_by_stage


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Ranks that exchange something."""

    ranks: tuple[int, ...]
    num_nodes: int
    """Number of nodes that the ranks are on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankView:
    """One rank of a world."""

    rank: int
    node: int
    coordinates: dict[str, int]
    """Index on each axis: tp, cp, dp, pp; etp, ep, copy for the experts."""
    groups: dict[str, Group]
    """Groups of more than one rank, by axis."""
    layers: tuple[int, ...]
    experts: range
    """Indices of the experts of each MoE layer that the rank has."""


def view_of_rank(
    model: ModelConfig, mesh: MeshConfig, rank: int, world_size: int, ranks_per_node: int
) -> RankView:
    """Return the place of `rank`; the mesh must have passed the checks for this world."""
    dp = world_size // mesh.model_parallel
    axes = _axes({"tp": mesh.tp, "cp": mesh.cp, "dp": dp, "pp": mesh.pp}, rank)
    if model.is_moe:
        copies = world_size // (mesh.etp * mesh.ep * mesh.pp)
        axes |= _axes({"etp": mesh.etp, "ep": mesh.ep, "copy": copies, "pp": mesh.pp}, rank)
    groups = {}
    for name, (index, size, stride) in axes.items():
        if size > 1:
            ranks = tuple(rank + (other - index) * stride for other in range(size))
            groups[name] = Group(ranks=ranks, num_nodes=len({rank // ranks_per_node for rank in ranks}))
    local = model.moe.num_experts // mesh.ep
    ep = axes["ep"][0] if "ep" in axes else 0
    return RankView(
        rank=rank,
        node=rank // ranks_per_node,
        coordinates={name: index for name, (index, _, _) in axes.items()},
        groups=groups,
        layers=tuple(layers_by_stage(model, mesh)[axes["pp"][0]]),
        experts=range(ep * local, (ep + 1) * local),
    )


def _axes(sizes: dict[str, int], rank: int) -> dict[str, tuple[int, int, int]]:
    """Return index, size and stride of each axis; the first axis changes fastest."""
    axes, stride = {}, 1
    for name, size in sizes.items():
        axes[name] = (rank // stride % size, size, stride)
        stride *= size
    return axes
