from collections.abc import Iterator

import pytest

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.run import PlatformConfig
from mcore_rl.megatron.mesh import Mesh, build_mesh, destroy_mesh, seed_ranks
from mcore_rl.megatron.platform import start


@pytest.fixture
def mesh() -> Iterator[Mesh]:
    start(PlatformConfig(layers="torch"))
    mesh = build_mesh(MeshConfig())
    seed_ranks(1)
    yield mesh
    destroy_mesh()
