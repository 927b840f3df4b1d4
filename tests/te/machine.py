"""A machine with the real TransformerEngine and without a GPU; imported first in the server whose forks are ranks.

TransformerEngine is imported, and makes its layers, only where torch says that there is a GPU: torch says so meanwhile,
and never else. Models are built, saved and loaded so; nothing can be computed with its layers. This package then finds
TransformerEngine and no GPU: `platform.layers` chooses between both kinds of layers in one process. What Megatron would
compute by TransformerEngine beside layers, its Adam and the product of a router, has the patches of a machine without.
"""

from dataclasses import replace

from mcore_rl.megatron.patches import gpu_packages
from tests.te.seeming import seeming_gpu


def _find() -> gpu_packages.GpuPackages:
    with seeming_gpu():
        machine = gpu_packages.find_packages()
    assert machine.has_te, machine.unusable
    return replace(machine, has_cuda=False)


MACHINE = _find()
gpu_packages.find_packages = lambda: MACHINE

from mcore_rl.megatron.patches import table  # noqa: E402  # it asks what is found
from mcore_rl.storage.checkpoint import megatron_version  # noqa: E402

for patch in table.patches_for(megatron_version(), has_cuda=False, has_te=False, has_apex=False):
    if patch not in table.INSTALLED:
        patch.apply()
