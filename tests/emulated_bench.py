"""Steps of `make gpu` with small shapes on an emulated GPU, and the logits of every family."""

from typing import Any

from bench.gpu import equal, steps
from bench.gpu.device import Machine
from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.run import PlatformConfig
from mcore_rl.megatron import platform
from mcore_rl.megatron.mesh import build_mesh, destroy_mesh, seed_ranks


def run(*names: str) -> dict[str, Any]:
    """Return each step's summary, figures and failed comparisons."""
    found = {}
    for name in names:
        mesh: Any = None
        if name in steps.NEEDS_MESH:
            destroy_mesh()
            platform.start(PlatformConfig(layers="torch"))
            mesh = build_mesh(MeshConfig())
            seed_ranks(1)
        on = Machine(is_gpu=True, mesh=mesh)
        summary = steps.ALL[name](on)
        found[name] = {"summary": summary, "figures": on.figures, "wrong": on.wrong}
    platform.stop()
    return found


def families() -> dict[str, float]:
    """How far every family's logits on the emulated GPU are from those of transformers on the host."""
    platform.start(PlatformConfig())
    machine = Machine(is_gpu=True, mesh=build_mesh(MeshConfig()))
    seed_ranks(1)
    differences = {case: equal.logit_difference(machine, case) for case in equal.FAMILY_CASES}
    platform.stop()
    return differences
