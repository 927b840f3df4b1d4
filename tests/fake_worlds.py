"""`fake_rank`: one rank of a world whose other ranks do not exist: groups and shapes are right, and values garbage."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from mcore_rl.backend.platform import stop
from mcore_rl.config.mesh import MeshConfig
from mcore_rl.parallel.mesh import Mesh, build_mesh, destroy_mesh, seed_ranks


@contextmanager
def fake_rank(config: MeshConfig, rank: int, world_size: int) -> Iterator[Mesh]:
    """Be `rank` of a mesh; in a process of its own, as torch's groups belong to the process."""
    if dist.is_initialized():
        stop()
    new_group, gather = dist.new_group, dist.all_gather_object

    def new_fake_group(*args: Any, backend: str | None = None, **kwargs: Any) -> Any:
        # Megatron asks for gloo groups by name, which the fake store cannot make.
        return new_group(*args, backend="fake", **kwargs)

    def gather_own(objects: list[Any], own: Any, group: Any = None) -> None:
        objects[:] = [own] * len(objects)

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())  # type: ignore[no-untyped-call]
    dist.new_group, dist.all_gather_object = new_fake_group, gather_own
    try:
        mesh = build_mesh(config)
        seed_ranks(1)
        yield mesh
    finally:
        destroy_mesh()
        dist.new_group, dist.all_gather_object = new_group, gather
        dist.destroy_process_group()
