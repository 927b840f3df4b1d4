"""`fake_rank`: a single rank of a world in which no other rank exists."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.run import PlatformConfig
from mcore_rl.megatron.mesh import Mesh, build_mesh, destroy_mesh, seed_ranks, without_other_groups
from mcore_rl.megatron.platform import Platform, stop


@contextmanager
def fake_rank(config: MeshConfig, rank: int, world_size: int) -> Iterator[Mesh]:
    """Leave the process group, and act as `rank` of a mesh on `world_size` ranks: collectives do not wait or move data.

    Torch's groups belong to the process, so that a process is a single rank at a time.
    """
    stop()
    functions: Any = dist  # Megatron and torch look these up by name
    new_group, gather, show_error = dist.new_group, dist.all_gather_object, sys.excepthook

    def new_fake_group(ranks: Sequence[int] | None = None, **options: Any) -> Any:
        # Megatron asks for gloo groups by name, which the fake store cannot make.
        return new_group(ranks, **options | {"backend": "fake"})

    def gather_own(object_list: list[Any], obj: Any, group: Any = None) -> None:
        # Ranks exchange the kinds of their parameters; other ranks' kinds would only name groups that are empty on this
        # rank.
        object_list[:] = [obj] * len(object_list)

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    functions.new_group, functions.all_gather_object = new_fake_group, gather_own
    try:
        with without_other_groups(rank):
            mesh = build_mesh(config)
        seed_ranks(1)
        yield mesh
    finally:
        destroy_mesh()
        functions.new_group, functions.all_gather_object = new_group, gather
        dist.destroy_process_group()
        # Every start of a group puts its rank before all later tracebacks.
        sys.excepthook = show_error


def fake_platform(settings: PlatformConfig, mesh: Mesh) -> Platform:
    """Return the platform of a fake rank, which computes on the CPU with our layers whatever `settings` says."""
    return Platform(
        device=torch.device("cpu"),
        dtype=torch.bfloat16 if settings.precision == "bf16" else torch.float32,
        layers="torch",
        rank=mesh.world.rank,
        local_rank=0,
        world_size=mesh.world.size,
        deterministic=False,
    )
