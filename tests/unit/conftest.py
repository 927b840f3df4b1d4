"""One rank in the test's own process."""

from collections.abc import Iterator

import pytest

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.run import PlatformConfig
from mcore_rl.megatron.mesh import Mesh, build_mesh, destroy_mesh, seed_ranks
from mcore_rl.megatron.platform import start


@pytest.fixture(scope="module")
def one_rank() -> Iterator[Mesh]:
    start(PlatformConfig())
    yield _seeded(build_mesh(MeshConfig()))
    destroy_mesh()


def _seeded(mesh: Mesh) -> Mesh:
    seed_ranks(1)
    return mesh
